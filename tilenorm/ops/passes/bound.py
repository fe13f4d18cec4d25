"""Bound calls: what serves the calls of an op, for one spec on one device, found once and kept."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ...launch.calls import Needs
from ...launch.toolchain import CompileError
from ...row import Op
from ...spec import TENSORS, NormSpec, Options, Quantization, Rotation
from ...table import OPS, QUANTIZATION, ROTATION
from ..pytorch.plain import Plain
from ..pytorch.sizes import without_tensor
from . import native
from .base import NONE, Gradients, Pass, Served
from .gradients import Step, run_steps, steps_of
from .reference import name_of
from .registry import MAX_ROWS, Device, Implementation, device_of, failure, record_failure, select

_REPLACING = Lock()
MOST_CALLS = 1024  # that are remembered


class OpSpecs:
    """An op for tensors of some dtypes: the spec of each of its norms, and what autograd saves.

    options: `hidden`, and the values of the op's options. dtypes, heads: for each tensor that the
    op takes, its dtype, None for an absent one, and how many rows of `hidden` elements a weight or
    a bias has. It holds no tensor and knows no device. returned: how many of the results the
    autograd Function returns. not_differentiable: which of them have no gradient. save: whether
    mean and rstd are among the results.
    """

    gradients: Callable | None = None  # finds the implementation of a backward pass

    def __init__(
        self,
        op: Op,
        options: tuple,
        dtypes: tuple[torch.dtype | None, ...],
        heads: tuple[int, ...],
        backend: str | None,
        save: bool = True,
    ):
        self.op, self.options, self.backend, self.save = op, options, backend, save
        self.specs = specs_of(op, options, dtypes, heads)
        self.spec = self.specs[0] if len(self.specs) == 1 else NormSpec.chained(*self.specs)
        names = [port.name for port in (*op.takes, *op.makes)]
        places: list[int] = []
        for stage, spec in zip(op.stages, self.specs, strict=True):
            x = stage.ports["sum" if spec.residual else "x"]
            ports = stage.ports | {"x": x, "input": stage.ports["x"]}
            places += [names.index(ports[role]) for role in spec.autograd_saves]
        # Of an op's tensors and results, those that autograd saves; and how many they are.
        self.autograd_saves: Callable[[tuple], tuple] = itemgetter(*places)
        self.saves = len(places)
        self._returns(len(op.makes))
        self.steps = cache(partial(steps_of, op, self.specs))

    def _returns(self, count: int) -> None:
        self.returned = count
        self.differentiable = self.spec.differentiable
        self.not_differentiable = [
            i for i, port in enumerate(self.op.makes[:count]) if not port.grad
        ]

    def unsaved(self, results: Sequence) -> list:
        """The results, with None for mean and rstd, in whose place an op returns empty tensors."""
        pairs = zip(self.op.makes, results, strict=True)
        return [None if port.number else t for port, t in pairs]

    def eps_of(self, eps: Any) -> tuple[float, ...]:
        """The eps of each norm, given that of a call."""
        return eps if self.op.calls else (eps,)


def specs_of(
    op: Op, options: tuple, dtypes: Sequence[torch.dtype | None], sizes: Sequence[int]
) -> tuple[NormSpec, ...]:
    """The spec of each norm of an op. dtypes, sizes: see kinds_of."""
    named = op.named([None if dtype is None else name_of(dtype) for dtype in dtypes])
    named |= {port.name: named.get(port.like) for port in op.makes if port.dims == "... n"}
    specs, of_port = [], op.named(sizes)
    for stage in op.stages:
        row, ports = OPS[stage.op], stage.ports
        by_role = {role: named.get(ports.get(role)) for role in row.roles}
        heads = max([of_port.get(ports.get(role), 0) for role in ("weight", "bias")])
        specs.append(_spec_of(op, options, by_role, heads, of_port))
    return tuple(specs)


def _spec_of(op: Op, options: tuple, dtypes: dict, heads: int, sizes: dict) -> NormSpec:
    """The spec of a norm of an op. dtypes: by the roles of the tensors that the norm takes."""
    by_name, fields = op.named_options(options), {}
    if op.quantized:
        scaling, dtype, *rest = (by_name[name] for name in QUANTIZATION)
        fields["quantized"] = Quantization(scaling, name_of(dtype), *rest)
    if op.rotated:
        dim, interleaved, heads_first = (by_name[name] for name in ROTATION)
        tables = dtypes["cos"], sizes["cos"] == dim, dtypes["positions"]
        fields["rotation"] = Rotation(dim, sizes["input"], interleaved, *tables, heads_first)
        fields["key_hidden"] = sizes["key"]
    out = by_name.get("out_dtype")
    if out is not None and name_of(out) != dtypes["x"]:
        fields["out_dtype"] = name_of(out)
    dtypes = {role: of for role, of in dtypes.items() if role == "x" or role in TENSORS}
    return NormSpec.of_tensors(options_of(op, options), dtypes, heads, **fields)


def options_of(op: Op, options: tuple) -> Options:
    """The options of an op's norms."""
    by_name = op.named_options(options)
    by_name |= {"hidden": options[0], "norm": op.norm}
    by_name["gate_first"] = not by_name.get("norm_before_gate", True)
    return Options(**{name: by_name[name] for name in Options._fields if name in by_name})


def refuse_gradient(op: Op, options: tuple) -> None:
    """Raise RuntimeError where there is no result that a gradient could come in by."""
    if op.quantized and not options[1 + op.options.index("return_output")]:
        raise RuntimeError(
            f"{op.name}: an argument requires a gradient, which comes in through the normalised"
            " rows: pass return_output=True, or call it under torch.no_grad()"
        )


def kinds_of(op: Op, tensors: Sequence[Tensor | None], hidden: int) -> tuple[tuple, tuple]:
    """For each tensor that an op takes, its dtype, None for an absent one; and how many rows of
    `hidden` elements a weight or bias has, 0 for the others and for one that has one. Where heads
    are rotated, in place of these numbers: the elements of a head, those of a key's token if they
    are normalised together, and the columns of the tables.
    """
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    if op.rotated:
        return dtypes, _head_sizes(op, tensors, hidden)
    heads = []
    for port, tensor in zip(op.takes, tensors, strict=True):
        rows = 0
        if port.dims == "[h] n" and tensor is not None and hidden:
            rows = tensor.numel() // hidden
        heads.append(rows if rows > 1 else 0)
    return dtypes, tuple(heads)


def _head_sizes(op: Op, tensors: Sequence[Tensor | None], hidden: int) -> tuple[int, ...]:
    named = op.named(tensors)
    x, key = named["input"], named["key"]
    sizes = {"input": x.shape[-1], "cos": named["cos"].shape[-1]}
    if key is not None and hidden != x.shape[-1]:
        sizes["key"] = prod(key.shape[-2:])
    # torch.jit has tensors for sizes.
    return tuple([without_tensor(sizes.get(name, 0)) for name in named])


def specs_of_tensors(
    op: Op,
    tensors: Sequence[Tensor | None],
    options: tuple,
    backend: str | None = None,
    save: bool = True,
) -> OpSpecs:
    """An op for the tensors of a call."""
    kinds = kinds_of(op, tensors, options[0])
    try:
        return _op_specs(op.name, options, *kinds, backend, save)
    except TypeError:  # a symbolic size has no hash
        return OpSpecs(op, options, *kinds, backend, save)


@lru_cache(MOST_CALLS)
def _op_specs(name, options, dtypes, heads, backend, save) -> OpSpecs:
    return OpSpecs(OPS[name], options, dtypes, heads, backend, save)


class Bound(OpSpecs):
    """Runs the calls of one op, for one spec on one device, by an implementation.

    inference, training: the passes of (tensors, eps). Training saves mean and rstd. plain: tells
    whether tensors may be given to one of them directly. An op of several norms is one pass where
    the implementation has it, else it runs norm by norm; its eps are a tuple.

    The first kernel that does not compile ends the implementation's service, in both directions:
    another implementation serves this call and all later ones. It also computes the gradients of
    what the kernels computed before, because every implementation saves the same tensors.
    """

    def __init__(self, op, options, dtypes, heads, backend, device: Device, long: bool):
        super().__init__(op, options, dtypes, heads, backend)
        for spec in self.specs:
            if spec.unserved:
                raise NotImplementedError(f"tilenorm::{op.name}: {spec.unserved}")
        self.device, self.plain = device, Plain()
        self._returns(op.shown)
        rows = MAX_ROWS + 1 if long else 0
        self.norms = [
            BoundNorm(select(spec, rows, device, backend), spec, device, backend)
            for spec in self.specs
        ]
        self.inference, self.training = self._forward(False), self._forward(True)
        self.gradients = cache(self._gradients)

    def _forward(self, save: bool) -> Pass:
        if not self.op.calls:
            return self.norms[0].forward(save)
        chain = Pass(lambda: self._chain(save, chain))
        return chain

    def _chain(self, save: bool, chain: Pass) -> Served:
        """All norms in one pass, where one implementation serves them and has it."""
        chosen, apart = self.norms[0].implementation, self._norm_by_norm(save)
        alike = {norm.implementation.name for norm in self.norms} == {chosen.name}
        served = alike and not failure(chosen.name, self.spec, self.device)
        run = chosen.forward(self.spec, self.device, save) if served else None

        def failed(error: CompileError) -> None:
            record_failure(chosen.name, self.spec, self.device, error)
            chain.reset()

        return Served(apart if run is None else Chain(run, apart), failed)

    def _norm_by_norm(self, save: bool) -> Callable:
        names = [port.name for port in self.op.takes]

        def apart(tensors, eps):
            named = dict(zip(names, tensors, strict=True))
            for norm, stage, norm_eps in zip(self.norms, self.op.stages, eps, strict=True):
                row = OPS[stage.op]
                taken = tuple([named.get(stage.ports.get(role)) for role in row.roles])
                results = zip(row.made, norm.forward(save)(taken, norm_eps), strict=True)
                named |= {stage.ports[role]: t for role, t in results if role in stage.ports}
            return tuple([named.get(port.name) for port in self.op.makes])

        return apart

    def _gradients(self, asked: tuple[bool, ...], *arrived: bool) -> Callable:
        """A function of (grads, saved, eps) that returns None, and a gradient for each tensor that
        the op takes, or None: Gradients where passes make them all. Its attribute `plain` tells
        whether tensors may be given to it directly.

        asked: for each input of the autograd Function, of which the first is no tensor, whether its
        gradient is asked for. arrived: for each of its results, whether its gradient comes in.
        """
        op, norms, steps = self.op, self.norms, self.steps(asked[1:], *arrived)
        first = 1 + len(arrived)
        arriving = [1 + i if came else None for i, came in enumerate(arrived)]
        saved, passes = range(first, first + self.saves), []
        end = first + self.saves

        def place_of(step: Step, dy, dsum, kept, eps) -> range:
            """The places of what a step's pass returns."""
            nonlocal end
            of_dy, of_dsum = step.needs.reads
            reads = (
                (dy if of_dy else None),
                (dsum if of_dsum else None),
                *kept[: len(step.spec.kernel_reads)],
            )
            run = norms[step.place].backward(step.spec, step.needs)
            places = tuple([NONE if p is None else p for p in reads])
            passes.append((run, places, step.place if op.calls else None))
            start, end = end, end + len(step.needs.gradients)
            return range(start, end)

        if all(step.is_pass for step in steps):
            eps = (None,) * len(norms)
            gives: Any = run_steps(op, steps, arriving, saved, eps, place_of)
            return Gradients(passes, [NONE if p is None else p for p in gives])

        def run(step: Step, dy, dsum, kept, eps):
            tensors = dy, dsum if step.needs.dsum else None, *kept[: len(step.spec.kernel_reads)]
            return norms[step.place].backward(step.spec, step.needs)(tensors, eps)

        def several(grads, saved, eps):
            return None, *run_steps(op, steps, grads, saved, self.eps_of(eps), run)

        several.plain = Plain()  # type: ignore[attr-defined]
        return several


class Chain:
    """A chain of norms in one pass, which takes one eps. Calls with several run norm by norm.

    run: the implementation's function of (tensors, eps). apart: that of (tensors, the eps of each).
    """

    def __init__(self, run: Any, apart: Callable):
        self._run, self._apart = run, apart
        self.input, self.like, self.grouped = run.input, run.like, run.grouped

    def __call__(self, tensors: tuple, eps: tuple) -> tuple:
        return self._run(tensors, eps[0]) if len({*eps}) == 1 else self._apart(tensors, eps)

    def prepared(self, tensors: tuple, eps: tuple) -> tuple[tuple, Any]:
        """As Kernels.prepared."""
        if len({*eps}) == 1:
            return self._run.prepared(tensors, eps[0])
        return self._apart(tensors, eps), None


class BoundNorm:
    """One norm on a device, and the implementation that serves it."""

    def __init__(
        self,
        implementation: Implementation,
        spec: NormSpec,
        device: Device,
        backend: str | None = None,
    ):
        self.spec, self.device, self.backend = spec, device, backend
        self.implementation = implementation
        self._passes: list[Pass] = []
        self.forward = cache(self._forward)
        self.backward = cache(self._backward)

    def _forward(self, save: bool) -> Pass:
        return self._pass(lambda by: by.forward(self.spec, self.device, save))

    def _backward(self, spec: NormSpec, needs: Needs) -> Pass:
        """spec: of the backward pass."""
        return self._pass(lambda by: by.backward(spec, self.device, needs))

    def _pass(self, bind: Callable[[Implementation], Callable]) -> Pass:
        def find() -> Served:
            chosen = self.implementation
            return Served(bind(chosen), partial(self.replace, chosen))

        self._passes.append(new := Pass(find))
        return new

    def replace(self, broken: Implementation, error: CompileError) -> None:
        """Have what select now finds serve. It warns, or raises if `broken` was asked for."""
        with _REPLACING:
            if self.implementation is broken:
                record_failure(broken.name, self.spec, self.device, error)
                self.implementation = select(self.spec, 0, self.device, self.backend)
                for run in self._passes:
                    run.reset()
                native.state().forget()


def bound_of(
    op: Op, tensors: Sequence[Tensor | None], options: tuple, backend: str | None
) -> Bound:
    """What serves a call. It raises and warns as registry.select does."""
    x, hidden = tensors[0], options[0]
    return bound_for(
        op.name,
        options,
        *kinds_of(op, tensors, hidden),
        x.device.type,
        x.get_device(),
        x.numel() > MAX_ROWS * hidden,
        backend,
    )


@cache
def bound_for(name, options, dtypes, heads, kind, index, long, backend) -> Bound:
    return Bound(OPS[name], options, dtypes, heads, backend, device_of(kind, index), long)


@cache
def norm_of(spec: NormSpec, kind: str, index: int, long: bool, backend: str | None) -> BoundNorm:
    """One norm on a device. It raises and warns as registry.select does."""
    device = device_of(kind, index)
    chosen = select(spec, MAX_ROWS + 1 if long else 0, device, backend)
    return BoundNorm(chosen, spec, device, backend)
