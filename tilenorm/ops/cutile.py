"""The cuTile implementation: bound calls, which allocate and launch.

`bind_forward` and `bind_backward` bind a plan. What they return finds the rest once for each shape
of the input, and keeps it. Eager calls, the torch.library ops and Inductor's generated code all end
here.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..launch.arrays import BackwardArrays, ForwardArrays, RopeBackwardArrays, RopeForwardArrays
from ..launch.calls import ABSENT, Launch, Needs
from ..launch.driver import Repeated, prepare
from ..launch.kernel import launch
from ..launch.plan import BackwardPlan, ForwardPlan, chain_refused, plan_backward, plan_forward
from ..launch.scales import Scales
from ..launch.target import Target
from ..spec import NormSpec
from ..table import FACTORS, LIES, MASK, OPS, VECTOR, Op
from . import torch_private
from .layout import VECTOR_BYTES, contiguous_strides_of, lie_as_read, shaped_as
from .quantize import scale_of, with_codes
from .reference import STATISTICS
from .shapes import Layout, Layouts, RotatedLayouts
from .torch_private import reinterpret

Run = Callable[[Sequence[Launch], tuple, int], None]
MOST_EPS = 8  # for which a bound call keeps the launches of a shape
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


def bind(plan: Any, run: Run) -> Callable:
    """The bound call of a plan of whole norms."""
    if hasattr(plan, "needs"):
        return bind_backward(plan, plan.spec.kept, run)
    return bind_forward(plan, run)


def bind_pass(plan: Any, layouts: Any, arrays_of: Callable, run: Run) -> Callable:
    """A function of (tensors, eps), with the tensors that a pass reads, that allocates and launches
    and returns Layout.made as tensors, and the Layout.

    arrays_of: a function of the tensors as they are read, and of what is written, that returns the
    arrays of the plan's launches.
    """
    spec, place, grouped, key_of = plan.spec, layouts.input, layouts.grouped, layouts.key_of
    as_read = layouts.as_read

    def execute(tensors: Sequence[Tensor | None], eps: float) -> tuple[list, Layout]:
        x: Any = tensors[place]
        layout = layouts[x.shape if key_of is None else key_of(tensors)]
        rows, groups, fresh, matrices, lies, _, cleared, repeated = layout
        repeat = repeated.get(eps)
        if repeat is not None and (made := repeat(tensors)):
            return made, layout
        empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
        made = [None if how is None else empty(*how) for how in fresh]
        for cleared_place in cleared:
            made[cleared_place].zero_()
        if rows:
            index = x.get_device()
            written = [*made] if matrices else made
            for written_place, shape, strides in matrices:
                written[written_place] = reinterpret(made[written_place], shape, strides)
            read = as_read(tensors, spec, lies)
            arrays = arrays_of(read, written)
            launches = plan.launches(rows, eps, *groups)
            run(launches, arrays, index)
            if repeat is None and run is on_device:
                # Most shapes of inputs that differ in every call are met once.
                if eps in repeated and lie_as_read(tensors, read, grouped):
                    count = len(read) + len(made)
                    numbered = arrays_of([*range(len(read))], [*range(len(read), count)])
                    stream = torch_private.current_stream(index)
                    again = prepare(index, stream, launches, arrays, numbered, count)
                    repeated[eps] = again and _repeat(again, layout, index, grouped, empty)
                elif len(repeated) < MOST_EPS:
                    repeated[eps] = None
        return made, layout

    return execute


def _repeat(
    launch: Repeated, layout: Layout, index: int, grouped: Sequence[int], empty: Callable
) -> Callable[[Sequence[Tensor | None]], list | None]:
    """A function of the tensors that a pass reads, with the shapes and dtypes of an earlier call,
    that does the same as that call; None, and nothing done, where it has to be done another way.

    In a step of a model this code has left the caches of the CPU when it runs: on the host of an
    H100 it took 8 times as long as in a loop. So it is one function with few names.
    """
    fresh, cleared, current_stream = layout.made, layout.cleared, torch_private.current_stream

    def repeat(tensors: Sequence[Tensor | None]) -> list | None:
        starts, every = [], 0
        for place, tensor in enumerate(tensors):
            if tensor is None:
                starts.append(0)
            elif tensor.is_contiguous() or place in grouped:
                start = tensor.data_ptr()
                starts.append(start)
                every |= start
            else:
                return None
        if every % VECTOR_BYTES:
            return None
        made: list = []
        for how in fresh:
            if how is None:
                made.append(None)
                starts.append(0)
            else:
                tensor = empty(*how)
                made.append(tensor)
                starts.append(tensor.data_ptr())
        for place in cleared:
            made[place].zero_()
        if tensor.get_device() != index:  # the last one made: another device is the current one
            return None
        return made if launch(current_stream(index), starts) else None

    return repeat


def bind_forward(plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A function of (tensors, eps), with the tensors that the op takes, that returns the tensors
    that the op makes; None for one that is absent.

    Results with rows are contiguous; mean and rstd are (rows,) float32 where the plan saves them.
    It raises NotImplementedError for more scales than the kernels can number.
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
    quantized, count = spec.quantized is not None, len(made_as)

    def arrays_of(read: Sequence, written: Sequence) -> tuple:
        return take((*read, *written, ABSENT))

    execute = bind_pass(plan, layouts, arrays_of, run)

    def forward(tensors: tuple, eps: float) -> tuple[Tensor | None, ...]:
        made, layout = execute(tensors, eps)
        return tuple(_shown(op, made[:count], layout.scales) if quantized else made[:count])

    if not quantized:
        forward.layouts = layouts  # type: ignore[attr-defined]
    return forward


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


def _shown(op: Op, made: list, scales: Scales) -> list:
    """The results of a quantised norm as the caller gets them."""
    for i, port in enumerate(op.makes):
        if made[i] is not None and port.lies == "scales":
            made[i] = scale_of(made[i], scales)
        elif made[i] is not None and port.lies == "one":
            made[i] = made[i].view(torch.float32)
    return made


def bind_cast_apart(spec: NormSpec, plan: ForwardPlan, run: Run = on_device) -> Callable:
    """The same for a quantised norm, by the kernels of the norm and PyTorch's operations for the
    cast. plan: of the norm.
    """
    op, plain = OPS[spec.op], OPS[plan.spec.op]
    normalize = bind_forward(plan, run)
    # The norm takes tensors that a quantised norm has not: they are absent.
    taken = itemgetter(*[op.roles.index(r) if r in op.roles else -1 for r in plain.roles])
    given = op.roles.index("given_scale")

    def cast_apart(tensors: tuple, eps: float) -> tuple:
        found = dict(zip(plain.made, normalize(taken((*tensors, None)), eps), strict=True))
        found = with_codes(spec, found, tensors[given])
        return tuple([found[role] for role in op.made])

    return cast_apart


def bind_backward(plan: BackwardPlan, kept: tuple[str, ...], run: Run = on_device) -> Callable:
    """A function of (dy, dsum, saved, eps, more) that returns the gradients that the plan needs, in
    the order of Needs.gradients, contiguous, each in its own tensor's dtype, and behind them y if
    the plan needs it; None for what it does not need.

    kept: the roles of `saved`, see NormSpec.kept. dsum: the gradient of the sum, or of the rotated
    key, which is read if the plan needs it. eps: is not read, because the saved rstd holds it.
    more: the terms of dy behind the first.
    """
    spec, needs = plan.spec, plan.needs
    made_as = _gradients_as(spec, needs)
    total, lies = spec.residual or spec.dtype, "heads" if spec.rotation else "rows"
    # A factor is absent where only the gradient of the input would need it.
    dtypes = dict.fromkeys(STATISTICS, "float32") | {"x": total, "input": spec.dtype}
    need_dy, need_dsum = _reads(needs) if spec.rotation else (True, needs.dsum)
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
    execute = bind_pass(plan, layouts, arrays_of, run)
    # Of a parameter that has a gradient: the places of both.
    affine = [i for i, role in enumerate(spec.derived) if role in ("weight", "bias") and made_as[i]]
    parameters = [(place, kept.index(spec.derived[place])) for place in affine]
    last = len(needs.gradients) + needs.output

    def backward(
        dy: Tensor | None,
        dsum: Tensor | None,
        saved: Sequence[Tensor],
        eps: float = 0.0,
        more: Sequence[Tensor] = (),
    ) -> Sequence[Tensor | None]:
        tensors = dy if need_dy else None, dsum if need_dsum else None, *saved, *more
        made, _ = execute(tensors, 0.0)
        for place, of in parameters:
            if saved[of].dim() > 1:
                made[place] = shaped_as(made[place], saved[of])
        return made[:last]

    backward.layouts = layouts  # type: ignore[attr-defined]
    return backward


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
    first_left_out = "dot" if spec.modulated else "input" if spec.branches else MASK
    fields = (*fields[: fields.index(first_left_out)], *fields[-2:])
    return _taking(places, *fields)


def _reads(needs: Needs) -> tuple[bool, bool]:
    """Whether a backward pass reads the gradients of the rotated input and of the rotated key."""
    return needs.dx or needs.dw, needs.dkey or needs.dkey_weight


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
    first, second = _reads(needs)

    def take(given: tuple) -> tuple:
        each = of_input(given) if first else ABSENT, of_key(given) if second else ABSENT
        return RopeBackwardArrays(*each, *others(given))

    return take


def _taking(places: dict[str, int], *names: str) -> Callable[[tuple], tuple]:
    """A function that selects arrays by their names; the last one, ABSENT, for an absent one."""
    return itemgetter(*[places.get(name, -1) for name in names])


def fresh(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the device of another, not filled."""
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    return empty(tuple(shape), contiguous_strides_of(shape), dtype)


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
