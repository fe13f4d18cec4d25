"""The plans of calls: what a call's tensors and arguments say of them, found once and kept."""

from collections.abc import Callable
from functools import cache
from operator import itemgetter

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..launch.plan import BackwardPlan, plan_backward, plan_forward
from ..launch.target import Target
from ..spec import NormSpec
from .registry import device_of, select


class Plans:
    """What calls of one spec on one device need, found once."""

    def __init__(self, spec: NormSpec, target: Target, backend: str | None):
        self.spec, self.backend, self.aligned = spec, backend, spec.aligned
        self.dtype, self.added = (d and getattr(torch, d) for d in (spec.dtype, spec.residual))
        self.inference = plan_forward(spec, target, False)
        self.training = plan_forward(spec, target, True)
        self.backward = cache(lambda needs: plan_backward(spec, target, needs))
        self.gradients = cache(self._gradients)

    def _gradients(self, mask: tuple[bool, ...], dsum: bool) -> tuple[BackwardPlan, Callable]:
        """The backward plan for a mask over inputs, and what sorts its results, and None, to these.

        The first five inputs are input, residual, gate, weight and bias; the others have none.
        """
        spec = self.spec
        has = (spec.dtype, spec.residual, spec.gate, spec.weight, spec.bias)
        plan = self.backward(merged_needs(*has, dsum or None, mask[:5]))
        places = spread(range(5), spec.residual, spec.dtype, mask[:5])
        return plan, itemgetter(*(-1 if p is None else p for p in places), *[-1] * len(mask[5:]))


def spec_of(
    norm: str,
    hidden: int,
    dtype: torch.dtype,
    residual: torch.dtype | None,
    gate: torch.dtype | None,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    offset: float,
    gate_first: bool,
    heads: int,
    rounding: str,
) -> NormSpec:
    """The spec of a norm over `hidden` elements of tensors of these dtypes."""
    dtypes = (dtype, residual, gate, weight, bias)
    x, r, z, w, b = (None if d is None else str(d).removeprefix("torch.") for d in dtypes)
    return NormSpec(norm, hidden, x, w, b, offset, r, z, gate_first, heads, rounding)


def spec_of_tensors(
    x, residual, gate, weight, bias, norm, hidden, eps, offset, gate_first, rounding
) -> NormSpec:
    """The spec of a call of the op."""
    dtypes = (None if t is None else t.dtype for t in (x, residual, gate, weight, bias))
    heads = _heads(weight, bias, hidden)
    return spec_of(norm, hidden, *dtypes, offset, gate_first, heads, rounding)


def plans_of(
    x, residual, gate, weight, bias, norm, hidden, eps, offset, gate_first, rounding, backend
) -> Plans | None:
    """Plans of a call of the op on CUDA tensors if the kernels serve, else None.

    Raises and warns as select does.
    """
    return _plans(
        norm,
        hidden,
        x.dtype,
        None if residual is None else residual.dtype,
        None if gate is None else gate.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        offset,
        gate_first,
        _heads(weight, bias, hidden),
        rounding,
        x.get_device(),
        backend,
    )


@cache
def _plans(*described) -> Plans | None:
    *of_spec, index, backend = described
    spec, device = spec_of(*of_spec), device_of("cuda", index)
    if select(spec, 0, device, backend) != "cutile":
        return None
    return Plans(spec, device.target, backend)


def _heads(weight: Tensor | None, bias: Tensor | None, hidden: int) -> int:
    """How many rows the parameters have; 0 where one row of each serves every row."""
    affine = bias if weight is None else weight
    heads = affine.numel() // hidden if affine is not None and hidden else 0
    return heads if heads > 1 else 0


def merged_needs(dtype, residual, gate, weight, bias, dsum, mask) -> Needs:
    """What to compute for a mask of input, residual, gate, weight and bias.

    Input and residual of one dtype have one gradient, that of the input.
    """
    dx, dresidual, dgate, dw, db = map(bool, mask)
    if residual is None or residual == dtype:
        dx, dresidual = dx or (dresidual and residual is not None), False
    return Needs(
        dx,
        dw and weight is not None,
        db and bias is not None,
        dresidual,
        dgate and gate is not None,
        dsum is not None,
    )


def computed(needs: Needs) -> tuple[bool, ...]:
    """Of the gradients of input, residual, gate, weight and bias, which are computed."""
    return needs.dx, needs.dresidual, needs.dgate, needs.dw, needs.db


def spread(grads, added, dtype, mask) -> tuple[Tensor | None, ...]:
    """What was computed, to whom it is due: one gradient may serve input and residual."""
    dx, dresidual, *rest = grads
    if added == dtype:
        dresidual = dx
    return tuple(g if m else None for g, m in zip((dx, dresidual, *rest), mask, strict=True))
