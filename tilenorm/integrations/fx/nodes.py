"""Read the nodes of graphs: of torch-level graphs, from TorchDynamo, and of aten-level graphs.

A graph may hold a call that PyTorch would refuse. `bind` reads the arguments of a call by the
schema of its op, and gives the reason where they do not fit it.
"""

import inspect
import operator
from collections.abc import Callable
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
from torch.nn.functional import silu

from ...ops.sharding import is_distributed

TORCH_MODULES = (
    *("torch", "torch.nn.functional", "torch.functional", "torch._C._linalg"),
    "_operator",
)
ALIASES = {
    **dict.fromkeys(("truediv", "true_divide", "divide"), "div"),
    **{"multiply": "mul", "subtract": "sub", "negative": "neg"},
}
# Modules whose functions write to no tensor, apart from those that `writes` lists.
PURE_MODULES = (*TORCH_MODULES, "torch._C._nn", "math", "builtins")
# The metadata keys of a node's traced value: make_fx and torch.export use "val", TorchDynamo uses
# "example_value".
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
# Methods without an aten op, and an op that takes the same arguments.
SAME_ARGUMENTS = {
    **dict.fromkeys(("float", "half", "bfloat16", "double"), "clone"),
    "type": "to",
}
ARITHMETIC = ("add", "sub", "mul", "div")  # torch.mul(2, x) is a call that PyTorch takes
TAKE_SIZES = ("view", "reshape", "expand")  # methods that take sizes one by one too
ADDS_IN_PLACE = ("add_", torch.ops.aten.add_.Scalar, torch.ops.aten.add_.Tensor)


class Left(Exception):
    """The pass does not replace a norm; the message gives the reason."""


def name_of(node: Node) -> str | None:
    """PyTorch's name of the function that a node calls; None if it may write to its arguments."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return None
    target = node.target
    if node.op == "call_method":
        return ALIASES.get(target, target) if hasattr(Tensor, target) else None
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace in ("aten", "prims") else None
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
    # relu, dropout and similar functions also accept `inplace` by position, after other bools. Any
    # positional True of such a function therefore counts as inplace=True.
    takes_inplace = target.__module__ == "torch.nn.functional" and _takes_inplace(target)
    return takes_inplace and any(a is True for a in (*node.args, node.kwargs.get("inplace")))


@cache
def _takes_inplace(function) -> bool:
    """Whether a function has an argument `inplace`, or may have one."""
    try:
        return "inplace" in inspect.signature(function).parameters
    except ValueError:
        return True


def key_of(node: Node) -> str:
    """The metadata key under which tracing stored a node's value."""
    return next((key for key in VALUES if key in node.meta), VALUES[0])


def values_of(node: Node) -> Any:
    """The value that tracing stored for a node: fake tensors, numbers, or tuples of them."""
    return node.meta.get(key_of(node))


def value_of(node: object) -> Tensor | None:
    """The fake tensor of a node, or its DTensor.

    None for other tensor subclasses, torch.func wrappers and numbers. None also for a layout
    without strides, such as that of a sparse tensor.
    """
    value = values_of(node) if isinstance(node, Node) else None
    plain = isinstance(value, FakeTensor) or type(value) in (Tensor, torch.nn.Parameter)
    if (
        not (plain or is_distributed(value))
        or value.layout != torch.strided
        or is_functorch_wrapped_tensor(value)
    ):
        return None
    return value


def number_of(value: object) -> float | None:
    """The value of a number or of a node that stands for one, else None.

    Reading the value of a symbolic number adds a guard on this value to the graph. A number that
    depends on data has no value while a graph is traced.
    """
    if isinstance(value, Node):
        value = values_of(value)
    if not isinstance(value, Real | torch.SymFloat | torch.SymInt):
        return None
    try:
        return float(value)
    except (GuardOnDataDependentSymNode, OverflowError):
        return None


def constant_of(value: object) -> float | None:
    """The value of a number that is the same in every call, else None. Adds no guard."""
    if isinstance(value, Node):
        value = values_of(value)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        as_int = isinstance(value, torch.SymInt)
        value = value.node.maybe_as_int() if as_int else value.node.maybe_as_float()
    return number_of(value)


def is_idle(node: Node) -> bool:
    """Whether a node has no effect on results: a metadata check, or an unused detach.

    torch.export inserts the metadata checks. Tracing autograd leaves the unused detach nodes.
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
    """Whether activation checkpointing computes a node again."""
    return "recompute" in node.meta or "ac_graph_id" in node.meta


def item_of(node: Node) -> tuple[Node | None, int | None]:
    """The tuple that a node reads a result of, and the result's index; None for other nodes."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return None, None
    source, place = node.args
    return (source, place) if isinstance(source, Node) else (None, None)


def written(first: Node, last: Node, parts: tuple[Node, ...] = ()) -> bool:
    """Whether a node from `first` up to `last`, outside `parts`, may write to a tensor."""
    while first is not last:
        if writes(first) and first not in parts:
            return True
        first = first.next
    return False


def erase(node: Node) -> None:
    """Erase a node and its users, all of which are idle."""
    for user in list(node.users):
        erase(user)
    node.graph.erase_node(node)


def bind(node: Node) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order, with the schema's defaults.

    The call is one of an aten or prims op, or of PyTorch's function or method of an aten op's name.

    Raises Left if PyTorch would refuse the call: an argument is missing, unknown, given twice, or
    of a type that the op does not take.
    """
    if isinstance(node.target, OpOverload):
        return _fitted(node, node.target._schema, {}, True, (node.args, node.kwargs))
    if node.target is silu:  # aten's op has no argument inplace
        given = _by_signature(node, silu)
        if given["inplace"] is not False:
            raise Left(f"{node.name}: argument 'inplace' of silu is {given['inplace']}, not False")
        return {"self": given["input"]}
    name, is_operator = name_of(node), getattr(node.target, "__module__", None) == "_operator"
    args = node.args
    if node.op == "call_method":
        name = node.target
        if not args or not isinstance(args[0], Node):
            raise Left(f"{node.name} calls a method of no tensor")
        if name in TAKE_SIZES and len(args) > 1 and _is_size(args[1]):
            args = (args[0], list(args[1:]))
    if is_operator and (node.kwargs or len(args) != 2):
        raise Left(f"{node.name} calls an operator with other arguments than two operands")
    wraps, reasons = is_operator or name in ARITHMETIC, []
    for schema in _schemas(name):
        try:
            return _fitted(node, schema, OTHER_NAMES, wraps, (args, node.kwargs))
        except Left as reason:
            reasons.append(reason)
    if len(reasons) == 1:
        raise reasons[0]
    passed = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    raise Left(f"{node.name} calls {name} with ({', '.join(passed)}), which it does not take")


def bind_norm(node: Node) -> dict[str, Any]:
    """The arguments of a vector norm: self, ord, dim, keepdim and dtype; of F.normalize eps too.

    ord is 2 where the call leaves it out.

    Raises Left as bind does.
    """
    name, python = name_of(node), node.target
    if node.op == "call_method":
        python = getattr(Tensor, node.target)
    if not inspect.isfunction(python):
        args = bind(node)
        if name == "linalg_norm" and not isinstance(args["dim"], int):
            return args | {"dim": None}  # perhaps the norm of a matrix
        order = args["p"] if "p" in args else args["ord"]
        return args | {"ord": 2 if order is None else order}
    given = _by_signature(node, python)
    if given.get("out") is not None:
        raise Left(f"{node.name} has an argument out")
    schema = torch.ops.aten.linalg_vector_norm.default._schema
    first, order, *_ = given.values()
    if order == "nuc":
        order, given["dim"] = 2, None
    args = {"self": first, "ord": 2 if order in (None, "fro") else order, "dim": given["dim"]}
    args |= {"keepdim": given.get("keepdim", True), "dtype": given.get("dtype")}
    args = _fitted(node, schema, {}, False, ((), args))
    eps = given.get("eps", 0.0)
    if not _fits(eps, "float", None, False):
        raise Left(f"{node.name}: argument 'eps' takes float, got {eps}")
    return args | {"eps": eps}


def argument_of(node: Node) -> Any:
    """The first argument of a call. Raises Left as bind does."""
    return next(iter(bind(node).values()))


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


def summands(node: object) -> tuple[Any, ...]:
    """The two operands of an add, in place or not; () for any other node or value."""
    if not isinstance(node, Node):
        return ()
    in_place = isinstance(node.target, str | OpOverload) and node.target in ADDS_IN_PLACE
    return operands(node) if in_place else operands_of("add", node)


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


def casts_between(source: Node, node: Node) -> frozenset[Node]:
    """The casts that lead from source to node, including node; none if they are one node."""
    path = set()
    while node is not source:
        path.add(node)
        node = cast_input(node)
    return frozenset(path)


def _by_signature(node: Node, function: Callable) -> dict[str, Any]:
    """The arguments of a call of a Python function, by name. Raises Left if they do not fit."""
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise Left(f"{node.name}: {error}") from None
    given.apply_defaults()
    return given.arguments


@cache
def _schemas(name: str) -> list:
    """The schemas of the overloads that take a tensor or number first, and no output tensor.

    Those whose names start with prim_ are TorchScript's.
    """
    packet = getattr(torch.ops.aten, SAME_ARGUMENTS.get(name, name))
    overloads = [name for name in packet.overloads() if not name.startswith("prim_")]
    schemas = [getattr(packet, overload)._schema for overload in overloads]
    return [
        schema
        for schema in schemas
        if str(schema.arguments[0].type) in ("Tensor", "number")
        and not any(argument.is_out for argument in schema.arguments)
    ]


def _fitted(
    node: Node, schema, other_names: dict[str, str], wraps: bool, given: tuple[tuple, dict]
) -> dict[str, Any]:
    """The arguments, if they fit one schema. wraps: whether a number may stand for a tensor.

    given: the positional arguments and the keyword arguments.
    """
    args, kwargs = given
    op, takes = schema.name, {argument.name: argument for argument in schema.arguments}
    positional = [name for name, argument in takes.items() if not argument.kwarg_only]
    if len(args) > len(positional):
        got = len(args)
        raise Left(f"{node.name} has {got} positional arguments; {op} takes {len(positional)}")
    named = dict(zip(positional, args, strict=False))
    for key, value in kwargs.items():
        name = key if key in takes else other_names.get(key, key)
        known = name in takes and not (other_names and key == "self")
        if not known or name in named:
            why = "is given twice" if known else "is unknown"
            raise Left(f"{node.name}: argument {key!r} of {op} {why}")
        named[name] = value
    bound = {}
    for name, argument in takes.items():
        if name not in named and not argument.has_default_value():
            raise Left(f"{node.name}: argument {name!r} of {op} is missing")
        bound[name] = named.get(name, argument.default_value)
        kind = str(argument.real_type).replace("SymInt", "int")
        if name in named and not _fits(named[name], kind, argument.N, wraps):
            raise Left(f"{node.name}: argument {name!r} of {op} takes {kind}, got {named[name]}")
    return bound


def _fits(value: Any, kind: str, count: int | None, wraps: bool) -> bool:
    """Whether a schema's type takes a value. count: the length that a list has to have, or None.

    A node stands for its traced value, and fits every type of a value if tracing stored none.
    """
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[")[:-1]
        return value is None or _fits(value, inner, count, wraps)
    if isinstance(value, Node):
        value = values_of(value)
        if value is None:
            return kind in ("Tensor", "number", "float", "int", "List[int]")
    if kind == "int":
        return _is_size(value)
    if kind == "List[int]":
        if count == 1 and _is_size(value):
            return True
        return isinstance(value, tuple | list) and all(map(_is_size, value))
    if kind == "List[bool]":
        is_list = isinstance(value, tuple | list) and len(value) == count
        return is_list and all(isinstance(item, int) for item in value)
    if kind == "Device":
        return isinstance(value, torch.device) or _is_device_name(value)
    numbers = (Number, SymFloat, SymInt, SymBool)
    types = {
        "Tensor": (Tensor, *numbers) if wraps else Tensor,
        "number": numbers,
        "float": (Real, SymFloat, SymInt),
        "bool": bool,
        "str": str,
        "ScalarType": torch.dtype,
        "Layout": torch.layout,
        "MemoryFormat": torch.memory_format,
    }
    return isinstance(value, types.get(kind, ()))


def _is_size(value: object) -> bool:
    if isinstance(value, Node):
        value = values_of(value)
        return value is None or _is_size(value)
    return isinstance(value, int | SymInt) and not isinstance(value, bool)


def _is_device_name(value: object) -> bool:
    try:
        return isinstance(value, str) and torch.device(value) is not None
    except RuntimeError:
        return False
