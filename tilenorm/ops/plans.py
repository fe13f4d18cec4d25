"""Runners: what serves the calls of one spec on one device, found once and kept."""

from functools import cache
from operator import itemgetter

import torch
from torch import Tensor

from ..spec import NormSpec, Options
from .registry import MAX_ROWS, Device, Implementation, device_of, select
from .tensors import Tensors, distributed, dtype_of, merged_needs


class Runner:
    """Runs the calls of one spec on one device by an implementation.

    inference, training: functions of (tensors, eps) that return Results, or also of the rows that
    Implementation.takes_rows is about. Training saves mean and rstd.
    """

    def __init__(
        self,
        implementation: Implementation,
        spec: NormSpec,
        device: Device,
        backend: str | None = None,
    ):
        self.spec, self.options, self.backend = spec, spec.options, backend
        self.dtypes = Tensors(*(d and getattr(torch, d) for d in spec.dtypes))
        self.dtype, self.added = self.dtypes[:2]
        self.takes_rows = implementation.takes_rows
        self.inference = implementation.forward(spec, device, False)
        self.training = implementation.forward(spec, device, True)
        self.backward = cache(lambda needs: implementation.backward(spec, device, needs))
        self.gradients = cache(self._gradients)

    def _gradients(self, mask: tuple[bool, ...], dsum: bool) -> tuple:
        """A backward function for the gradients that `mask` asks for, and one that orders results.

        mask: one truth value for each input of the autograd Function, the last five for Tensors.
        The second function takes the gradients, and None as the last, and returns one for each of
        the inputs.
        """
        mask, others = mask[-5:], len(mask) - 5
        run = self.backward(merged_needs(self.dtypes, dsum, mask))
        places = distributed(range(5), self.added, self.dtype, mask)
        return run, itemgetter(*[-1] * others, *(-1 if p is None else p for p in places))


def runner_of(tensors: Tensors, options: Options, backend: str | None) -> Runner:
    """The runner of a call. It raises and warns as registry.select does."""
    x = tensors[0]
    return _runner(
        options,
        tuple([None if t is None else t.dtype for t in tensors]),
        heads_of(*tensors[3:], options.hidden),
        x.device.type,
        x.get_device(),
        x.numel() > MAX_ROWS * options.hidden,
        backend,
    )


@cache
def _runner(options, dtypes, heads, kind, index, long, backend) -> Runner:
    spec = spec_of(options, Tensors(*dtypes), heads)
    device = device_of(kind, index)
    return Runner(select(spec, MAX_ROWS + 1 if long else 0, device, backend), spec, device, backend)


def spec_of(options: Options, dtypes: Tensors, heads: int = 0) -> NormSpec:
    """The spec of options for tensors of these dtypes, None for an absent one."""
    names = (None if d is None else str(d).removeprefix("torch.") for d in dtypes)
    return NormSpec.joined(options, *names, heads=heads)


def spec_of_tensors(tensors: Tensors, options: Options) -> NormSpec:
    """The spec of a call."""
    heads = heads_of(*tensors[3:], options.hidden)
    return spec_of(options, Tensors(*map(dtype_of, tensors)), heads)


def heads_of(weight: Tensor | None, bias: Tensor | None, hidden: int) -> int:
    """How many rows of `hidden` elements weight and bias have, or 0 where they have one."""
    affine = bias if weight is None else weight
    heads = affine.numel() // hidden if affine is not None and hidden else 0
    return heads if heads > 1 else 0
