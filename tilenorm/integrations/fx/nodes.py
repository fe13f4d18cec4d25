"""One vocabulary for the nodes of torch-level graphs (dynamo's) and of aten-level graphs."""

from numbers import Real

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

TORCH = ("torch", "torch.nn.functional", "_operator")
VALUES = ("val", "example_value")
HARMLESS = (*TORCH, "torch._C._nn", "math", "builtins")
CASTS = (
    *("to", "_to_copy", "type", "type_as", "convert_element_type"),
    *("float", "half", "bfloat16", "double"),
)
HALVES = (torch.float16, torch.bfloat16)
ADDS_IN_PLACE = ("add_", torch.ops.aten.add_.Scalar, torch.ops.aten.add_.Tensor)
WRITING = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "imatmul")


class Left(Exception):
    """Why a norm is left as it is."""


def name_of(node: Node) -> str | None:
    """What a node calls, by PyTorch's name of it; None for what writes to its arguments."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return None
    target = node.target
    if node.op == "call_method":
        return target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace in ("aten", "prims") else None
    name = target.__name__ if getattr(target, "__module__", None) in TORCH else None
    return "div" if name == "truediv" else name


def writes(node: Node) -> bool:
    """Whether a node may change a tensor that is there, or what the nodes after it mean."""
    target = node.target
    if node.op == "call_method":
        private = target.startswith("__")
        return target.startswith(("__i", "__set")) or (target.endswith("_") and not private)
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if getattr(target, "__module__", None) not in HARMLESS:
        return True  # a switch of the gradient or autocast mode, a subgraph
    if target.__name__ in WRITING or target.__name__.endswith("_") or "out" in node.kwargs:
        return True
    # relu, dropout and their like take `inplace` by position too, last, among other bools.
    functional = target.__module__ == "torch.nn.functional"
    return functional and any(a is True for a in (*node.args, node.kwargs.get("inplace")))


def key_of(node: Node) -> str:
    """What tracing calls a node's value; dynamo has another name than the others."""
    return next((key for key in VALUES if key in node.meta), VALUES[0])


def values_of(node: Node) -> object:
    """What a node stands for in tracing: tensors with shape, dtype, strides and device; numbers."""
    return node.meta.get(key_of(node))


def value_of(node: object) -> Tensor | None:
    """The tensor that a node stands for, None for a subclass's and for what torch.func wraps."""
    value = values_of(node) if isinstance(node, Node) else None
    plain = isinstance(value, FakeTensor) or type(value) in (Tensor, torch.nn.Parameter)
    return value if plain and not is_functorch_wrapped_tensor(value) else None


def arguments(node: Node, *names: str) -> dict[str, object]:
    """The arguments that a node is called with, by name."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def operands(node: Node) -> tuple[object, ...]:
    """The two operands of an add, mul or div; nothing where it does more."""
    given = arguments(node, "input", "other", "alpha")
    scaled = given.pop("alpha", 1) != 1
    return () if scaled or len(given) != 2 else tuple(given.values())


def shifted(node: object) -> tuple[Node, float] | None:
    """A tensor and the number that a node adds to it, in a tensor of its own or in place."""
    if not isinstance(node, Node) or (name_of(node) != "add" and node.target not in ADDS_IN_PLACE):
        return None
    pair = operands(node)
    for tensor, number in (pair, pair[::-1]) if pair else ():
        if value_of(tensor) is not None and (known := number_of(number)) is not None:
            return tensor, known
    return None


def number_of(value: object) -> float | None:
    """A number, or one that the graph is told and that it is then guarded to be."""
    if isinstance(value, Node):
        value = values_of(value)
    symbolic = isinstance(value, torch.SymFloat | torch.SymInt)
    return float(value) if symbolic or isinstance(value, Real) else None


def cast_of(node: object) -> Node | None:
    """What a node casts, to any dtype and nothing else."""
    if not isinstance(node, Node) or name_of(node) not in CASTS or not node.args:
        return None
    before, after = value_of(node.args[0]), value_of(node)
    if before is None or after is None or before.device != after.device:
        return None
    return node.args[0]


def widened(node: Node) -> Node:
    """What a node is the same numbers of: through casts that round nothing."""
    while (source := cast_of(node)) is not None:
        before, after = value_of(source).dtype, value_of(node).dtype
        if before != after and (before not in HALVES or after != torch.float32):
            break
        node = source
    return node


def is_idle(node: Node) -> bool:
    """Whether a node only looks at another, as torch.export has it do, or is a detach for nobody,
    as autograd leaves them.
    """
    if node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    return name_of(node) == "detach" and all(map(is_idle, node.users))


def only_user(node: Node) -> Node | None:
    """Who uses a node, if it is one."""
    users = [user for user in node.users if not is_idle(user)]
    return users[0] if len(users) == 1 else None


def erase(graph: Graph, node: Node) -> None:
    """Erases a node that only idle ones use, and these."""
    for user in list(node.users):
        erase(graph, user)
    graph.erase_node(node)
