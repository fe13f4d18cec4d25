"""Helpers that read FX nodes of torch-level graphs (from TorchDynamo) and of aten-level graphs.

No helper raises for a node of any form. The arguments of a call are read by calls.py.
"""

import inspect
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

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


def only_user(node: Node) -> Node | None:
    """The node's user, not counting idle ones, if there is exactly one, else None."""
    users = [user for user in node.users if not is_idle(user)]
    return users[0] if len(users) == 1 else None


def erase(graph: Graph, node: Node) -> None:
    """Erase a node and its users, all of which are idle."""
    for user in list(node.users):
        erase(graph, user)
    graph.erase_node(node)
