"""Read the calls of a graph: bind a node's arguments to the schema of the op that it calls.

A graph may hold a call that PyTorch would refuse. The pass reads every call through `bind`, which
gives the reason where a call does not fit its op.
"""

import inspect
from collections.abc import Callable
from functools import cache
from numbers import Number, Real
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn.functional import silu

from .nodes import Left, name_of, value_of, values_of

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
ADDS_IN_PLACE = ("add_", torch.ops.aten.add_.Scalar, torch.ops.aten.add_.Tensor)


def bind(node: Node) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order, with the schema's defaults.

    The call is one of an aten or prims op, or of PyTorch's function or method of an aten op's name.

    Raises Left if PyTorch would refuse the call: an argument is missing, unknown, given twice, or
    of a type that the op does not take.
    """
    if isinstance(node.target, OpOverload):
        return _fitted(node, node.target._schema, {}, wraps=True)
    if node.target is silu:  # aten's op has no argument inplace
        args = _by_signature(node, silu)
        if args["inplace"] is not False:
            raise Left(f"{node.name}: argument 'inplace' of silu is {args['inplace']}, not False")
        return {"self": args["input"]}
    name, operator = name_of(node), getattr(node.target, "__module__", None) == "_operator"
    if node.op == "call_method":
        name = node.target
        if not node.args or not isinstance(node.args[0], Node):
            raise Left(f"{node.name} calls a method of no tensor")
    if operator and (node.kwargs or len(node.args) != 2):
        raise Left(f"{node.name} calls an operator with other arguments than two operands")
    reasons = []
    for schema in _schemas(name):
        try:
            return _fitted(node, schema, OTHER_NAMES, wraps=operator or name in ARITHMETIC)
        except Left as reason:
            reasons.append(reason)
    if len(reasons) == 1:
        raise reasons[0]
    given = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    raise Left(f"{node.name} calls {name} with ({', '.join(given)}), which it does not take")


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
    args = _fitted(node, schema, {}, wraps=False, given=((), args))
    eps = given.get("eps", 0.0)
    if not _fits(eps, "float", None, False):
        raise Left(f"{node.name}: argument 'eps' takes float, got {eps}")
    return args | {"eps": eps}


def operands(node: Node) -> tuple[object, ...]:
    """The two operands of an add, mul or div; () if the call has alpha or a rounding mode."""
    first, second, *rest = bind(node).values()
    return (first, second) if all(value in (1, None) for value in rest) else ()


def summands(node: object) -> tuple[object, ...]:
    """The two operands of an add, in place or not; () for any other node or value."""
    if not isinstance(node, Node):
        return ()
    in_place = isinstance(node.target, str | OpOverload) and node.target in ADDS_IN_PLACE
    return operands(node) if in_place or name_of(node) == "add" else ()


def cast_input(node: object) -> Node | None:
    """The input of a node that only changes the dtype; None for any other node."""
    if not isinstance(node, Node) or name_of(node) not in CASTS:
        return None
    source, *_ = bind(node).values()
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
    node: Node, schema, other_names: dict[str, str], wraps: bool, given: tuple | None = None
) -> dict[str, Any]:
    """The arguments, if they fit one schema. wraps: whether a number may stand for a tensor.

    given: positional arguments and keyword arguments that stand for those of the node.
    """
    args, kwargs = (node.args, node.kwargs) if given is None else given
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
