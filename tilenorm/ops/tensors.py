"""The groups in which tensors travel behind the public functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.calls import Needs


class Tensors(NamedTuple):
    """What a norm takes. A plain tuple in this order serves too, and takes less time to make."""

    input: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class Results(NamedTuple):
    """What a norm makes: y and the sum with the residual, as the input; mean and rstd (rows,).

    The ops give mean and rstd the leading sizes of the input, as layout.rows_shape tells. An
    implementation that was told to save nothing may leave out mean and rstd.
    """

    y: Tensor
    sum: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


class Saved(NamedTuple):
    """What the backward pass reads beside the incoming gradients. x is the sum, if there is one."""

    x: Tensor
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def statistics_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of mean and rstd, and of what the reference computes in."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


def merged_needs(dtypes: Tensors, dsum: bool, mask: tuple[bool, ...]) -> Needs:
    """Which gradients to compute, where `mask` says which of the tensors' are asked for.

    dtypes: the tensors' dtypes, None for an absent tensor. dsum: whether the sum's gradient comes
    in. An input and a residual of one dtype have the same gradient, which is computed once.
    """
    dx, dresidual, dgate, dw, db = map(bool, mask)
    added = dtypes[1]
    if added is None or added == dtypes[0]:
        dx, dresidual = dx or (dresidual and added is not None), False
    dgate, dw, db = (d and t is not None for d, t in zip((dgate, dw, db), dtypes[2:], strict=True))
    return Needs(dx, dw, db, dresidual, dgate, dsum)


def computed(needs: Needs) -> tuple[bool, ...]:
    """Which gradients are computed, in the order of Tensors."""
    return needs.dx, needs.dresidual, needs.dgate, needs.dw, needs.db


def distributed(grads: tuple, added, dtype, mask: tuple[bool, ...]) -> tuple:
    """A gradient for each of Tensors where the mask asks for one, else None.

    grads: what was computed. added: the residual's dtype. Where input and residual have one dtype,
    both get the one gradient that was computed.
    """
    dx, dresidual, *rest = grads
    if added == dtype:
        dresidual = dx
    return tuple(g if m else None for g, m in zip((dx, dresidual, *rest), mask, strict=True))
