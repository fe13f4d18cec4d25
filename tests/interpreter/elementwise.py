"""Elementwise arithmetic, comparison and selection."""

from functools import partial

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile._ir.ops_utils import BINOP_REGISTRY, UNARYOP_REGISTRY

from . import dtypes
from .dispatch import implements
from .dtypes import is_boolean, is_constant, is_float, is_integral
from .errors import InterpreterError
from .tile import Tile, as_tile, broadcast, common_shape, loose_dtype, operand


def _float_mod(x, y):
    remainder = torch.fmod(x, y)
    return torch.where((remainder != 0) & ((remainder < 0) != (y < 0)), remainder + y, remainder)


def _integer_cdiv(x, y):
    return np.floor_divide(x, y) + (np.mod(x, y) != 0).astype(x.dtype)


# The compiler's name of an operation: its stub, and the functions of integers and of floats.
# Integers use NumPy, which wraps on overflow. torch has no arithmetic for wide unsigned dtypes.
BINARY = {
    "add": (ct.add, np.add, torch.add),
    "sub": (ct.sub, np.subtract, torch.sub),
    "mul": (ct.mul, np.multiply, torch.mul),
    "truediv": (ct.truediv, None, torch.div),
    "floordiv": (ct.floordiv, np.floor_divide, lambda x, y: torch.floor(torch.div(x, y))),
    "cdiv": (None, _integer_cdiv, None),  # launching.py replaces its stub
    "mod": (ct.mod, np.mod, _float_mod),
    "min": (ct.minimum, np.minimum, torch.fmin),
    "max": (ct.maximum, np.maximum, torch.fmax),
}
COMPARISONS = {
    "eq": (ct.equal, np.equal, torch.eq),
    "ne": (ct.not_equal, np.not_equal, torch.ne),
    "lt": (ct.less, np.less, torch.lt),
    "le": (ct.less_equal, np.less_equal, torch.le),
    "gt": (ct.greater, np.greater, torch.gt),
    "ge": (ct.greater_equal, np.greater_equal, torch.ge),
}
BITWISE = {
    "and_": (ct.bitwise_and, np.bitwise_and, None),
    "or_": (ct.bitwise_or, np.bitwise_or, None),
    "xor": (ct.bitwise_xor, np.bitwise_xor, None),
    "lshift": (ct.bitwise_lshift, np.left_shift, None),
    "rshift": (ct.bitwise_rshift, np.right_shift, None),
}
UNARY = {
    "neg": (ct.negative, np.negative, torch.neg),
    "abs": (ct.abs, np.abs, torch.abs),
    "bitwise_not": (ct.bitwise_not, np.invert, None),
}
FLOATS = ("exp", "rsqrt")  # these give a float32 for an integer
UNARY |= {name: (getattr(ct, name), None, getattr(torch, name)) for name in FLOATS}
OPERATIONS = BINARY | COMPARISONS | BITWISE | UNARY
# torch wraps in these operations on int32 and int64, the dtypes of indices, and is faster.
WRAPPING = ("add", "sub", "mul", *COMPARISONS)
PROPAGATING = {"min": torch.minimum, "max": torch.maximum}


def compute(fn: str, dtype, *operands: torch.Tensor, propagate_nan=False) -> torch.Tensor:
    """Apply an operation to tensors of one dtype. The result is rounded to this dtype."""
    _, of_integers, of_floats = OPERATIONS[fn]
    if (of_floats if is_float(dtype) else of_integers) is None:
        raise ct.TileTypeError(f"{fn} is not defined for {dtype}")
    if propagate_nan and is_float(dtype):
        of_floats = PROPAGATING[fn]
    if is_float(dtype) or (fn in WRAPPING and dtype in (ct.int32, ct.int64)):
        return of_floats(*operands)
    if fn in ("floordiv", "cdiv", "mod") and not operands[1].all():
        raise InterpreterError(f"integer {fn} by zero")
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(of_integers(*(x.numpy() for x in operands))))


def check_rounding(fn: str, dtype, mode) -> None:
    """Quotients have an error of at most half a unit here, which RoundingMode.FULL allows."""
    if mode not in (None, ct.RoundingMode.FULL):
        raise NotImplementedError(f"the interpreter does not implement {mode}")
    if mode and (mode not in BINOP_REGISTRY[fn].supported_rounding_modes or dtype != ct.float32):
        raise ct.TileTypeError(f"{mode} is not supported for {fn} on {dtype}")


def binary(fn: str, x, y, *, rounding_mode=None, propagate_nan=False):
    """Apply a binary operation to tiles or constants, with the compiler's promotion."""
    if is_constant(x) and is_constant(y):
        return BINOP_REGISTRY[fn].impl(x, y)
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y), fn == "truediv")
    if is_boolean(dtype) and fn not in COMPARISONS:
        raise ct.TileTypeError(f"{fn} is not defined for booleans; cast them to integers")
    if dtypes.is_restricted_float(dtype):
        raise ct.TileTypeError(f"{fn} is not defined for {dtype}; cast it first")
    check_rounding(fn, dtype, rounding_mode)
    a, b = operand(x, dtype), operand(y, dtype)
    common_shape(a.shape, b.shape)
    data = compute(fn, dtype, a, b, propagate_nan=propagate_nan)
    return Tile(data, ct.bool_ if fn in COMPARISONS else dtype)


def bitwise(fn: str, x, y):
    if is_constant(x) and is_constant(y):
        return BINOP_REGISTRY[fn].impl(x, y)
    kinds = [as_tile(v).dtype for v in (x, y)]
    booleans = fn in ("and_", "or_", "xor")
    if not all(is_integral(k) or (booleans and is_boolean(k)) for k in kinds):
        raise ct.TileTypeError(f"{fn} needs integers{' or booleans' * booleans}, got {kinds}")
    if booleans and is_constant(x) == is_constant(y) and kinds[0] != kinds[1]:
        raise ct.TileTypeError(f"{fn} needs operands of one dtype, got {kinds}")
    if set(kinds) == {ct.bool_, ct.int8}:
        raise ct.TileTypeError(f"{fn} does not combine bool_ and int8")
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
    a, b = operand(x, dtype), operand(y, dtype)
    common_shape(a.shape, b.shape)
    return Tile(compute(fn, dtype, a, b), dtype)


def unary(fn: str, x):
    if is_constant(x):
        return UNARYOP_REGISTRY[fn].impl(x)
    dtype = as_tile(x).dtype
    if fn in FLOATS and not is_float(dtype):
        dtype = ct.float32
    if is_boolean(dtype):
        if fn == "abs":
            return x
        dtype = ct.int32 if fn == "neg" else dtype
    return Tile(compute(fn, dtype, operand(x, dtype)), dtype)


for _function, _operations in ((binary, BINARY | COMPARISONS), (bitwise, BITWISE), (unary, UNARY)):
    for _fn, (_stub, *_) in _operations.items():
        if _stub is not None:
            implements(_stub)(partial(_function, _fn))


@implements(ct.where)
def _where(cond, x, y):
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
    cond = operand(as_tile(cond), ct.bool_)
    a, b = operand(x, dtype), operand(y, dtype)
    shape = common_shape(cond.shape, a.shape, b.shape)
    data = torch.where(*(broadcast(t, shape, "operand") for t in (cond, a, b)))
    return Tile(data, dtype)
