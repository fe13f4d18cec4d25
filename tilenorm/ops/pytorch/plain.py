"""Which tensors may go past PyTorch's dispatcher, directly to an implementation.

The rule is a list of what is allowed, not of what is not. PyTorch's dispatcher resolves a tensor's
state before it calls a kernel: it negates a lazily negated tensor, fills a zero tensor, and gives
the call to a mode, a transform, a tracer or a subclass. It finds each of these by a dispatch key.
So tensors are plain where they have no dispatch keys but those of an ordinary tensor on the CPU or
on CUDA, and no other key is in force in the thread. Everything else goes to the op.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.jit import is_tracing

from .torch_private import (
    TensorGuards,
    forward_mode,
    has_ordinary_keys,
    in_forward_mode,
    in_transform,
    modes,
)

MOST_GUARDS = 8  # for calls that differ in their tensors' dtypes, ranks, devices, requires_grad
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def is_transformed(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether torch.func or forward-mode derivatives have to see single operations."""
    return in_transform() or in_forward_mode(tensors)


def in_onnx_export() -> bool:
    """Whether torch.onnx.export traces the call. ONNX has none of tilenorm's ops.

    is_in_onnx_export takes 2 µs, the functions before it 0.1 µs. Its module takes 30 ms to load, so
    that it is imported in an export alone.
    """
    if not (is_exporting() or is_tracing()):
        return False
    from torch.onnx import is_in_onnx_export

    return is_in_onnx_export()


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether PyTorch's dispatcher has nothing to do for the tensors but to find the kernel."""
    return (
        not modes()
        and not is_transformed(tensors)
        and _PLAIN.issuperset(map(type, tensors))
        and has_ordinary_keys(tensors)
    )


class Plain:
    """Tells plain tensors, in 0.3 µs where tensors like these were found plain before.

    Tensors are alike where TensorGuards compares: type, dispatch keys, those of the thread among
    them, dtype, device, requires_grad and rank. A guard holds no tensor.
    """

    def __init__(self):
        self._checks = []

    def takes(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors that are there are plain."""
        present = []
        for tensor in tensors:
            if tensor is not None:
                present.append(tensor)  # a comprehension takes longer
        for check in self._checks:
            if check(*present):
                return not modes() and forward_mode._current_level < 0
        if not is_plain(*present):
            return False
        if TensorGuards is not None:
            free = [[None] * t.dim() for t in present]
            guards = TensorGuards(*present, dynamic_dims_sizes=free, dynamic_dims_strides=free)
            if guards.check(*present):  # not where a tensor is given twice
                self._checks.insert(0, guards.check)
                del self._checks[MOST_GUARDS:]
        return True
