"""Helpers that read FX nodes of torch-level graphs (from TorchDynamo) and of aten-level graphs."""

from numbers import Real

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

TORCH_MODULES = ("torch", "torch.nn.functional", "_operator")
# Modules whose functions write to no tensor, apart from those that `writes` lists.
PURE_MODULES = (*TORCH_MODULES, "torch._C._nn", "math", "builtins")
# The metadata keys of a node's traced value: make_fx and torch.export use "val", TorchDynamo uses
# "example_value".
VALUES = ("val", "example_value")
CASTS = (
    *("to", "_to_copy", "type", "type_as", "convert_element_type"),
    *("float", "half", "bfloat16", "double"),
)
DTYPES_16_BIT = (torch.float16, torch.bfloat16)
ADDS_IN_PLACE = ("add_", torch.ops.aten.add_.Scalar, torch.ops.aten.add_.Tensor)
IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "imatmul")


class Left(Exception):
    """The pass does not replace a norm; the message gives the reason."""


def name_of(node: Node) -> str | None:
    """PyTorch's name of the function that a node calls; None if it may write to its arguments."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return None
    target = node.target
    if node.op == "call_method":
        return target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace in ("aten", "prims") else None
    name = target.__name__ if getattr(target, "__module__", None) in TORCH_MODULES else None
    return "div" if name == "truediv" else name


def writes(node: Node) -> bool:
    """Whether a node may write to an existing tensor or change a mode such as grad mode."""
    target = node.target
    if node.op == "call_method":
        private = target.startswith("__")
        return target.startswith(("__i", "__set")) or (target.endswith("_") and not private)
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if getattr(target, "__module__", None) not in PURE_MODULES:
        return True  # for example: a call of a subgraph, or a switch of grad mode or autocast
    if target.__name__ in IN_PLACE or target.__name__.endswith("_") or "out" in node.kwargs:
        return True
    # relu, dropout and similar functions also accept `inplace` by position, after other bools. Any
    # positional True therefore counts as inplace=True.
    functional = target.__module__ == "torch.nn.functional"
    return functional and any(a is True for a in (*node.args, node.kwargs.get("inplace")))


def key_of(node: Node) -> str:
    """The metadata key under which tracing stored a node's value."""
    return next((key for key in VALUES if key in node.meta), VALUES[0])


def values_of(node: Node) -> object:
    """The value that tracing stored for a node: fake tensors, numbers, or tuples of them."""
    return node.meta.get(key_of(node))


def value_of(node: object) -> Tensor | None:
    """The fake tensor of a node; None for tensor subclasses, torch.func wrappers and numbers."""
    value = values_of(node) if isinstance(node, Node) else None
    plain = isinstance(value, FakeTensor) or type(value) in (Tensor, torch.nn.Parameter)
    return value if plain and not is_functorch_wrapped_tensor(value) else None


def arguments(node: Node, *names: str) -> dict[str, object]:
    """The positional and keyword arguments of a node's call, by name."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def operands(node: Node) -> tuple[object, ...]:
    """The two operands of an add, mul or div; () if the call has alpha or other arguments."""
    args = arguments(node, "input", "other", "alpha")
    scaled = args.pop("alpha", 1) != 1
    return () if scaled or len(args) != 2 else tuple(args.values())


def added_number(node: object) -> tuple[Node, float] | None:
    """The tensor and the number that a node adds, in place or not; None for any other node."""
    if not isinstance(node, Node) or (name_of(node) != "add" and node.target not in ADDS_IN_PLACE):
        return None
    pair = operands(node)
    for tensor, number in (pair, pair[::-1]) if pair else ():
        if value_of(tensor) is not None and (value := number_of(number)) is not None:
            return tensor, value
    return None


def number_of(value: object) -> float | None:
    """The value of a number or of a node that stands for one, else None.

    Reading the value of a symbolic number adds a guard on this value to the graph.
    """
    if isinstance(value, Node):
        value = values_of(value)
    symbolic = isinstance(value, torch.SymFloat | torch.SymInt)
    return float(value) if symbolic or isinstance(value, Real) else None


def cast_input(node: object) -> Node | None:
    """The input of a node that only changes the dtype; None for any other node."""
    if not isinstance(node, Node) or name_of(node) not in CASTS or not node.args:
        return None
    source, result = value_of(node.args[0]), value_of(node)
    if source is None or result is None or source.device != result.device:
        return None
    return node.args[0]


def before_exact_casts(node: Node) -> Node:
    """The node before all casts that change no number: to the same dtype, or 16 bits to float32."""
    while (source := cast_input(node)) is not None:
        before, after = value_of(source).dtype, value_of(node).dtype
        if before != after and (before not in DTYPES_16_BIT or after != torch.float32):
            break
        node = source
    return node


def is_idle(node: Node) -> bool:
    """Whether a node has no effect on results: a metadata check, or an unused detach.

    torch.export inserts the metadata checks. Tracing autograd leaves the unused detach nodes.
    """
    if node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    return name_of(node) == "detach" and all(map(is_idle, node.users))


def only_user(node: Node) -> Node | None:
    """The node's user, not counting idle ones, if there is exactly one, else None."""
    users = [user for user in node.users if not is_idle(user)]
    return users[0] if len(users) == 1 else None


def erase(graph: Graph, node: Node) -> None:
    """Erase a node and its users, all of which are idle."""
    for user in list(node.users):
        erase(graph, user)
    graph.erase_node(node)
