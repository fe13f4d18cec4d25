"""The groups in which tensors travel behind the public functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..spec import PLAIN


class Tensors(NamedTuple):
    """What a norm takes. A plain tuple in this order serves too, and takes less time to make.

    The first PLAIN are those of every call. A call without any of the others leaves all of them
    out, so that a call of a plain norm takes no longer because others exist. addend: is added to
    the input before the residual. skip: is added to the normalised rows. dropout_mask, layer_scale:
    multiply the input before the residual is added.
    """

    input: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    addend: Tensor | None = None
    skip: Tensor | None = None
    dropout_mask: Tensor | None = None
    layer_scale: Tensor | None = None


class Branch(NamedTuple):
    """What multiplies the input before the residual is added. input: where there is a layer scale,
    whose gradient it is needed for.
    """

    dropout_mask: Tensor | None = None
    layer_scale: Tensor | None = None
    input: Tensor | None = None


ADDEND, SKIP = map(Tensors._fields.index, ("addend", "skip"))
LAYER_SCALE = Tensors._fields.index("layer_scale")
# The public functions' arguments, where they are not called as the tensors.
ARGUMENTS = {"addend": "residual[0]", "skip": "residual"}


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


SAVED = len(Saved._fields)


def trimmed(tensors: tuple) -> tuple:
    """The tensors of a call: without those behind the PLAIN ones if all of them are absent."""
    return tensors if any(t is not None for t in tensors[PLAIN:]) else tensors[:PLAIN]


def dtype_of_y(tensors: tuple) -> torch.dtype:
    """The dtype of a call's first output."""
    return (tensors[0] if len(tensors) == PLAIN or tensors[SKIP] is None else tensors[SKIP]).dtype


def branch_of(tensors: tuple) -> Branch | None:
    """What the backward pass reads of a call whose input is masked or scaled, else None."""
    mask, layer_scale = tensors[SKIP + 1 :] or (None, None)
    if mask is None and layer_scale is None:
        return None
    return Branch(mask, layer_scale, None if layer_scale is None else tensors[0])


def branches(dtypes: tuple) -> bool:
    """Whether the input is masked or scaled; dtypes: of the tensors, None for an absent one."""
    return any(d is not None for d in dtypes[SKIP + 1 :])


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def statistics_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of mean and rstd, and of what the reference computes in."""
    for tensor in tensors:  # any() of a generator takes longer
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def merged_needs(
    dtypes: Tensors, dsum: bool, mask: tuple[bool, ...], terms: int = 1, output: bool = False
) -> Needs:
    """Which gradients to compute, where `mask` says which of the PLAIN tensors' are asked for.

    dtypes: the tensors' dtypes, None for an absent tensor. dsum: whether the sum's gradient comes
    in; only the gradients of input and residual need it. An input and a residual of one dtype have
    the same gradient, which is computed once, unless the input is masked or scaled. terms, output:
    see Needs.
    """
    dx, dresidual, dgate, dw, db = map(bool, mask)
    added = dtypes[1]
    if added is None or (added == dtypes[0] and not branches(dtypes)):
        dx, dresidual = dx or (dresidual and added is not None), False
    others = zip((dgate, dw, db), dtypes[2:PLAIN], strict=True)
    dgate, dw, db = (d and t is not None for d, t in others)
    return Needs(dx, dw, db, dresidual, dgate, dsum and (dx or dresidual), terms, output)


def terms_after(dy: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The terms of dy behind the first, which is `dy`.

    Raises RuntimeError where a term is not of dy's shape, dtype and device, or where an earlier one
    is absent.
    """
    given = 1 + max((i for i, t in enumerate(others) if t is not None), default=-1)
    for i, term in enumerate(others[:given]):
        name = f"tilenorm::norm_backward: argument 'grad_output_{i + 2}'"
        if term is None:
            raise RuntimeError(f"{name} is absent, but 'grad_output_{given + 1}' is given")
        wanted, got = ((t.shape, t.dtype, t.device) for t in (dy, term))
        if got != wanted:
            told = [f"{list(shape)} {dtype} on {device}" for shape, dtype, device in (wanted, got)]
            raise RuntimeError(f"{name} takes what 'grad_output' is, {told[0]}, got {told[1]}")
    return others[:given]


def asked_of_plain(dtypes: tuple, mask: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which gradients of the PLAIN tensors give those that `mask` asks for.

    dtypes: of the tensors. mask: as long as the tensors.
    """
    if len(mask) == PLAIN:
        return mask
    input, residual, *others = mask[:PLAIN]
    residual = residual or mask[LAYER_SCALE]  # whose gradient is made of the residual's
    if mask[ADDEND]:
        as_input = _as_input(dtypes)
        input, residual = input or as_input, residual or not as_input
    return input, residual, *others


def _as_input(dtypes: tuple) -> bool:
    """Whether the addend gets the input's gradient. Else it gets the residual's in its own dtype.

    An addend of a third dtype has fewer bits than the residual.
    """
    return dtypes[ADDEND] == dtypes[0]


def distributed(
    grads: tuple,
    dtypes: tuple,
    mask: tuple[bool, ...],
    dy: Tensor | None = None,
    layer_scale: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """A gradient for each of Tensors where the mask asks for one, else None.

    grads: what was computed, of the PLAIN tensors. dtypes: of the tensors. Where input and residual
    have one dtype, both get the one gradient that was computed. So does the addend. A skip gets dy
    itself, as from PyTorch's own addition. layer_scale: the gradient of that.
    """
    dx, dresidual, *rest = grads
    if dtypes[1] == dtypes[0] and not branches(dtypes):
        dresidual = dx
    found = [dx, dresidual, *rest]
    if len(mask) > PLAIN:
        daddend = dx if _as_input(dtypes) else dresidual
        found += [daddend.to(dtypes[ADDEND]) if mask[ADDEND] else None, dy, None, layer_scale]
    return tuple(g if m else None for g, m in zip(found, mask, strict=True))
