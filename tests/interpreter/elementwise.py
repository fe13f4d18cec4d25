"""Elementwise arithmetic, comparison and selection."""

from functools import partial

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile._ir.ops_utils import BINOP_REGISTRY

from . import dtypes
from .dispatch import implements
from .dtypes import is_constant, is_float
from .errors import InterpreterError
from .tile import Tile, loose_dtype, operand


def _integer_cdiv(x, y):
    return np.floor_divide(x, y) + (np.mod(x, y) != 0).astype(x.dtype)


# The compiler's name of an operation: its stub, and the functions of integers and of floats.
# Integers use NumPy, which wraps on overflow. torch has no arithmetic for wide unsigned dtypes.
BINARY = {
    "add": (ct.add, np.add, torch.add),
    "sub": (ct.sub, np.subtract, torch.sub),
    "mul": (ct.mul, np.multiply, torch.mul),
    "truediv": (ct.truediv, None, torch.div),
    "floordiv": (ct.floordiv, np.floor_divide, None),
    "cdiv": (None, _integer_cdiv, None),  # launching.py replaces its stub
    "mod": (ct.mod, np.mod, None),
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
    "exp": (ct.exp, None, torch.exp),
    "rsqrt": (ct.rsqrt, None, torch.rsqrt),
}
OPERATIONS = BINARY | COMPARISONS | BITWISE | UNARY
# torch wraps in these operations on int32 and int64, the dtypes of indices, and is faster.
WRAPPING = ("add", "sub", "mul", *COMPARISONS)
PROPAGATING = {"min": torch.minimum, "max": torch.maximum}


def compute(fn: str, dtype, *operands: torch.Tensor, propagate_nan=False) -> torch.Tensor:
    """Apply an operation to tensors of one dtype. The result is rounded to this dtype."""
    _, of_integers, of_floats = OPERATIONS[fn]
    if (of_floats if is_float(dtype) else of_integers) is None:
        raise NotImplementedError(f"the interpreter does not implement {fn} of {dtype}")
    if propagate_nan and is_float(dtype):
        of_floats = PROPAGATING[fn]
    if is_float(dtype) or (fn in WRAPPING and dtype in (ct.int32, ct.int64)):
        return of_floats(*operands)
    if fn in ("floordiv", "cdiv", "mod") and not operands[1].all():
        raise InterpreterError(f"integer {fn} by zero")
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(of_integers(*(x.numpy() for x in operands))))


def binary(fn: str, x, y, *, rounding_mode=None, propagate_nan=False):
    """Apply a binary operation to tiles or constants, with the compiler's promotion.

    Quotients have an error of at most half a unit here, which RoundingMode.FULL allows.
    """
    if rounding_mode not in (None, ct.RoundingMode.FULL):
        raise NotImplementedError(f"the interpreter does not implement {rounding_mode}")
    if is_constant(x) and is_constant(y):
        return BINOP_REGISTRY[fn].impl(x, y)
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y), fn == "truediv")
    data = compute(fn, dtype, operand(x, dtype), operand(y, dtype), propagate_nan=propagate_nan)
    return Tile(data, ct.bool_ if fn in COMPARISONS else dtype)


def unary(fn: str, x: Tile):
    return Tile(compute(fn, x.dtype, x.data), x.dtype)


for _fn, (_stub, *_) in OPERATIONS.items():
    if _stub is not None:
        implements(_stub)(partial(unary if _fn in UNARY else binary, _fn))


@implements(ct.where)
def _where(cond, x, y):
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
    return Tile(torch.where(operand(cond, ct.bool_), operand(x, dtype), operand(y, dtype)), dtype)
