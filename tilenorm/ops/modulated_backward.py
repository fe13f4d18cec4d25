"""The torch.library op modulated_norm_backward: the backward pass of a norm modulated by group."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..spec import NormSpec
from ..table import MODULATION
from . import reference
from .autograd import MODULATED_SAVED
from .bound import norm_of
from .gradients import PLACES, needs_of
from .layout import vector_of
from .library import LIBRARY, TAGS, tell_others
from .registry import MAX_ROWS, on_device_of
from .torch_private import in_forward_mode

NAME = "modulated_norm_backward"
TENSORS = ("dy", "dsum", *MODULATED_SAVED)  # by their roles behind the first two
MASKED = (*tuple(PLACES)[:5], *MODULATION)  # the roles of output_mask
# A mask has a place for the gradient of a gate by rows, which no modulated norm has.
LIBRARY.define(
    f"{NAME}(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? branch, Tensor? weight,"
    " Tensor? bias, Tensor? mean, Tensor rstd, Tensor scale, Tensor? gate, SymInt hidden, str norm,"
    " str? shift, float eps, bool added, bool[8] output_mask, str? backend=None)"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_rows, Tensor grad_weight,"
    " Tensor grad_bias, Tensor grad_scale, Tensor grad_shift, Tensor grad_gate)",
    tags=TAGS,
)

ARGUMENTS = [a.name for a in torch.ops.tilenorm.modulated_norm_backward.default._schema.arguments]
NAMES = tuple(ARGUMENTS[: len(TENSORS)])  # of its tensors


class Backward(NamedTuple):
    """The arguments of the op.

    tensors: by TENSORS: the gradients of y and of the sum; x, or the sum where there was a
    residual; the input where a gate by group multiplied it. shift: the dtype of the shift, or None
    without one. added: whether there was a residual.
    """

    tensors: dict[str, Any]
    hidden: int
    norm: str
    shift: str | None
    eps: float
    added: bool
    mask: Sequence[bool]
    backend: str | None = None

    @classmethod
    def of(cls, arguments: Sequence, by_name: dict | None = None) -> "Backward":
        given = dict(zip(ARGUMENTS, arguments, strict=False)) | (by_name or {})
        tensors = {role: given.pop(name, None) for role, name in zip(TENSORS, NAMES, strict=True)}
        return cls(tensors, *[given[name] for name in ARGUMENTS if name in given])

    @staticmethod
    def argument(role: str) -> str:
        """The name of the argument of a role."""
        return NAMES[TENSORS.index(role)]

    @property
    def spec(self) -> NormSpec:
        """The spec of the norm, by the dtypes of the tensors."""
        t = self.tensors
        roles = ("weight", "bias", "mod_scale", "mod_gate")
        dtypes = {r: reference.name_of(t[r].dtype) for r in roles if t[r] is not None}
        if self.added:
            dtypes["residual"] = reference.name_of(t["x"].dtype)
        affine = [prod(p.shape) for r in roles[:2] if (p := t[r]) is not None]
        heads = max(affine) // self.hidden if affine and self.hidden else 0
        dtype = reference.name_of(t["dy"].dtype)
        shift, heads = self.shift, heads if heads > 1 else 0
        return NormSpec(self.norm, self.hidden, dtype, heads=heads, mod_shift=shift, **dtypes)

    def needs(self, spec: NormSpec) -> Needs:
        asked = [role for role, need in zip(MASKED, self.mask, strict=True) if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    def kept(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """The tensors of NormSpec.kept, with numbers as vectors."""
        numbers = ("mean", "rstd")
        return tuple(
            [vector_of(self.tensors[r]) if r in numbers else self.tensors[r] for r in spec.kept]
        )


def backward(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are not asked for are empty tensors."""
    call = Backward.of(arguments)
    dy, x = call.tensors["dy"], call.tensors["x"]
    if in_forward_mode(tuple(call.tensors.values())):
        raise NotImplementedError(f"torch.ops.tilenorm.{NAME} has no forward-mode derivative")
    spec, long = call.spec, x.numel() > MAX_ROWS * call.hidden
    needs = call.needs(spec)
    if not any(needs.gradients):
        return _with_absent(dy, ())
    run = norm_of(spec, x.device.type, x.get_device(), long, call.backend).backward(spec, needs)
    with on_device_of(dy):
        return _with_absent(dy, run(dy, call.tensors["dsum"], call.kept(spec), call.eps))


def decomposed(*arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Backward.of(arguments, by_name)
    spec, dy, found = call.spec, call.tensors["dy"], ()
    needs = call.needs(spec)
    if any(needs.gradients):
        found = reference.backward(spec, needs, dy, call.tensors["dsum"], call.tensors, call.eps)
    return _with_absent(dy, found)


def _with_absent(dy: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    every = (*found, *[None] * len(MASKED))[: len(MASKED)]
    return tuple([dy.new_empty(0) if t is None else t for t in every])


def fake(*arguments) -> tuple[Tensor, ...]:
    tell_others()
    call = Backward.of(arguments)
    spec, t = call.spec, call.tensors
    dy, scale = t["dy"], t["mod_scale"]
    shift = spec.mod_shift and scale.new_empty(0, dtype=getattr(torch, spec.mod_shift))
    likes = dy, t["x"], None, t["weight"], t["bias"], scale, shift, t["mod_gate"]
    made = []
    for need, like in zip(call.needs(spec).gradients, likes, strict=True):
        shape = scale.shape if like is shift and need else like.shape if need else 0
        made.append((like if need else dy).new_empty(shape))
    return tuple(made)


for _key in ("CPU", "CUDA"):
    LIBRARY.impl(NAME, backward, _key)
torch.library.register_fake(f"tilenorm::{NAME}", fake, lib=LIBRARY)
