"""Bound calls: what serves the calls of an op, for one spec on one device, found once and kept."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from operator import itemgetter
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..launch.toolchain import CompileError
from ..spec import TENSORS, NormSpec, Options, Quantization, Rotation
from ..table import OPS, QUANTIZATION, ROTATION, Op
from .arguments import without_tensor
from .direct import Plain
from .gradients import Step, run_steps, steps_of
from .layout import MOST_SHAPES
from .reference import name_of
from .registry import MAX_ROWS, Device, Implementation, device_of, failure, record_failure, select

_REPLACING = Lock()
NOTHING = SimpleNamespace(key_of=None, repeated=lambda *_: None)  # the layouts that repeat no call
MOST_CALLS = 1024  # that are remembered


class OpSpecs:
    """An op for tensors of some dtypes: the spec of each of its norms, and what autograd saves.

    options: `hidden`, and the values of the op's options. dtypes, heads: for each tensor that the
    op takes, its dtype, None for an absent one, and how many rows of `hidden` elements a weight or
    a bias has. It holds no tensor and knows no device. returned: how many of the results the
    autograd Function returns. fixed: which of them have no gradient. save: whether mean and rstd
    are among the results.
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
            places += [names.index(ports[role]) for role in spec.saved]
        # Of an op's tensors and results, those that autograd saves.
        self.kept: Callable[[tuple], tuple] = itemgetter(*places)
        self._returns(len(op.makes))
        self.steps = cache(partial(steps_of, op, self.specs))

    def _returns(self, count: int) -> None:
        self.returned = count
        self.differentiable = self.spec.differentiable
        self.fixed = [i for i, port in enumerate(self.op.makes[:count]) if not port.grad]

    def unsaved(self, made: Sequence) -> list:
        """The results, with None for mean and rstd, in whose place an op returns empty tensors."""
        pairs = zip(self.op.makes, made, strict=True)
        return [None if port.lies == "number" else t for port, t in pairs]

    def eps_of(self, eps: Any) -> tuple[float, ...]:
        """The eps of each norm, given that of a call."""
        return eps if self.op.calls else (eps,)


def specs_of(
    op: Op, options: tuple, dtypes: Sequence[torch.dtype | None], sizes: Sequence[int]
) -> tuple[NormSpec, ...]:
    """The spec of each norm of an op. dtypes, sizes: see kinds_of."""
    named = op.named([None if dtype is None else name_of(dtype) for dtype in dtypes])
    named |= {port.name: named.get(port.like) for port in op.makes if port.lies == "rows"}
    specs, of_port = [], op.named(sizes)
    for stage in op.stages:
        row, ports = OPS[stage.op], stage.ports
        by_role = {role: named.get(ports.get(role)) for role in row.roles}
        heads = max([of_port.get(ports.get(role), 0) for role in ("weight", "bias")])
        specs.append(_spec_of(row, options, by_role, heads, of_port))
    return tuple(specs)


def _spec_of(op: Op, options: tuple, dtypes: dict, heads: int, sizes: dict) -> NormSpec:
    """The spec of an op that has one norm. dtypes: by the roles of the tensors that it takes."""
    by_name, fields = dict(zip(op.options, options[1:], strict=True)), {}
    if op.quantized:
        scaling, dtype, *rest = (by_name[name] for name in QUANTIZATION)
        fields["quantized"] = Quantization(scaling, name_of(dtype), *rest)
    if op.rotated:
        dim, interleaved, heads_first = (by_name[name] for name in ROTATION)
        tables = dtypes["cos"], sizes["cos"] == dim, dtypes["positions"]
        fields["rotation"] = Rotation(dim, sizes["input"], interleaved, *tables, heads_first)
        fields["key_hidden"] = sizes["key"]
    dtypes = {role: of for role, of in dtypes.items() if role == "x" or role in TENSORS}
    return NormSpec.of_tensors(options_of(op, options), dtypes, heads, **fields)


def options_of(op: Op, options: tuple) -> Options:
    """The options of an op's norms."""
    by_name = dict(zip(op.options, options[1:], strict=True))
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
        if port.lies == "affine" and tensor is not None and hidden:
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

    inference, training: functions of (tensors, eps) that return the tensors that the op
    makes, as those of Implementation. Training saves mean and rstd. plain: tells whether tensors
    may be given to one of them directly. An op of several norms is one pass where the
    implementation has it, else it runs norm by norm.

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
        how = device, backend
        chosen = [(select(spec, rows, *how), spec) for spec in self.specs]
        self.norms = [BoundNorm(*each, *how, self._bind) for each in chosen]
        self._bind()

    def _bind(self) -> None:
        self.inference, self.training = self._forward(False), self._forward(True)
        self.gradients = cache(self._gradients)

    def _forward(self, save: bool) -> Callable:
        chained, count = bool(self.op.calls), len(self.op.makes)
        run = self._chain(save) if chained else self.norms[0].forward(save)
        layouts: Any = run.layouts  # type: ignore[attr-defined]
        if layouts is NOTHING:
            return run
        repeated: dict[tuple, Callable] = {}
        key_of = layouts.key_of

        def repeating(tensors, eps):
            key = tensors[0].shape if key_of is None else key_of(tensors)
            repeat = repeated.get((key, eps))
            made = repeat and repeat(tensors)
            if made is not None:
                return tuple(made[:count])
            made = run(tensors, eps)
            if not chained or eps[0] == eps[1]:
                keep(repeated, (key, eps), layouts.repeated(key, eps[0] if chained else eps))
            return made

        repeating.layouts = layouts  # type: ignore[attr-defined]
        return repeating

    def _chain(self, save: bool) -> Callable:
        """All norms in one pass, where one implementation serves them and has it."""
        chosen, apart = self.norms[0].implementation, self._norm_by_norm(save)
        alike = {norm.implementation.name for norm in self.norms} == {chosen.name}
        served = alike and not failure(chosen.name, self.spec, self.device)
        run = chosen.forward(self.spec, self.device, save) if served else None
        if run is None:
            return apart

        def forward(tensors, eps):
            if eps[0] != eps[1]:
                return apart(tensors, eps)
            try:
                return run(tensors, eps[0])
            except CompileError as error:
                record_failure(chosen.name, self.spec, self.device, error)
            self._bind()
            return (self.training if save else self.inference)(tensors, eps)

        forward.layouts = getattr(run, "layouts", NOTHING)  # type: ignore[attr-defined]
        return forward

    def _norm_by_norm(self, save: bool) -> Callable:
        names = [port.name for port in self.op.takes]

        def forward(tensors, eps):
            found = dict(zip(names, tensors, strict=True))
            each = zip(self.norms, self.op.stages, eps, strict=True)
            for norm, stage, own in each:
                row = OPS[stage.op]
                taken = tuple([found.get(stage.ports.get(role)) for role in row.roles])
                made = norm.forward(save)(taken, own)
                pairs = zip(row.made, made, strict=True)
                found |= {stage.ports[role]: t for role, t in pairs if role in stage.ports}
            return tuple([found.get(port.name) for port in self.op.makes])

        forward.layouts = NOTHING  # type: ignore[attr-defined]
        return forward

    def _gradients(self, asked: tuple[bool, ...], *arrived: bool) -> tuple[Callable, Plain]:
        """A function of (grads, saved, eps) that returns a gradient for each input of the autograd
        Function, or None, and what tells whether tensors may be given to it directly.

        asked: for each input of the Function, of which the first is no tensor. arrived: for each
        of its results, whether its gradient comes in.
        """
        op, norms = self.op, self.norms
        steps = self.steps(asked[1:], *arrived)

        def run(step: Step, dy, dsum, saved, eps):
            kept = saved[: len(step.spec.kept)]
            return norms[step.place].backward(step.spec, step.needs)(dy, dsum, kept, eps, ())

        def several(grads, saved, eps):
            return None, *run_steps(op, steps, grads, saved, self.eps_of(eps), run)

        if len(steps) != 1 or steps[0].dy is None or op.calls:
            return several, Plain()
        step, places = steps[0], steps[0].places(op.roles)
        if places is None or self.spec.layer_scale:
            return several, Plain()
        count = len(step.needs.gradients)
        take = itemgetter(count + 1, *places)
        names = [port.name for port in op.makes]
        first, second = names.index(step.dy), step.dsum and names.index(step.dsum)

        def nothing(*_):  # y.backward(inputs=[y]) runs y's own node too
            return (None,) * count

        compute: Any = nothing
        computed = any(step.needs.gradients)
        if computed:
            compute = norms[0].backward(step.spec, step.needs)
        repeated: dict[tuple, Callable] = {}
        kept = step.spec.kept
        affine = next((i for i, role in enumerate(kept) if role in ("weight", "bias")), 0)
        layouts = compute.layouts if computed else NOTHING
        key_of = layouts.key_of

        def one(grads, saved, eps):
            dy, dsum = grads[first], grads[second] if second else None
            key = saved[0].shape if key_of is None else key_of((dy, dsum, *saved))
            repeat = repeated.get((key, saved[affine].shape))
            made = repeat and repeat((dy, dsum, *saved))
            if made is not None:
                return take((*made[:count], dy, None))
            found = compute(dy, dsum, saved, eps, ())
            keep_backward(repeated, (key, saved[affine].shape), found, layouts, key)
            return take((*found, dy, None))

        return one, Plain()


class BoundNorm:
    """One norm on a device, and the implementation that serves it. changed: is called where another
    one takes its place.
    """

    def __init__(
        self,
        implementation: Implementation,
        spec: NormSpec,
        device: Device,
        backend: str | None = None,
        changed: Callable[[], None] = lambda: None,
    ):
        self.spec, self.device, self.backend, self.changed = spec, device, backend, changed
        self._serve_by(implementation)

    def _serve_by(self, implementation: Implementation) -> None:
        self.implementation = implementation
        self.forward = cache(self._forward)
        self.backward = cache(self._backward)
        self.piece = cache(self._piece)

    def _forward(self, save: bool) -> Callable:
        run = self.implementation.forward(self.spec, self.device, save)
        return self._served(run, lambda: self.forward(save))

    def _backward(self, spec: NormSpec, needs: Needs) -> Callable:
        """A function as that of Implementation. spec: of the backward pass."""
        run = self.implementation.backward(spec, self.device, needs)
        return self._served(run, lambda: self.backward(spec, needs))

    def _piece(self, name: str) -> Callable:
        run: Any = self.implementation.piece
        return self._served(run(name, self.spec, self.device), lambda: self.piece(name))

    def _served(self, run: Any, again: Callable) -> Callable:
        """A function that does what `run` does. again: finds it anew, where another implementation
        has taken its place.
        """
        chosen = self.implementation

        def served(*arguments):
            try:
                return run(*arguments)
            except CompileError as error:
                self.replace(chosen, error)
            return again()(*arguments)

        served.layouts = getattr(run, "layouts", NOTHING)  # type: ignore[attr-defined]
        return served

    def replace(self, broken: Implementation, error: CompileError) -> None:
        """Have what select now finds serve. It warns, or raises if `broken` was asked for."""
        with _REPLACING:
            if self.implementation is broken:
                record_failure(broken.name, self.spec, self.device, error)
                self._serve_by(select(self.spec, 0, self.device, self.backend))
                self.changed()


def keep(repeated: dict, key: Any, repeat: Callable | None) -> None:
    """Keep what repeats calls, for inputs of a shape."""
    if repeat is not None and len(repeated) < MOST_SHAPES:
        repeated[key] = repeat


def keep_backward(
    repeated: dict, key: Any, found: Sequence[Tensor | None], layouts: Any, of: Any
) -> None:
    """The same of a backward pass. found: its gradients, and y. of: the key in the layouts. What
    repeats calls is not kept where a gradient has its parameter's shape, which it does not know.
    """
    if (repeat := layouts.repeated(of, 0.0)) is not None:
        pairs = zip(found, layouts[of].made, strict=False)
        if all(t is None or tuple(t.shape) == how.shape for t, how in pairs):
            keep(repeated, key, repeat)


def bound_of(
    op: Op, tensors: Sequence[Tensor | None], options: tuple, backend: str | None
) -> Bound:
    """What serves a call. It raises and warns as registry.select does."""
    x, hidden = tensors[0], options[0]
    return _bound(
        op.name,
        options,
        *kinds_of(op, tensors, hidden),
        x.device.type,
        x.get_device(),
        x.numel() > MAX_ROWS * hidden,
        backend,
    )


@cache
def _bound(name, options, dtypes, heads, kind, index, long, backend) -> Bound:
    return Bound(OPS[name], options, dtypes, heads, backend, device_of(kind, index), long)


@cache
def norm_of(spec: NormSpec, kind: str, index: int, long: bool, backend: str | None) -> BoundNorm:
    """One norm on a device. It raises and warns as registry.select does."""
    device = device_of(kind, index)
    chosen = select(spec, MAX_ROWS + 1 if long else 0, device, backend)
    return BoundNorm(chosen, spec, device, backend)
