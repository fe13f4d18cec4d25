"""cuTile dtypes in torch: storage, promotion and conversion, by the rules of cuTile's compiler."""

from functools import lru_cache
from math import copysign

import cuda.tile as ct
import torch
from cuda.tile._datatype import (
    integer_dtype_max,
    integer_dtype_min,
    is_boolean,
    is_float,
    is_integral,
    is_restricted_float,
)
from cuda.tile._ir import ops_utils
from cuda.tile._ir.cast_ops import check_implicit_cast
from cuda.tile._ir.type import LooselyTypedScalar, TileTy
from cuda.tile._ir.typing_support import dtype_of_constant_scalar

TORCH_DTYPE = {
    ct.bool_: torch.bool,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.uint8: torch.uint8,
    ct.uint16: torch.uint16,
    ct.uint32: torch.uint32,
    ct.uint64: torch.uint64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
    ct.float8_e4m3fn: torch.float8_e4m3fn,
    ct.float8_e5m2: torch.float8_e5m2,
    ct.float8_e8m0fnu: torch.float8_e8m0fnu,
}
TILE_DTYPE = {v: k for k, v in TORCH_DTYPE.items()}
# torch has no tfloat32. It is stored as float32 whose 13 lowest bits are zero.
TORCH_DTYPE[ct.tfloat32] = torch.float32
CACHE_SIZE = 1 << 14  # entries in each cache of constants and promotions


def is_constant(value) -> bool:
    """Whether a value is a Python constant. The compiler types such a constant loosely."""
    return isinstance(value, (int, float))


def torch_dtype(dtype: ct.DType) -> torch.dtype:
    if dtype not in TORCH_DTYPE:
        raise ct.TileTypeError(f"the interpreter has no storage for {dtype}")
    return TORCH_DTYPE[dtype]


def constant_dtype(value: bool | int | float) -> ct.DType:
    """The dtype that the compiler gives a Python constant."""
    return dtype_of_constant_scalar(value)


@lru_cache(CACHE_SIZE, typed=True)
def promote(x, y, force_float: bool = False) -> ct.DType:
    """Common dtype of two operands, each a dtype or a Python constant."""
    x, y = (LooselyTypedScalar(v) if is_constant(v) else v for v in (x, y))
    return ops_utils.promote_dtypes(x, y, force_float)


def require_implicit_cast(source, target: ct.DType, name: str) -> None:
    """Raise TileTypeError for an implicit cast that the compiler rejects: float32 to bfloat16."""
    if source == target and not is_constant(source):
        return
    source_type = LooselyTypedScalar(source) if is_constant(source) else TileTy(source, ())
    try:
        check_implicit_cast(source_type, target)
    except ct.TileTypeError as e:
        raise ct.TileTypeError(f"{name}: {e}") from None


def constant(value: bool | int | float, dtype: ct.DType) -> torch.Tensor:
    """A cached 0-d tensor of a constant: do not write to it. Integers wrap, as in the compiler."""
    return _constant(value, dtype, copysign(1.0, value))


@lru_cache(CACHE_SIZE, typed=True)
def _constant(value: bool | int | float, dtype: ct.DType, sign: float) -> torch.Tensor:
    """sign: part of the cache key, because 0.0 == -0.0."""
    if is_integral(dtype):
        low = integer_dtype_min(dtype)
        value = (int(value) - low) % (1 << dtype.bitwidth) + low
    elif is_float(dtype):
        return cast(torch.tensor(float(value), dtype=torch.float64), ct.float64, dtype)
    return torch.tensor(value, dtype=torch_dtype(dtype))


def cast(data: torch.Tensor, source: ct.DType, target: ct.DType, mode=None) -> torch.Tensor:
    """Convert between cuTile dtypes. mode: a rounding mode for conversions between floats."""
    if source == target:
        return data
    storage = torch_dtype(target)
    if is_boolean(target):
        return (data.to(torch.float32) if is_restricted_float(source) else data) != 0
    if is_float(source) and is_integral(target):
        return _float_to_int(data, target)
    if is_float(source) and is_float(target) and mode in DIRECTED:
        return round_directed(data.to(torch.float64), target, mode)
    if target in SATURATING and is_float(source):
        # The GPU saturates, and PyTorch does from 2.12 on.
        most = torch.finfo(storage).max
        data = data.clamp(-most, most)
    data = data.to(storage)
    return _round_to_tf32(data) if target == ct.tfloat32 else data


def _float_to_int(data: torch.Tensor, target: ct.DType) -> torch.Tensor:
    # The GPU saturates and converts NaN to 0. torch leaves both undefined.
    wide = data.to(torch.float64).nan_to_num(0.0, float("inf"), float("-inf")).trunc()
    low, high = integer_dtype_min(target), integer_dtype_max(target)
    storage = torch_dtype(target)
    result = wide.clamp(float(low), float(high - (1 << 10 if target.bitwidth == 64 else 0)))
    result = result.to(storage)
    return torch.where(wide >= float(high), torch.tensor(high, dtype=storage), result)


def _round_to_tf32(data: torch.Tensor) -> torch.Tensor:
    bits = data.view(torch.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(data.isfinite(), bits.view(torch.float32), data)


SATURATING = (ct.float8_e4m3fn, ct.float8_e5m2)
DIRECTED = (ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP)


def round_directed(exact: torch.Tensor, dtype: ct.DType, mode) -> torch.Tensor:
    """Round float64 values to `dtype` in the given rounding mode."""
    nearest = exact.to(torch_dtype(dtype))
    if mode not in DIRECTED or dtype == ct.float64:
        return nearest
    error = nearest.to(torch.float64) - exact
    if mode is ct.RoundingMode.RM:
        wrong, direction = error > 0, -torch.inf
    elif mode is ct.RoundingMode.RP:
        wrong, direction = error < 0, torch.inf
    else:
        wrong, direction = error * exact.sign() > 0, 0.0
    step = torch.nextafter(nearest, torch.full_like(nearest, direction))
    return torch.where(wrong, step, nearest)


def flush_subnormals(data: torch.Tensor) -> torch.Tensor:
    """Replace subnormal float32 values by zeros of their sign."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(data.abs() < tiny, torch.copysign(torch.zeros_like(data), data), data)


def extreme(fill: float, dtype: ct.DType) -> bool | int | float:
    """The value of undefined elements: `fill`; for integers, their largest or smallest value."""
    if is_float(dtype):
        return fill
    if is_boolean(dtype):
        return True
    return integer_dtype_max(dtype) if fill > 0 else integer_dtype_min(dtype)
