"""Runners: what serves the calls of one spec on one device, found once and kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from threading import Lock

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..launch.toolchain import CompileError
from ..spec import PLAIN, NormSpec, Options, Quantization
from .branch import layer_scale_gradient
from .direct import Plain
from .registry import MAX_ROWS, Device, Implementation, device_of, record_failure, select
from .tensors import (
    SAVED,
    Branch,
    Tensors,
    asked_of_plain,
    distributed,
    dtype_of,
    merged_needs,
)

_REPLACING = Lock()


class Runner:
    """Runs the calls of one spec on one device by an implementation.

    inference, training: functions of (tensors, eps, laid_out) that return Results, as those of
    Implementation. Training saves mean and rstd. plain: tells whether tensors may be given to one
    of them directly.

    The first kernel that does not compile ends the implementation's service, in both directions:
    another implementation serves this call and all later ones. It also computes the gradients of
    what the kernels computed before, because every implementation saves the same tensors.
    """

    def __init__(
        self,
        implementation: Implementation,
        spec: NormSpec,
        device: Device,
        backend: str | None = None,
    ):
        self.spec, self.options, self.backend = spec, spec.options, backend
        self.device = device
        self.dtypes = tuple(d and getattr(torch, d) for d in spec.dtypes)
        self.dtype, self.added = self.dtypes[:2]
        self.plain = Plain()
        self._serve_by(implementation)

    def _serve_by(self, implementation: Implementation) -> None:
        self.implementation = implementation
        self.inference, self.training = self._forward(False), self._forward(True)
        self.backward = cache(self._backward)
        self.gradients = cache(self._gradients)

    def _forward(self, save: bool) -> Callable:
        chosen = self.implementation
        run = chosen.forward(self.spec, self.device, save)

        def forward(tensors, eps, laid_out=False):
            try:  # this function takes 0.04 µs
                return run(tensors, eps, laid_out)
            except CompileError as error:
                self._replace(chosen, error)
            return (self.training if save else self.inference)(tensors, eps)

        return forward

    def _backward(self, needs: Needs) -> Callable:
        chosen = self.implementation
        run = chosen.backward(self.spec, self.device, needs)

        def backward(dy, dsum, saved, eps, more=(), branch=None):
            try:
                return run(dy, dsum, saved, eps, more, branch)
            except CompileError as error:
                self._replace(chosen, error)
            return self.backward(needs)(dy, dsum, saved, eps, more, branch)

        return backward

    def _replace(self, broken: Implementation, error: CompileError) -> None:
        """Have what select now finds serve. It warns, or raises if `broken` was asked for."""
        with _REPLACING:
            if self.implementation is broken:
                record_failure(broken.name, self.spec, self.device, error)
                self._serve_by(select(self.spec, 0, self.device, self.backend))

    def _gradients(
        self, mask: tuple[bool, ...], dsum: bool, terms: int = 1, output: bool = False
    ) -> tuple:
        """A backward function for the gradients that `mask` asks for, one that orders results, and
        what tells whether tensors may be given to the first directly.

        mask: one truth value for each input of the autograd Function, the last for Tensors. The
        second function takes the gradients, and None as the last, and returns one for each of the
        inputs. terms, output: see calls.Needs.
        """
        if output:
            refuse_output(self.spec)
        if self.spec.joins and len(mask) > PLAIN:
            return self._joined_gradients(mask[1:], dsum)
        mask, others = mask[-PLAIN:], len(mask) - PLAIN
        needs = merged_needs(self.dtypes, dsum, mask, terms, output)
        run = self.backward(needs) if any(needs.gradients) or output else _nothing
        places = distributed(range(PLAIN), self.dtypes, mask)
        return run, itemgetter(*[-1] * others, *(-1 if p is None else p for p in places)), Plain()

    def _joined_gradients(self, mask: tuple[bool, ...], dsum: bool) -> tuple:
        """The same for tensors of which one is behind the PLAIN ones; mask: for the tensors."""
        needs = merged_needs(self.dtypes, dsum, asked_of_plain(self.dtypes, mask))
        run = self.backward(needs) if any(needs.gradients) else _nothing

        def joined(dy, dsum, saved, eps):
            saved, last = saved[:SAVED], saved[SAVED:]
            branch = Branch(*last) if last else None
            grads = run(dy, dsum, saved, eps, (), branch)
            layer_scale = layer_scale_gradient(self.spec, grads[1], mask, branch)
            return distributed(grads, self.dtypes, mask, dy, layer_scale)

        return joined, itemgetter(-1, *range(len(mask))), Plain()


def refuse_output(spec: NormSpec) -> None:
    """Raise NotImplementedError where a backward pass cannot write y with the forward's bits."""
    if reason := spec.output_refused:
        raise NotImplementedError(
            f"tilenorm::norm_backward: argument 'output' takes no True for {reason}: y would have"
            " other bits than the forward pass gave it"
        )


def _nothing(*_) -> tuple[None, ...]:
    """The gradients where none is asked for: y.backward(inputs=[y]) runs y's own node too."""
    return (None,) * PLAIN


def runner_of(
    tensors: Tensors,
    options: Options,
    backend: str | None,
    quantized: Quantization | None = None,
) -> Runner:
    """The runner of a call. It raises and warns as registry.select does."""
    x = tensors[0]
    return _runner(
        options,
        tuple([None if t is None else t.dtype for t in tensors]),
        heads_of(tensors[3], tensors[4], options.hidden),
        x.device.type,
        x.get_device(),
        x.numel() > MAX_ROWS * options.hidden,
        backend,
        quantized,
    )


@cache
def _runner(options, dtypes, heads, kind, index, long, backend, quantized) -> Runner:
    spec = replace(spec_of(options, dtypes, heads), quantized=quantized)
    if spec.unserved:
        raise NotImplementedError(f"tilenorm::norm: {spec.unserved}")
    device = device_of(kind, index)
    return Runner(select(spec, MAX_ROWS + 1 if long else 0, device, backend), spec, device, backend)


def spec_of(options: Options, dtypes: Sequence[torch.dtype | None], heads: int = 0) -> NormSpec:
    """The spec of options for tensors of these dtypes, None for an absent one."""
    names = [None if d is None else str(d).removeprefix("torch.") for d in dtypes]
    return NormSpec.joined(options, names, heads)


def spec_of_tensors(tensors: Tensors, options: Options) -> NormSpec:
    """The spec of a call."""
    heads = heads_of(tensors[3], tensors[4], options.hidden)
    return spec_of(options, tuple(map(dtype_of, tensors)), heads)


def heads_of(weight: Tensor | None, bias: Tensor | None, hidden: int) -> int:
    """How many rows of `hidden` elements weight and bias have, or 0 where they have one."""
    affine = bias if weight is None else weight
    heads = affine.numel() // hidden if affine is not None and hidden else 0
    return heads if heads > 1 else 0
