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
)
from cuda.tile._ir import ops_utils
from cuda.tile._ir.type import LooselyTypedScalar

NAMES = ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NAMES += ("float8_e4m3fn", "float8_e5m2")
TORCH_DTYPE = {getattr(ct, name): getattr(torch, name) for name in NAMES}
TORCH_DTYPE |= {ct.bool_: torch.bool, ct.float8_e8m0fnu: torch.float8_e8m0fnu}
TILE_DTYPE = {v: k for k, v in TORCH_DTYPE.items()}
SATURATING = (ct.float8_e4m3fn, ct.float8_e5m2)
CACHE_SIZE = 1 << 14  # entries in each cache of constants and promotions


def is_constant(value) -> bool:
    """Whether a value is a Python constant. The compiler types such a constant loosely."""
    return isinstance(value, (int, float))


@lru_cache(CACHE_SIZE, typed=True)
def promote(x, y, force_float: bool = False) -> ct.DType:
    """Common dtype of two operands, each a dtype or a Python constant."""
    x, y = (LooselyTypedScalar(v) if is_constant(v) else v for v in (x, y))
    return ops_utils.promote_dtypes(x, y, force_float)


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
    return torch.tensor(value, dtype=TORCH_DTYPE[dtype])


def cast(data: torch.Tensor, source: ct.DType, target: ct.DType) -> torch.Tensor:
    """Convert between cuTile dtypes, to the nearest number."""
    if source == target:
        return data
    storage = TORCH_DTYPE[target]
    if is_float(source) and is_integral(target):
        raise NotImplementedError("the interpreter converts no float to an integer")
    if target in SATURATING and is_float(source):
        # The GPU saturates, and PyTorch does from 2.12 on.
        most = torch.finfo(storage).max
        data = data.clamp(-most, most)
    return data.to(storage)


def extreme(fill: float, dtype: ct.DType) -> bool | int | float:
    """The value of undefined elements: `fill`; for integers, their largest or smallest value."""
    if is_float(dtype):
        return fill
    if is_boolean(dtype):
        return True
    return integer_dtype_max(dtype) if fill > 0 else integer_dtype_min(dtype)
