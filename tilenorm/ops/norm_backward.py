"""The torch.library op norm_backward: of one norm. The backward pass of every op is made of it,
except for modulated norms and rotated heads, which have ops of their own (backward_by_role.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..spec import NormSpec, Options
from ..table import FACTORS
from . import reference
from .bound import MOST_CALLS, norm_of
from .gradients import PLACES, needs_of, refuse_output
from .layout import vector_of
from .library import LIBRARY, TAGS, tell_others
from .registry import MAX_ROWS, on_device_of
from .torch_private import in_forward_mode

_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}
OPTIONS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Options).items())
TERMS = ("grad_output_2", "grad_output_3", "grad_output_4")
# The first tensors, and the roles of those that the forward pass saved.
FIRST = ("grad_output", "grad_sum", "input", "gate", "weight", "bias", "mean", "rstd")
SAVED = ("x", *FIRST[3:], *FACTORS)
MASKED = tuple(PLACES)[:5]  # the roles of output_mask
LIBRARY.define(
    "norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate,"
    " Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd,"
    f" {OPTIONS}, float eps, bool added, bool[5] output_mask, str? backend=None,"
    " Tensor? grad_output_2=None, Tensor? grad_output_3=None, Tensor? grad_output_4=None,"
    f" bool output=False{''.join(f', Tensor? {name}=None' for name in FACTORS)})"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight,"
    " Tensor grad_bias, Tensor output)",
    tags=TAGS,
)
NAMES = tuple(a.name for a in torch.ops.tilenorm.norm_backward.default._schema.arguments)


class Backward(NamedTuple):
    """The arguments of the op.

    grad_output, grad_sum: the gradients of y and of the sum. saved: by the roles in SAVED. added:
    whether there was a residual. terms: what is added to grad_output, from left to right; each
    addition is rounded to its dtype, as autograd's own are. output: y is written once more, with
    the bits of the forward pass, whose eps and rounding have to be given then;
    NormSpec.output_refused tells for what it is refused.
    """

    dy: Tensor
    dsum: Tensor | None
    saved: dict[str, Any]
    options: Options
    eps: float
    added: bool
    mask: tuple[bool, ...]
    backend: str | None
    terms: tuple[Tensor | None, ...]
    output: bool

    @classmethod
    def of(cls, arguments: Sequence, by_name: dict | None = None) -> "Backward":
        given = dict(zip(NAMES, arguments, strict=False)) | (by_name or {})
        options = Options(*(given[name] for name in Options._fields))
        saved = {role: given.get("input" if role == "x" else role) for role in SAVED}
        if options.norm != "layer":
            saved["mean"] = None
        terms = tuple(given.get(name) for name in TERMS)
        return cls(
            given["grad_output"],
            given["grad_sum"],
            saved,
            options,
            given["eps"],
            given["added"],
            tuple(given["output_mask"]),
            given.get("backend"),
            terms,
            given.get("output", False),
        )

    @staticmethod
    def argument(role: str) -> str:
        """The name of the argument of a role."""
        return "input" if role == "x" else role

    @property
    def more(self) -> tuple[Tensor, ...]:
        """The terms of dy behind the first. Raises as terms_after does."""
        return terms_after(self.dy, *self.terms)

    @property
    def spec(self) -> NormSpec:
        """The spec of the norm, by the dtypes of the tensors."""
        x, dy = self.saved["x"], self.dy
        dtypes: dict[str, Any] = {"x": dy, "residual": x}
        if not self.added:
            # Only what is added to the normalised rows gives y another dtype.
            dtypes = {"x": x, "skip": None if dy.dtype == x.dtype else dy}
        dtypes |= {role: self.saved[role] for role in ("gate", "weight", "bias", *FACTORS)}
        named = {r: None if t is None else reference.name_of(t.dtype) for r, t in dtypes.items()}
        hidden = self.options.hidden
        affine = [prod(t.shape) for r in ("weight", "bias") if (t := self.saved[r]) is not None]
        heads = max(affine) // hidden if affine and hidden else 0
        try:
            return _spec_of(self.options, heads, *named.items())
        except TypeError:  # a symbolic size has no hash
            return NormSpec.of_tensors(self.options, named, heads)

    def needs(self, spec: NormSpec) -> Needs:
        """Raises NotImplementedError as refuse_output does."""
        if self.output:
            refuse_output(spec)
        asked = [role for role, need in zip(MASKED, self.mask, strict=True) if need]
        terms = 1 + sum(term is not None for term in self.terms)
        return needs_of(spec, asked, self.dsum is not None, terms, self.output)


@lru_cache(MOST_CALLS)
def _spec_of(options: Options, heads: int, *named: tuple) -> NormSpec:
    return NormSpec.of_tensors(options, dict(named), heads)


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


def norm_backward(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are not asked for are empty tensors."""
    call = Backward.of(arguments)
    dy, x, saved, more = call.dy, call.saved["x"], call.saved, call.more
    if in_forward_mode((dy, call.dsum, *saved.values(), *more)):
        raise NotImplementedError("torch.ops.tilenorm.norm_backward has no forward-mode derivative")
    spec, long = call.spec, x.numel() > MAX_ROWS * call.options.hidden
    needs = call.needs(spec)
    if not any(needs.gradients) and not call.output:
        return _with_absent(dy, ())
    norm = norm_of(spec, x.device.type, x.get_device(), long, call.backend)
    for role in ("mean", "rstd"):
        saved[role] = saved[role] if saved[role] is None else vector_of(saved[role])
    kept = tuple(saved[role] for role in spec.kept)
    run = norm.backward(spec, needs)
    with on_device_of(dy):
        return _with_absent(dy, run(dy, call.dsum, kept, call.eps, more))


def norm_backward_decomposed(*arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Backward.of(arguments, by_name)
    spec = call.spec
    needs, found = call.needs(spec), ()
    if any(needs.gradients) or needs.output:
        incoming = call.dy, call.dsum, call.saved
        found = reference.backward(spec, needs, *incoming, call.eps, call.more)
    return _with_absent(call.dy, found)


def _with_absent(dy: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    every = (*found, *[None] * 6)[:6]
    return tuple([dy.new_empty(0) if t is None else t for t in every])


def norm_backward_fake(*arguments) -> tuple[Tensor, ...]:
    tell_others()
    call = Backward.of(arguments)
    spec, dy, saved = call.spec, call.dy, call.saved
    needs, _ = call.needs(spec), call.more  # which raises
    x = dy if call.added else saved["x"]
    likes = x, saved["x"], saved["gate"], saved["weight"], saved["bias"], dy
    return tuple(
        like.new_empty(like.shape) if need else dy.new_empty(0)
        for need, like in zip((*needs.gradients, needs.output), likes, strict=True)
    )


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("norm_backward", norm_backward, _key)
torch.library.register_fake("tilenorm::norm_backward", norm_backward_fake, lib=LIBRARY)
