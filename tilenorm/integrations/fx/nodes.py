"""Read the nodes of graphs: of torch-level graphs, from TorchDynamo, and of aten-level graphs."""

import operator
from functools import cache
from numbers import Number, Real
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...ops.pytorch.placements import is_distributed

TORCH_MODULES = ("torch", "torch.nn.functional", "torch.functional", "_operator")
ALIASES = {
    **dict.fromkeys(("truediv", "true_divide", "divide"), "div"),
    **{"multiply": "mul", "subtract": "sub"},
}
# Modules whose functions write to no tensor, apart from those that `writes` lists.
PURE_MODULES = (*TORCH_MODULES, "torch._C._linalg", "torch._C._nn", "math", "builtins")
# The metadata keys of a node's traced value: of make_fx and torch.export, and of TorchDynamo.
VALUES = ("val", "example_value")
# Operators with a graph or a kernel of the user's, in a form that writes to no tensor.
FUNCTIONAL = ("triton_kernel_wrapper_functional", "auto_functionalized", "auto_functionalized_v2")
FUNCTIONAL += ("flex_attention", "flex_attention_backward")
# A tensor as it is. make_fx writes `alias` from PyTorch 2.14 on where it wrote `detach`.
DETACHES = ("detach", "alias")
IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "imatmul")
# PyTorch's functions and methods give some arguments other names than the schemas do.
OTHER_NAMES = {"input": "self", "axis": "dim", "keepdims": "keepdim"}
CASTS = (
    *("to", "_to_copy", "type", "type_as", "convert_element_type"),
    *("float", "half", "bfloat16", "double"),
)
DTYPES_16_BIT = (torch.float16, torch.bfloat16)
NUMBERS = (Number, SymFloat, SymInt, SymBool)


class Left(Exception):
    """The pass does not replace a norm; the message gives the reason."""


def name_of(node: Node) -> str | None:
    """PyTorch's name of the function that a node calls; None if it may write to its arguments."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return None
    target = node.target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace in ("aten", "prims") else None
    if node.op == "call_method":
        return ALIASES.get(target, target)
    named = getattr(target, "__module__", None) in TORCH_MODULES
    name = getattr(target, "__name__", None) if named else None
    return ALIASES.get(name, name)


def writes(node: Node) -> bool:
    """Whether a node may write to an existing tensor or change a mode such as grad mode."""
    target = node.target
    if node.op == "call_method":
        method = str(target)
        private = method.startswith("__")
        return method.startswith(("__i", "__set")) or (method.endswith("_") and not private)
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if isinstance(target, HigherOrderOperator):
        return target.name() not in FUNCTIONAL
    if getattr(target, "__module__", None) not in PURE_MODULES:
        return True  # for example: a call of a subgraph, or a switch of grad mode or autocast
    name = getattr(target, "__name__", "")
    if name in IN_PLACE or name.endswith("_") or "out" in node.kwargs:
        return True
    # relu, dropout and similar functions accept `inplace` by position, after other bools. Any
    # positional True of such a function therefore counts as inplace=True.
    takes_inplace = target.__module__ == "torch.nn.functional"
    return takes_inplace and any(a is True for a in (*node.args, node.kwargs.get("inplace")))


def written(first: Node, end: Node, parts: tuple[Node, ...] = ()) -> bool:
    """Whether a node from `first` up to `end`, outside `parts`, may write to a tensor."""
    while first is not end:
        if writes(first) and first not in parts:
            return True
        first = first.next
    return False


def key_of(node: Node) -> str:
    """The metadata key under which tracing stored a node's value."""
    return next((key for key in VALUES if key in node.meta), VALUES[0])


def values_of(node: Node) -> Any:
    """The value that tracing stored for a node: fake tensors, numbers, or tuples of them."""
    return node.meta.get(key_of(node))


def value_of(node: object) -> Tensor | None:
    """The fake tensor of a node, or its DTensor. None for other tensor subclasses, for torch.func
    wrappers, for numbers, and for layouts without strides.
    """
    value = values_of(node) if isinstance(node, Node) else None
    plain = isinstance(value, FakeTensor) or type(value) in (Tensor, torch.nn.Parameter)
    strided = (plain or is_distributed(value)) and value.layout == torch.strided
    return value if strided and not is_functorch_wrapped_tensor(value) else None


def number_of(value: object) -> float | None:
    """The value of a number or of a node that stands for one, else None.

    Reading the value of a symbolic number adds a guard on this value to the graph. A number that
    depends on data has no value while a graph is traced.
    """
    if isinstance(value, Node):
        value = values_of(value)
    if not isinstance(value, Real | SymFloat | SymInt):
        return None
    try:
        return float(value)
    except (GuardOnDataDependentSymNode, OverflowError):
        return None


def constant_of(value: object) -> float | None:
    """The value of a number that is the same in every call, else None. Adds no guard."""
    if isinstance(value, Node):
        value = values_of(value)
    if isinstance(value, SymInt | SymFloat):
        as_int = isinstance(value, SymInt)
        value = value.node.maybe_as_int() if as_int else value.node.maybe_as_float()
    return number_of(value)


def is_idle(node: Node) -> bool:
    """Whether a node has no effect on results: a metadata check, which torch.export inserts, or an
    unused detach, which tracing autograd leaves.
    """
    if node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    detaches = name_of(node) in DETACHES and len(node.args) == 1 and not node.kwargs
    return detaches and all(map(is_idle, node.users))


def users_of(node: Node) -> list[Node]:
    """The users of a node that are not idle."""
    return [user for user in node.users if not is_idle(user)]


def only_user(node: Node) -> Node | None:
    """The node's user, not counting idle ones, if there is exactly one, else None."""
    users = users_of(node)
    return users[0] if len(users) == 1 else None


def is_recomputed(node: Node) -> bool:
    return "recompute" in node.meta or "ac_graph_id" in node.meta


def item_of(node: Node) -> tuple[Node | None, Any]:
    """What a node reads a result or a part of, and the index; None for other nodes."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return None, None
    source, index = node.args
    return (source, index) if isinstance(source, Node) else (None, None)


def erase(node: Node) -> None:
    """Erase a node and its users, all of which are idle."""
    for user in list(node.users):
        erase(user)
    node.graph.erase_node(node)


def bind(node: Node) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order, with the schema's defaults.

    The call is one of an op, or of PyTorch's function or method of an aten op's name. Raises Left
    if no schema takes the arguments.
    """
    target: Any = node.target
    is_op = isinstance(target, OpOverload)
    why = Left(f"{node.name}: PyTorch has no such function")
    for schema in [target._schema] if is_op else _schemas(name_of(node)):
        try:
            return _bound(node, schema, {} if is_op else OTHER_NAMES)
        except Left as reason:
            why = reason
    raise why


@cache
def _schemas(name: str) -> list:
    """The schemas of the overloads of an aten op that take no output tensor, without TorchScript's,
    whose names start with prim_.
    """
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else packet.overloads()
    schemas = [getattr(packet, o)._schema for o in overloads if not o.startswith("prim_")]
    return [s for s in schemas if not any(argument.is_out for argument in s.arguments)]


def _bound(node: Node, schema, other_names: dict[str, str]) -> dict[str, Any]:
    """The arguments of a call by name. Raises Left if they do not fit the schema."""
    takes = {argument.name: argument for argument in schema.arguments}
    positional = [name for name, argument in takes.items() if not argument.kwarg_only]
    named: dict[str, Any] = dict(zip(positional, node.args, strict=False))
    others = {k if k in takes else other_names.get(k, k): v for k, v in node.kwargs.items()}
    wrong = [name for name in others if name not in takes or name in named]
    if wrong or len(others) < len(node.kwargs) or len(node.args) > len(positional):
        raise Left(f"{node.name}: {schema.name} takes no such arguments {wrong}")
    named |= others
    for name, argument in takes.items():
        if name not in named and not argument.has_default_value():
            raise Left(f"{node.name}: argument {name!r} of {schema.name} is missing")
        kind = str(argument.real_type).replace("SymInt", "int")
        if name in named and not _fits(named[name], kind):
            got = named[name]
            raise Left(f"{node.name}: argument {name!r} of {schema.name} takes {kind}, got {got}")
    return {name: named.get(name, argument.default_value) for name, argument in takes.items()}


def _fits(value: Any, kind: str) -> bool:
    """Whether a schema's type takes a value. A node fits every type if tracing stored no value.

    Bools, lists of bools, and tensors are told from others. A number may stand for a tensor, as in
    torch.mul(2, x).
    """
    if isinstance(value, Node):
        value = values_of(value)
        if value is None:
            return True
    if value is None:
        return kind.startswith("Optional")
    if "bool" in kind:
        return isinstance(value, bool if kind == "bool" else tuple | list)
    is_tensor = isinstance(value, Tensor)
    return is_tensor or isinstance(value, NUMBERS) if "Tensor" in kind else not is_tensor


def argument_of(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))


def operands(node: Node) -> tuple[Any, ...]:
    """The two operands of an add, mul or div; () if the call has alpha or a rounding mode."""
    first, second, *rest = bind(node).values()
    return (first, second) if all(value in (1, None) for value in rest) else ()


def operands_of(name: str, node: object) -> tuple[Any, ...]:
    """The two operands of a node if it calls the operation of this name, else ()."""
    return operands(node) if isinstance(node, Node) and name_of(node) == name else ()


def in_turn(pair: tuple[Any, ...]) -> tuple[tuple[Any, Any], ...]:
    """Two operands in both orders; () for no operands."""
    return (pair, pair[::-1]) if pair else ()


def cast_input(node: object) -> Node | None:
    """The input of a node that only changes the dtype; None for any other node."""
    if not isinstance(node, Node) or name_of(node) not in CASTS:
        return None
    source = argument_of(node)
    before, after = value_of(source), value_of(node)
    return None if before is None or after is None or before.device != after.device else source


def before_exact_casts(node: Node) -> Node:
    """The node before all casts that change no number: to the same dtype, or 16 bits to float32."""
    while (source := cast_input(node)) is not None:
        before, after = value_of(source).dtype, value_of(node).dtype
        if before != after and (before not in DTYPES_16_BIT or after != torch.float32):
            break
        node = source
    return node
