"""Derives what cuTile assumes about a kernel's arguments, without a GPU.

cuTile specialises a kernel on its arguments when it first sees them. An extent or stride of 1 is a
constant. The compiler knows whether an extent is divisible by 16, whether a stride is divisible by
16 bytes, and whether the base address is divisible by 16. On a machine with a driver the tests
compare these rules with cuTile's own.
"""

from itertools import pairwise

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
)
from torch import Tensor


def constraint(array: Tensor) -> ArrayConstraint:
    """What the compiler knows of a tensor, which may be without memory."""
    dtype = getattr(ct, str(array.dtype).removeprefix("torch."))
    vector, strides = 16 // array.itemsize, array.stride()
    rows = sorted(zip(strides, array.shape, strict=True))
    overlapping = any(outer[0] < inner[0] * inner[1] for inner, outer in pairwise(rows))
    return ArrayConstraint(
        dtype,
        array.dim(),
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=overlapping,
        stride_constant=[1 if s == 1 else None for s in strides],
        shape_constant=[1 if n == 1 else None for n in array.shape],
        stride_divisible_by=[vector if s != 1 and s % vector == 0 else 1 for s in strides],
        shape_divisible_by=[16 if n % 16 == 0 else 1 for n in array.shape],
        base_addr_divisible_by=1 if array.data_ptr() % 16 else 16,
    )


def signature(kernel: ct.kernel, arguments: tuple) -> KernelSignature:
    """The signature with which a launch with these arguments would compile the kernel."""
    annotations = kernel._annotated_function.parameter_annotations
    parameters = [_parameter(*pair) for pair in zip(arguments, annotations, strict=True)]
    unnamed = KernelSignature(parameters, CallingConvention.cutile_python_v2())
    return unnamed.with_mangled_symbol(kernel._pyfunc.__name__)


def _item(item):
    """Of a tensor or a constant, or of a tuple of such items."""
    if isinstance(item, tuple):
        return tuple(map(_item, item))
    return constraint(item) if isinstance(item, Tensor) else item


def _parameter(argument, annotation):
    if isinstance(argument, (Tensor, tuple)):
        return _item(argument)
    if annotation.constant:
        return ConstantConstraint(argument)
    return ScalarConstraint(ct.float32 if isinstance(argument, float) else ct.int32)
