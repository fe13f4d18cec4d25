"""Derives what cuTile assumes about a kernel's arguments, without a GPU.

cuTile specialises a kernel on its arguments when it first sees them. An extent or stride of 1 is a
constant. The compiler knows whether an extent is divisible by 16, whether a stride is divisible by
16 bytes, and whether the base address is divisible by 16. On a machine with a driver the tests
compare these rules with cuTile's own.
"""

from dataclasses import dataclass
from itertools import pairwise

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
)

_DTYPES = {
    "float16": ct.float16,
    "bfloat16": ct.bfloat16,
    "float32": ct.float32,
    "int32": ct.int32,  # slots
    "uint8": ct.uint8,  # scales
    "float8_e4m3fn": ct.float8_e4m3fn,
    "float8_e5m2": ct.float8_e5m2,
}


@dataclass(frozen=True)
class ArrayLike:
    """A tensor as the compiler sees it: everything but the data."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool = True

    @classmethod
    def contiguous(cls, dtype: str, *shape: int) -> "ArrayLike":
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        return cls(dtype, shape, tuple(strides))

    def constraint(self) -> ArrayConstraint:
        vector = 16 // (_DTYPES[self.dtype].bitwidth // 8)
        rows = sorted(zip(self.strides, self.shape, strict=True))
        overlapping = any(outer[0] < inner[0] * inner[1] for inner, outer in pairwise(rows))
        return ArrayConstraint(
            _DTYPES[self.dtype],
            len(self.shape),
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=overlapping,
            stride_constant=[1 if s == 1 else None for s in self.strides],
            shape_constant=[1 if n == 1 else None for n in self.shape],
            stride_divisible_by=[vector if s != 1 and s % vector == 0 else 1 for s in self.strides],
            shape_divisible_by=[16 if n % 16 == 0 else 1 for n in self.shape],
            base_addr_divisible_by=16 if self.aligned else 1,
        )


def signature(kernel: ct.kernel, arguments: tuple) -> KernelSignature:
    """The signature with which a launch with these arguments would compile the kernel."""
    annotations = kernel._annotated_function.parameter_annotations
    parameters = [_parameter(*pair) for pair in zip(arguments, annotations, strict=True)]
    unnamed = KernelSignature(parameters, CallingConvention.cutile_python_v2())
    return unnamed.with_mangled_symbol(kernel._pyfunc.__name__)


def _item(item):
    """Of a tuple of arrays, of constants or of such tuples."""
    if isinstance(item, tuple):
        return tuple(map(_item, item))
    return item.constraint() if isinstance(item, ArrayLike) else item


def _parameter(argument, annotation):
    if isinstance(argument, ArrayLike):
        return argument.constraint()
    if isinstance(argument, tuple):
        return tuple(map(_item, argument))
    if annotation.constant:
        return ConstantConstraint(argument)
    return ScalarConstraint(ct.float32 if isinstance(argument, float) else ct.int32)
