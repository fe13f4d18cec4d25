"""Compiles the calls of plans into cuTile's cache, for any architecture, without a GPU."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from cuda.tile._cext import default_tile_context

from ..launch.calls import ABSENT, BackwardArrays, Call, ForwardArrays, bound, every_gradient
from ..launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from ..launch.scales import Scales
from ..launch.split import plan_grad_apply
from ..launch.target import Target
from ..launch.toolchain import cache_problem
from ..launch.user_table import TableWarning
from ..spec import NormSpec
from .cubin import resources
from .explain import title
from .pieces import piece_calls
from .signature import ArrayLike, signature

RESOURCES = " regs spill B  smem B"  # what resources_of writes


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. cubin.Resources explains the fields from `registers` on."""

    kernel: str
    hints: str
    seconds: float
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    code: str


def calls_of(plan: ForwardPlan | BackwardPlan, rows: int) -> list[Call]:
    """The calls of a plan for contiguous inputs, with array descriptions instead of tensors."""
    if isinstance(plan, ForwardPlan):
        return bound(plan.launches(rows, 1e-6), _forward_arrays(plan, rows))
    return bound(plan.launches(rows), _backward_arrays(plan, rows))


def _forward_arrays(plan: ForwardPlan, rows: int) -> tuple:
    spec, how = plan.spec, plan.spec.quantized
    stat = ArrayLike.contiguous("float32", rows) if plan.save else ABSENT
    arrays = ForwardArrays(
        x=_input(spec.dtype, spec, rows),
        residual=_input(spec.residual, spec, rows),
        gate=_input(spec.gate, spec, rows),
        weight=_parameter(spec.weight, spec),
        bias=_parameter(spec.bias, spec),
        y=_output(spec.skip or spec.dtype if spec.differentiable else None, spec, rows),
        sum=_output(spec.residual, spec, rows),
        mean=stat if spec.norm == "layer" else ABSENT,
        rstd=stat,
        slots=_scratch("int32", plan.slots(rows)),
        addend=_input(spec.addend, spec, rows),
        skip=_input(spec.skip, spec, rows),
        **_branch(spec, rows),
        q=_output(how and how.dtype, spec, rows),
        scale=_scales(spec, rows) if how else ABSENT,
        amax=ArrayLike.contiguous("int32", 1) if how and how.amax else ABSENT,
        inner_w=_parameter(spec.inner and spec.inner.weight, spec),
        inner_rstd=stat if spec.inner else ABSENT,
    )
    return arrays.of(spec)


def _backward_arrays(plan: BackwardPlan, rows: int) -> BackwardArrays:
    spec, needs = plan.spec, plan.needs
    stat = ArrayLike.contiguous("float32", rows)
    width = spec.hidden * (spec.heads or 1)
    return BackwardArrays(
        x=_input(spec.residual or spec.dtype, spec, rows),
        dy=(_input(spec.skip or spec.dtype, spec, rows),) * needs.terms,
        gate=_input(spec.gate, spec, rows),
        dsum=_input((spec.residual or spec.dtype) if needs.dsum else None, spec, rows),
        weight=_parameter(spec.weight, spec),
        bias=_parameter(spec.bias, spec),
        mean=stat if spec.norm == "layer" else ABSENT,
        rstd=stat,
        dx=_output(spec.dtype if needs.dx else None, spec, rows),
        dresidual=_output(spec.residual if needs.dresidual else None, spec, rows),
        dgate=_output(spec.gate if needs.dgate else None, spec, rows),
        y=_output(spec.dtype if needs.output else None, spec, rows),
        partials=_scratch("float32", plan.partials(rows)),
        slots=_scratch("int32", plan.slots(rows)),
        dw=ArrayLike.contiguous(spec.weight, width) if needs.dw else ABSENT,
        db=ArrayLike.contiguous(spec.bias, width) if needs.db else ABSENT,
        **_branch(spec, rows),
    )


def training_calls(
    spec: NormSpec, target: Target, terms: tuple[int, ...] = (1,), output: bool = False
) -> list[Call]:
    """Every call that inference and training with contiguous tensors can make, for any M.

    Training needs every gradient. With a residual, the sum x + residual has a gradient too. There
    is no training without an output that has a gradient.
    terms: of dy. The graph pass makes several where a step is compiled, and then a norm may have
    the gradient of a sum where nothing was added. output: the graph pass has the backward pass
    write y once more, except where it cannot.
    """
    inference, training = (plan_forward(spec, target, save) for save in (False, True))
    every, calls = every_gradient(spec), []
    asked = [every._replace(terms=k) for k in terms]
    if max(terms) > 1:
        asked += [needs._replace(dsum=not needs.dsum) for needs in asked]
    if output and not spec.output_refused:
        asked += [needs._replace(output=True) for needs in asked]
    backward = [plan_backward(spec, target, needs) for needs in asked]
    for plan in backward:
        for rows in _row_classes(training, plan, spec.heads or 1):
            for made in (inference, training, plan) if spec.differentiable else (inference,):
                calls += calls_of(made, rows)
    return list({_key(call): call for call in calls}.values())


def piece_training_calls(spec: NormSpec, target: Target) -> list[Call]:
    """The same for rows of which a process holds spec.hidden columns."""
    forward = plan_forward(spec, target, True)
    backward = plan_grad_apply(spec, target, every_gradient(spec))
    rows = _row_classes(forward, backward, spec.heads or 1)
    calls = [call for count in rows for call in piece_calls(spec, target, count)]
    return list({_key(call): call for call in calls}.values())


def _row_classes(forward: ForwardPlan, backward: BackwardPlan, heads: int) -> list[int]:
    """One row count for each class of row counts that compiles to the same kernels.

    The compiler distinguishes extents of 1, multiples of 16, and others. Extents are the number of
    rows, of tokens and of partial rows. Partial rows grow with the rows until the grid is full.
    """
    classes = {}
    for tokens in (*range(1, 34 * backward.config.rows), *range(65536, 65552)):
        rows = tokens * heads
        extents = (rows, tokens, *(backward.partials(rows) or ())[:1])
        kinds = tuple((n == 1, n % 16 == 0) for n in extents)
        classes.setdefault((forward.fetches and forward.queues(rows), kinds), rows)
    return list(classes.values())


def precompile(
    specs: list[NormSpec],
    target: Target,
    processes: int | None = None,
    calls: Callable[[NormSpec, Target], list[Call]] = training_calls,
) -> Iterator[list[Compiled]]:
    """Compile the calls of each spec into cuTile's cache, on all cores. Needs no GPU.

    calls: training_calls, also with its options bound, or piece_training_calls.
    Raises CompileError when a kernel does not compile, RuntimeError when nothing would be kept.
    """
    counts = [len(calls(spec, target)) for spec in specs]
    work = [(s, target, calls, i) for s, n in zip(specs, counts, strict=True) for i in range(n)]
    with compiling(_compile_nth, work, processes) as results:
        for n in counts:
            yield [next(results) for _ in range(n)]


def listed(
    specs: list[NormSpec],
    target: Target,
    processes: int | None,
    calls: Callable[[NormSpec, Target], list[Call]],
) -> Iterator[str]:
    """Compile each spec into cuTile's cache, and list the kernels with their resources."""
    results = precompile(specs, target, processes, calls)
    for spec, kernels in zip(specs, results, strict=True):
        yield f"{title(spec)} for {target.arch}"
        yield f"  {'kernel':<14} {'hints':<40} seconds {RESOURCES}"
        for kernel in kernels:
            name = f"  {kernel.kernel:<14} {kernel.hints:<40} {kernel.seconds:>7.2f}"
            yield f"{name} {resources_of(kernel)}"


def resources_of(kernel: Compiled) -> str:
    return f"{kernel.registers:>5} {kernel.spill_bytes:>7} {kernel.shared_bytes:>7}"


@contextmanager
def compiling(function: Callable, work: list, processes: int | None) -> Iterator[Iterator]:
    """Results of function(item) in order, by default from as many processes as there are CPUs."""
    if problem := cache_problem():
        raise RuntimeError(f"{problem}: nothing would be kept")
    processes = min(processes or cpus(), len(work))
    if processes <= 1:
        yield map(function, work)
        return
    # Fork is not safe after CUDA or threads have started, so each worker imports tilenorm anew.
    with ProcessPoolExecutor(processes, get_context("spawn"), _quietly) as pool:
        yield pool.map(function, work)


def _quietly() -> None:
    """Runs in a worker. The main process alone warns about an ignored user's table."""
    warnings.simplefilter("ignore", TableWarning)


def cpus() -> int:
    """Number of CPUs that this process may use. os.cpu_count() counts all CPUs of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_call(call: Call, arch: str) -> Compiled:
    """Compile one call for an architecture, through cuTile's cache, and read its resources."""
    start = time.perf_counter()
    cubin = cubin_of(call, arch)
    seconds = time.perf_counter() - start
    options = call.kernel._compiler_options
    hints = f"occupancy={options.occupancy} worker_warps={options.num_worker_warps}"
    return Compiled(call.kernel._pyfunc.__name__, hints, seconds, *resources(cubin))


def cubin_of(call: Call, arch: str) -> bytes:
    """The machine code of a call for an architecture, from cuTile's cache if it is there."""
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    made = signature(call.kernel, call.arguments)
    cubin, *_ = call.kernel._compile(made, default_tile_context, capability)
    return cubin


def _compile_nth(item: tuple[NormSpec, Target, Callable, int]) -> Compiled:
    spec, target, calls, index = item
    return compile_call(calls(spec, target)[index], target.arch)


def _parameter(dtype: str | None, spec: NormSpec) -> ArrayLike | int:
    shape = (spec.heads, spec.hidden) if spec.heads else (spec.hidden,)
    return ArrayLike.contiguous(dtype, *shape) if dtype else ABSENT


def _input(dtype: str | None, spec: NormSpec, rows: int) -> ArrayLike | int:
    shape = (rows // spec.heads, spec.heads) if spec.heads else (rows,)
    return ArrayLike.contiguous(dtype, *shape, spec.hidden) if dtype else ABSENT


def _output(dtype: str | None, spec: NormSpec, rows: int) -> ArrayLike | int:
    return ArrayLike.contiguous(dtype, rows, spec.hidden) if dtype else ABSENT


def _branch(spec: NormSpec, rows: int) -> dict[str, ArrayLike | tuple]:
    """What multiplies the input before the residual is added."""
    scale = spec.layer_scale
    return {
        "dropout_mask": _input(spec.dropout_mask and "uint8", spec, rows),
        "layer_scale": ArrayLike.contiguous(scale, spec.hidden) if scale else ABSENT,
    }


def _scales(spec: NormSpec, rows: int) -> ArrayLike:
    scales = Scales.of(spec.quantized, spec.hidden, rows)
    return ArrayLike.contiguous(scales.dtype, scales.count)


def _scratch(dtype: str, shape: tuple[int, int] | None) -> ArrayLike | int:
    return ArrayLike.contiguous(dtype, *shape) if shape else ABSENT


def _key(call: Call) -> str:
    return f"{id(call.kernel)} {signature(call.kernel, call.arguments).symbol}"
