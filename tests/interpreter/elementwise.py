"""Elementwise arithmetic, comparison and selection."""

from functools import partial

import cuda.tile as ct
import torch
from cuda.tile._ir.ops_utils import BINOP_REGISTRY

from . import dtypes
from .dispatch import current, implements
from .dtypes import is_constant, is_float
from .errors import InterpreterError
from .tile import Tile, loose_dtype, operand


def _cdiv(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.floor_divide(x, y) + (torch.remainder(x, y) != 0)


# The compiler's name of an operation: its stub, and the functions of integers and of floats.
BINARY = {
    "add": (ct.add, torch.add, torch.add),
    "sub": (ct.sub, torch.sub, torch.sub),
    "mul": (ct.mul, torch.mul, torch.mul),
    "truediv": (ct.truediv, None, torch.div),
    "floordiv": (ct.floordiv, torch.floor_divide, None),
    "cdiv": (None, _cdiv, None),  # launching.py replaces its stub
    "mod": (ct.mod, torch.remainder, None),
    "min": (ct.minimum, torch.minimum, torch.fmin),
    "max": (ct.maximum, torch.maximum, torch.fmax),
    "and_": (ct.bitwise_and, torch.bitwise_and, None),
    "or_": (ct.bitwise_or, torch.bitwise_or, None),
    "xor": (ct.bitwise_xor, torch.bitwise_xor, None),
    "lshift": (ct.bitwise_lshift, torch.bitwise_left_shift, None),
    "rshift": (ct.bitwise_rshift, torch.bitwise_right_shift, None),
}
COMPARISONS = {
    "eq": (ct.equal, torch.eq, torch.eq),
    "ne": (ct.not_equal, torch.ne, torch.ne),
    "lt": (ct.less, torch.lt, torch.lt),
    "le": (ct.less_equal, torch.le, torch.le),
    "gt": (ct.greater, torch.gt, torch.gt),
    "ge": (ct.greater_equal, torch.ge, torch.ge),
}
UNARY = {
    "neg": (ct.negative, torch.neg, torch.neg),
    "abs": (ct.abs, torch.abs, torch.abs),
    "exp": (ct.exp, None, torch.exp),
    "rsqrt": (ct.rsqrt, None, torch.rsqrt),
}
OPERATIONS = BINARY | COMPARISONS | UNARY


def compute(fn: str, dtype, *operands: torch.Tensor, propagate_nan=False) -> torch.Tensor:
    """Apply an operation to tensors of one dtype. The result is rounded to this dtype."""
    _, of_integers, of_floats = OPERATIONS[fn]
    # Those of integers are the ones that return NaN if an operand is NaN.
    function = of_floats if is_float(dtype) and not propagate_nan else of_integers
    if function is None:
        raise NotImplementedError(f"the interpreter does not implement {fn} of {dtype}")
    if fn in ("floordiv", "cdiv", "mod") and not operands[1].all():
        raise InterpreterError(f"integer {fn} by zero")
    return function(*operands)


def binary(fn: str, x, y, *, rounding_mode=None, propagate_nan=False):
    """Apply a binary operation to tiles or constants, with the compiler's promotion.

    Quotients have an error of at most half a unit here, which RoundingMode.FULL allows.
    """
    if rounding_mode not in (None, ct.RoundingMode.FULL):
        raise NotImplementedError(f"the interpreter does not implement {rounding_mode}")
    if is_constant(x) and is_constant(y):
        return BINOP_REGISTRY[fn].impl(x, y)
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y), fn == "truediv")
    operands = operand(x, dtype), operand(y, dtype)
    product = None
    if dtype == ct.float32 and fn in ("add", "sub"):
        if (fused := _fused(fn, (x, y), operands)) is not None:
            return Tile(fused, dtype)
    elif dtype == ct.float32 and fn == "mul" and current().fuse:
        product = operands[0].double() * operands[1].double()
    data = compute(fn, dtype, *operands, propagate_nan=propagate_nan)
    return Tile(data, ct.bool_ if fn in COMPARISONS else dtype, product)


def _fused(fn: str, terms: tuple, operands: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """A sum of which one term is a product that was not rounded; None if no term is a product."""
    products = [getattr(term, "product", None) for term in terms]
    which = [i for i, product in enumerate(products) if product is not None]
    if not which:
        return None
    chosen = which[0 if current().fuse == "first" else -1]
    wide = [operand.double() for operand in operands]
    wide[chosen] = products[chosen]
    return compute(fn, ct.float64, *wide).float()


def unary(fn: str, x: Tile):
    product = None if fn != "neg" or x.product is None else -x.product
    return Tile(compute(fn, x.dtype, x.data), x.dtype, product)


for _fn, (_stub, *_) in OPERATIONS.items():
    if _stub is not None:
        implements(_stub)(partial(unary if _fn in UNARY else binary, _fn))


@implements(ct.where)
def _where(cond, x, y):
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
    return Tile(torch.where(operand(cond, ct.bool_), operand(x, dtype), operand(y, dtype)), dtype)
