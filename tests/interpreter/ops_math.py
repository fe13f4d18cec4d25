"""Elementwise arithmetic, comparison and selection."""

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile._ir.ops_utils import BINOP_REGISTRY, UNARYOP_REGISTRY

from . import dtypes
from .dispatch import implements
from .dtypes import is_boolean, is_constant, is_float, is_integral
from .errors import InterpreterError
from .tile import Tile, as_tile, broadcast, common_shape, loose_dtype, operand

# Integers use NumPy, which wraps on overflow. torch has no arithmetic for wide unsigned dtypes.
_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "cdiv": lambda x, y: np.floor_divide(x, y) + (np.mod(x, y) != 0).astype(x.dtype),
    "min": np.minimum,
    "max": np.maximum,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neg": np.negative,
    "abs": np.abs,
    "invert": np.invert,
    "bitwise_not": np.invert,
}


def _float_mod(x, y):
    remainder = torch.fmod(x, y)
    return torch.where((remainder != 0) & ((remainder < 0) != (y < 0)), remainder + y, remainder)


_FLOAT = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.div,
    "floordiv": lambda x, y: torch.floor(torch.div(x, y)),
    "mod": _float_mod,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "min": torch.fmin,
    "max": torch.fmax,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "neg": torch.neg,
}
_TO_FLOAT = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")
_TO_FLOAT += ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_FLOAT |= {name: getattr(torch, name) for name in (*_TO_FLOAT, "abs", "floor", "ceil")}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# torch wraps in these operations on int32 and int64, the dtypes of indices, and is faster.
_WRAPPING = {name: _FLOAT[name] for name in ("add", "sub", "mul", *_COMPARISONS)}


def check_modes(fn: str, dtype, rounding_mode, flush_to_zero: bool) -> None:
    """Raise TileTypeError for a rounding mode or flush that the compiler rejects for `fn`."""
    if rounding_mode is None and not flush_to_zero:
        return
    definition = BINOP_REGISTRY.get(fn) or UNARYOP_REGISTRY[fn]
    if rounding_mode is not None:
        only_float32 = rounding_mode in (ct.RoundingMode.APPROX, ct.RoundingMode.FULL)
        if rounding_mode not in definition.supported_rounding_modes or not is_float(dtype):
            raise ct.TileTypeError(f"{rounding_mode} is not supported for {fn} on {dtype}")
        if only_float32 and dtype != ct.float32:
            raise ct.TileTypeError(f"{rounding_mode} is for float32 only, got {dtype}")
    if flush_to_zero and not (definition.support_flush_to_zero and dtype == ct.float32):
        raise ct.TileTypeError(f"flush_to_zero is not supported for {fn} on {dtype}")


def compute(fn: str, dtype, *operands: torch.Tensor, rounding_mode=None, flush=False, nan=False):
    """Apply an operation to tensors of one dtype. The result is rounded to this dtype."""
    if fn not in (_FLOAT if is_float(dtype) else _INTEGER):
        raise ct.TileTypeError(f"{fn} is not defined for {dtype}")
    if fn in _WRAPPING and dtype in (ct.int32, ct.int64):
        return _WRAPPING[fn](*operands)
    if not is_float(dtype):
        if fn in ("floordiv", "cdiv", "mod") and not operands[1].all():
            raise InterpreterError(f"integer {fn} by zero")
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(_INTEGER[fn](*(x.numpy() for x in operands))))
    function = _FLOAT[fn]
    if nan and fn in ("min", "max"):
        function = torch.minimum if fn == "min" else torch.maximum
    if flush:
        operands = tuple(dtypes.flush_subnormals(x) for x in operands)
    if rounding_mode in dtypes.DIRECTED:
        exact = function(*(x.to(torch.float64) for x in operands))
        result = dtypes.round_directed(exact, dtype, rounding_mode)
    else:
        result = function(*operands)
    return dtypes.flush_subnormals(result) if flush else result


def binary(fn: str, x, y, *, rounding_mode=None, flush_to_zero=False, propagate_nan=False):
    """Apply a binary operation to tiles or constants, with the compiler's promotion."""
    if is_constant(x) and is_constant(y):
        return BINOP_REGISTRY[fn].impl(x, y)
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y), fn == "truediv")
    if is_boolean(dtype) and fn not in _COMPARISONS:
        raise ct.TileTypeError(f"{fn} is not defined for booleans; cast them to integers")
    if dtypes.is_restricted_float(dtype):
        raise ct.TileTypeError(f"{fn} is not defined for {dtype}; cast it first")
    check_modes(fn, dtype, rounding_mode, flush_to_zero)
    a, b = operand(x, dtype), operand(y, dtype)
    common_shape(a.shape, b.shape)
    data = compute(
        fn, dtype, a, b, rounding_mode=rounding_mode, flush=flush_to_zero, nan=propagate_nan
    )
    return Tile(data, ct.bool_ if fn in _COMPARISONS else dtype)


def _bitwise(fn: str, x, y):
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


def _float_for(dtype):
    return dtype if is_float(dtype) else ct.float32


def _integer_for(dtype):
    return ct.int32 if is_boolean(dtype) else dtype


def _unary(fn: str, x, promotion=lambda dtype: dtype, *, rounding_mode=None, flush_to_zero=False):
    if is_constant(x):
        return UNARYOP_REGISTRY[fn].impl(x)
    dtype = promotion(as_tile(x).dtype)
    check_modes(fn, dtype, rounding_mode, flush_to_zero)
    data = compute(fn, dtype, operand(x, dtype), rounding_mode=rounding_mode, flush=flush_to_zero)
    return Tile(data, dtype)


def _register():
    def bind(function, *fixed):
        return lambda *args, **kwargs: function(*fixed, *args, **kwargs)

    for stub, fn in {
        ct.add: "add",
        ct.sub: "sub",
        ct.mul: "mul",
        ct.truediv: "truediv",
        ct.floordiv: "floordiv",
        ct.mod: "mod",
        ct.pow: "pow",
        ct.atan2: "atan2",
        ct.minimum: "min",
        ct.maximum: "max",
        ct.equal: "eq",
        ct.not_equal: "ne",
        ct.less: "lt",
        ct.less_equal: "le",
        ct.greater: "gt",
        ct.greater_equal: "ge",
    }.items():
        implements(stub)(bind(binary, fn))
    for stub, fn in {
        ct.bitwise_and: "and_",
        ct.bitwise_or: "or_",
        ct.bitwise_xor: "xor",
        ct.bitwise_lshift: "lshift",
        ct.bitwise_rshift: "rshift",
    }.items():
        implements(stub)(bind(_bitwise, fn))
    for fn in _TO_FLOAT:
        implements(getattr(ct, fn))(bind(lambda f, x, **kw: _unary(f, x, _float_for, **kw), fn))
    implements(ct.negative)(lambda x: _unary("neg", x, _integer_for))


_register()


@implements(ct.abs)
def _abs(x):
    return x if isinstance(x, Tile) and is_boolean(x.dtype) else _unary("abs", x)


@implements(ct.floor)
def _floor(x):
    return _strict_float("floor", x)


@implements(ct.ceil)
def _ceil(x):
    return _strict_float("ceil", x)


def _strict_float(fn: str, x):
    if isinstance(x, Tile) and not is_float(x.dtype):
        raise ct.TileTypeError(f"{fn} needs a float, got {x.dtype}")
    return _unary(fn, x)


@implements(ct.bitwise_not)
def _bitwise_not(x):
    if isinstance(x, Tile) and is_float(x.dtype):
        raise ct.TileTypeError(f"bitwise_not needs integers or booleans, got {x.dtype}")
    return _unary("bitwise_not", x)


@implements(ct.divmod)
def _divmod(x, y):
    if not is_constant(x) or not is_constant(y):
        dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
        if is_float(dtype):
            raise ct.TileTypeError("divmod() is not implemented for floating point values")
    return binary("floordiv", x, y), binary("mod", x, y)


@implements(ct.isnan)
def _isnan(x):
    if is_constant(x):
        return UNARYOP_REGISTRY["isnan"].impl(x)
    if not is_float(x.dtype):
        raise ct.TileTypeError(f"isnan needs a float, got {x.dtype}")
    return Tile(torch.isnan(x.data), ct.bool_)


@implements(ct.where)
def _where(cond, x, y):
    dtype = dtypes.promote(loose_dtype(x), loose_dtype(y))
    cond = operand(as_tile(cond), ct.bool_)
    a, b = operand(x, dtype), operand(y, dtype)
    shape = common_shape(cond.shape, a.shape, b.shape)
    data = torch.where(*(broadcast(t, shape, "operand") for t in (cond, a, b)))
    return Tile(data, dtype)
