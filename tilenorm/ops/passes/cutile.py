"""The cuTile implementation: passes that allocate, and launch a plan.

`bind_forward` and `bind_backward` bind a plan. What they return finds the rest once for each shape
of the input, and keeps it.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...launch.arrays import BackwardArrays, ForwardArrays, RopeBackwardArrays, RopeForwardArrays
from ...launch.calls import ABSENT, Launch, Needs
from ...launch.driver import Repeated, in_parts, prepare, primary_context
from ...launch.kernel import launch
from ...launch.plan import BackwardPlan, ForwardPlan, chain_refused, plan_backward, plan_forward
from ...launch.target import Target
from ...launch.toolchain import CompileError
from ...spec import NormSpec
from ...table import FACTORS, LIES, MASK, OPS, VECTOR, Op
from ..pytorch import torch_private
from ..pytorch.torch_private import reinterpret
from . import native
from .allocation import Layout, Layouts, RotatedLayouts
from .base import Pass, Repeat, Served
from .quantize import with_codes
from .reading import lie_as_read, shaped_as, shown_as
from .reference import STATISTICS

Run = Callable[[Sequence[Launch], tuple, int], None]
# The arrays that a backward pass makes, in the order in which it returns them, and how they lie.
GRADIENTS = {"dx": "rows", "dresidual": "rows", "dgate": "rows", "dw": "affine", "db": "affine"}
GRADIENTS |= {"y": "rows"}
BY_GROUP = {"dscale": "group", "dshift": "group", "dmod_gate": "group"}  # of modulated rows
ROTATED = {"dw": "vector", "dkey": "rows", "dkey_weight": "vector"}  # of heads that are rotated


def on_device(launches: Sequence[Launch], arrays: tuple, index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(torch_private.current_stream(index), launches, arrays)


def forward(spec: NormSpec, target: Target, save: bool, run: Run | None = None) -> Callable | None:
    """As registry.Implementation.forward. None for a chain that one pass does not serve."""
    run = run or on_device
    if spec.inner and chain_refused(spec, target):
        return None
    plan = plan_forward(spec, target, save)
    if spec.quantized and not plan.spec.quantized:
        return bind_cast_apart(spec, plan, run)
    return bind_forward(plan, run)


def backward(spec: NormSpec, target: Target, needs: Needs, run: Run | None = None) -> Callable:
    """As registry.Implementation.backward."""
    return bind_backward(plan_backward(spec, target, needs), spec.kept, run or on_device)


class Kernels:
    """A pass by the kernels: a function of (tensors, eps) that allocates, and launches a plan.

    results: how many of the tensors that are made a caller gets; scratch comes behind them. input,
    like, grouped: the places of the tensors by which calls are told apart, see Pass.key.
    arrays_of: a function of the tensors as they are read, and of what is written, that returns the
    arrays of the plan's launches. parameters: the places of the gradients of parameters, and of the
    parameters among the tensors.
    """

    def __init__(
        self,
        plan: Any,
        layouts: Layouts,
        arrays_of: Callable,
        run: Run,
        results: int,
        parameters: Sequence[tuple[int, int]] = (),
    ):
        self._plan, self._layouts, self._arrays_of, self._run = plan, layouts, arrays_of, run
        self._results, self._parameters = results, parameters
        self.input, self.like, self.grouped = layouts.input, layouts.like, layouts.grouped

    def __call__(self, tensors: Sequence[Tensor | None], eps: float) -> tuple[Tensor | None, ...]:
        return self._launched(tensors, eps)[0]

    def prepared(self, tensors: Sequence[Tensor | None], eps: float) -> tuple[tuple, Any]:
        """The same, and a Repeat of these launches; None in its place where tensors had to be
        copied, and while a CUDA graph is captured.
        """
        results, layout, *launched = self._launched(tensors, eps)
        if not launched or self._run is not on_device:
            return results, None
        launches, arrays, read, index = launched
        if not lie_as_read(tensors, read, self.grouped):
            return results, None
        count = len(read) + len(layout.made)
        numbered = self._arrays_of([*range(len(read))], [*range(len(read), count)])
        stream = torch_private.current_stream(index)
        again = prepare(index, stream, launches, arrays, numbered, count)
        native.state().want(index)
        how = layout, index, self.grouped, self._results, len(read)
        return results, again and repeat_of(again, *how)

    def _launched(self, tensors: Sequence[Tensor | None], eps: float) -> tuple:
        x: Any = tensors[self.input]
        layout = self._layouts.of(tensors)
        made = [None if how is None else fresh(x, *how) for how in layout.made]
        for place in layout.cleared:
            made[place].zero_()
        launched: tuple = ()
        if layout.rows:
            written = [*made]
            for place, shape, strides in layout.written:
                written[place] = reinterpret(made[place], shape, strides)
            read = self._layouts.as_read(tensors, self._plan.spec, layout.lies)
            arrays = self._arrays_of(read, written)
            launches = self._plan.launches(layout.rows, eps, *layout.groups)
            self._run(launches, arrays, index := x.get_device())
            launched = launches, arrays, read, index
        for place, *how in layout.shown:
            made[place] = shown_as(made[place], *how)
        for place, of in self._parameters:
            if made[place].shape != tensors[of].shape:  # which is in no key
                made[place], launched = shaped_as(made[place], tensors[of]), ()
        return tuple(made[: self._results]), layout, *launched


def repeat_of(
    launch: Repeated,
    layout: Layout,
    index: int,
    grouped: Sequence[int],
    results: int,
    reads: int,
) -> Any:
    """What repeats a call: a Repeat, or the extension's function of the tensors, which returns the
    results or None. In tests that function calls `launch`.

    results: how many of the tensors that are made it returns. reads: how many it reads.
    """
    extension = native.state().extension
    if extension is not None:
        made = [how and tuple(how) for how in layout.made]
        launches = getattr(launch, "launches", launch)
        places = list(grouped), made, layout.cleared, layout.shown
        return extension.repeat(index, primary_context(index), reads, *places, results, launches)
    empty = torch_private.empty_strided_cuda if index >= 0 else _empty_strided_cpu
    how = layout.made, layout.cleared, layout.shown, frozenset(grouped), index, results
    return Repeat(*how, empty, torch_private.current_stream, launch, *in_parts(launch))


def bind(plan: Any, run: Run = on_device) -> Kernels:
    """The function of (tensors, eps) of a plan of whole norms, see Pass."""
    if hasattr(plan, "needs"):
        return bind_backward(plan, plan.spec.kept, run)
    return bind_forward(plan, run)


def bind_forward(plan: ForwardPlan, run: Run = on_device) -> Kernels:
    """A forward pass. Results with rows are contiguous; mean and rstd are (rows,) float32 where the
    plan saves them. It raises NotImplementedError for more scales than the kernels can number.
    """
    spec, op = plan.spec, OPS[plan.spec.op]
    made_as = _made_as(op, spec, plan.save)
    dtypes = [spec.dtype_of(role) for role in op.roles]
    read = [(port.lies, dtype) for port, dtype in zip(op.takes, dtypes, strict=True)]
    kind, likes = Layouts, []
    if spec.rotation:
        kind = RotatedLayouts
        likes = [op.roles.index("key" if port.given else "x") for port in op.makes]
    layouts = kind(plan, 0, read, made_as, likes)
    take = _taking_forward(op, spec, dtypes, made_as, plan.slots(1) is not None)

    def arrays_of(read: Sequence, written: Sequence) -> tuple:
        return take((*read, *written, ABSENT))

    return Kernels(plan, layouts, arrays_of, run, len(made_as))


def _made_as(op: Op, spec: NormSpec, save: bool) -> list[tuple[str, str] | None]:
    """How each result of an op lies, and its dtype; None for one that a spec does not make."""
    how = spec.quantized
    dtypes = {"input": spec.dtype, "residual": spec.residual or spec.skip, "key": spec.key}
    there = {"": True, "save": save}
    if how is not None:
        there |= {"return_output": how.output, "return_amax": how.amax}
        dtypes["dtype"] = how.dtype
    # The kernels compare the bits of the largest magnitude.
    fixed = {"number": "float32", "one": "int32", "scales": ""}
    made: list[tuple[str, str] | None] = []
    for port in op.makes:
        absent = port.unless and how is not None and how.scaling == "tensor"
        absent = absent or (port.given and getattr(spec, port.given) is None)
        dtype = fixed.get(port.lies, dtypes.get(port.like, ""))
        made.append((port.lies, dtype) if there[port.when] and not absent else None)
    return made


def _taking_forward(
    op: Op, spec: NormSpec, dtypes: list, made_as: list, slots: bool
) -> Callable[[tuple], tuple]:
    """A function of an op's tensors, its results, partials, slots and ABSENT that returns the
    arrays. slots: whether there are any.
    """
    places = {role: i for i, role in enumerate(op.roles) if dtypes[i]}
    if spec.quantized is not None and spec.quantized.scaling == "tensor":
        places["scale"] = op.roles.index("given_scale")
    first = len(op.takes)
    places |= {port.role: first + i for i, port in enumerate(op.makes) if made_as[i] is not None}
    if spec.rotation:
        return _taking_heads_forward(places)
    if slots:
        places["slots"] = first + len(op.makes) + 1
    names: Sequence[str] = ForwardArrays._fields
    if not spec.modulated:  # see ForwardArrays
        last = VECTOR if spec.joins else "slots"
        more = spec.quantized is not None or spec.inner is not None
        names = names[: names.index("inner_mean" if more else last) + 1]
    return _taking(places, *names)


def bind_cast_apart(spec: NormSpec, plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A forward pass of a quantised norm: the kernels of the norm, and PyTorch's operations for the
    cast. plan: of the norm.
    """
    op, plain = OPS[spec.op], OPS[plan.spec.op]

    def failed(error: CompileError) -> None:
        raise error

    normalize = Pass(lambda: Served(bind_forward(plan, run), failed))
    # The norm takes tensors that a quantised norm has not: they are absent.
    taken = itemgetter(*[op.roles.index(r) if r in op.roles else -1 for r in plain.roles])
    given = op.roles.index("given_scale")

    def cast_apart(tensors: tuple, eps: float) -> tuple:
        found = dict(zip(plain.made, normalize(taken((*tensors, None)), eps), strict=True))
        found = with_codes(spec, found, tensors[given])
        return tuple([found[role] for role in op.made])

    return cast_apart


def bind_backward(plan: BackwardPlan, kept: tuple[str, ...], run: Run = on_device) -> Kernels:
    """A backward pass. Gradients are contiguous, each in its own tensor's dtype and shape.

    kept: the roles of the tensors that were saved, see NormSpec.kept. dsum is the gradient of the
    sum, or of the rotated key, which is read if the plan needs it.
    """
    spec, needs = plan.spec, plan.needs
    made_as = _gradients_as(spec, needs)
    total, lies = spec.residual or spec.dtype, "heads" if spec.rotation else "rows"
    # A factor is absent where only the gradient of the input would need it.
    dtypes = dict.fromkeys(STATISTICS, "float32") | {"x": total, "input": spec.dtype}
    need_dy, need_dsum = needs.reads
    read: list[tuple[str, str | None]] = [(lies, need_dy and spec.dtype)]
    read += [(lies, need_dsum and total)]
    read += [(LIES[role], dtypes.get(role) or spec.dtype_of(role)) for role in kept]
    read += [("rows", spec.dtype)] * (needs.terms - 1)
    end = 2 + len(kept)
    take = _taking_backward(spec, kept, made_as, needs, plan.slots(1) is not None)

    def arrays_of(read: Sequence, written: Sequence) -> tuple:
        return take((*read[:end], *written, (read[0], *read[end:]), ABSENT))

    kind, likes = Layouts, []
    if spec.rotation:
        kind, pairs = RotatedLayouts, zip(spec.derived, made_as, strict=True)
        likes = [2 + kept.index(role) if how else 0 for role, how in pairs]
    layouts = kind(plan, 2, read, made_as, likes)
    affine = [i for i, role in enumerate(spec.derived) if role in ("weight", "bias") and made_as[i]]
    parameters = [(place, 2 + kept.index(spec.derived[place])) for place in affine]
    results = len(needs.gradients) + needs.output
    return Kernels(plan, layouts, arrays_of, run, results, parameters)


def _gradient_names(spec: NormSpec) -> dict[str, str]:
    """What a backward pass makes, in the order in which it returns it, and how it lies. That of
    modulated rows and that of rotated heads do not write y again.
    """
    if not (spec.modulated or spec.rotation):
        return GRADIENTS
    more = BY_GROUP if spec.modulated else ROTATED
    return {name: lies for name, lies in GRADIENTS.items() if name != "y"} | more


def _gradients_as(spec: NormSpec, needs: Needs) -> list[tuple[str, str] | None]:
    """How each of the gradients lies, and its dtype; None for one that is not needed."""
    own = {"x": spec.dtype, "y": spec.dtype, "residual": spec.residual or spec.dtype}
    dtypes = [own.get(role) or getattr(spec, role) for role in (*spec.derived, "y")]
    needed = *needs.gradients, needs.output
    each = zip(_gradient_names(spec).values(), dtypes, needed, strict=False)
    return [(lies, dtype) if need else None for lies, dtype, need in each]


def _taking_backward(
    spec: NormSpec, kept: tuple, made_as: list, needs: Needs, slots: bool
) -> Callable[[tuple], tuple]:
    """A function of dy, dsum, the tensors that were kept, the gradients, partials, slots, of
    modulated rows the sums by group, the terms of dy, and ABSENT that returns the arrays. slots:
    whether there are any.
    """
    places = ({"dsum": 1} if needs.dsum else {}) | {role: 2 + i for i, role in enumerate(kept)}
    end = 2 + len(kept)
    if spec.rotation:
        made = {name: end + i for i, name in enumerate((*_gradient_names(spec), "partials"))}
        return _taking_heads_backward(places | made, needs)
    gradients, fields = _gradient_names(spec), BackwardArrays._fields
    more = ["group_sums"] if spec.modulated else []
    names = *gradients, "partials", "slots", *more, "dy"
    made = {name: end + i for i, name in enumerate(names)}
    absent = [name for name, how in zip(gradients, made_as, strict=True) if how is None]
    absent += [name for name in FACTORS if not getattr(spec, name)]
    absent += ["slots"] * (not slots) + ["partials"] * (not needs.sums)
    absent += ["group_sums"] * (not needs.sums and not any(needs.modulation))
    absent += ["input"] * (not needs.dmod_gate)  # the gradient of a gate by group is made of it
    places = {name: i for name, i in (places | made).items() if name not in absent}
    first_left_out = "dw" if spec.modulated else "input" if spec.branches else MASK
    fields = (*fields[: fields.index(first_left_out)], *fields[-2:])
    return _taking(places, *fields)


def _taking_heads_forward(places: dict[str, int]) -> Callable[[tuple], tuple]:
    """As _taking_forward. places: of what is there, by the roles."""
    of_input = _taking(places, "x", "weight", "y", "rstd")
    of_key = _taking(places, "key", "key_weight", "key_y", "key_rstd")
    tables = _taking(places, "cos", "sin", "positions")

    def take(given: tuple) -> tuple:
        second = of_key(given) if "key" in places else ABSENT
        return RopeForwardArrays(of_input(given), second, *tables(given))

    return take


def _taking_heads_backward(places: dict[str, int], needs: Needs) -> Callable[[tuple], tuple]:
    """As _taking_backward. places: also of gradients and partials that are not needed."""
    asked = {"dx": needs.dx, "dw": needs.dw, "dkey": needs.dkey, "dkey_weight": needs.dkey_weight}
    asked["partials"] = needs.dw or needs.dkey_weight
    places = {name: place for name, place in places.items() if asked.get(name, True)}
    of_input = _taking(places | {"dy": 0}, "x", "dy", "weight", "rstd", "dx")
    of_key = _taking(places | {"dy": 1}, "key", "dy", "key_weight", "key_rstd", "dkey")
    others = _taking(places, "cos", "sin", "positions", "partials", "dw", "dkey_weight")
    first, second = needs.reads

    def take(given: tuple) -> tuple:
        each = of_input(given) if first else ABSENT, of_key(given) if second else ABSENT
        return RopeBackwardArrays(*each, *others(given))

    return take


def _taking(places: dict[str, int], *names: str) -> Callable[[tuple], tuple]:
    """A function that selects arrays by their names; the last one, ABSENT, for an absent one."""
    return itemgetter(*[places.get(name, -1) for name in names])


def fresh(like: Tensor, shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the device of another, not filled."""
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    return empty(shape, strides, dtype)


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
