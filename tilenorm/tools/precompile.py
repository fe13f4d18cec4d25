"""Compiles the calls of plans into cuTile's cache, for any architecture, without a GPU.

The calls are recorded from the passes of ops/passes/cutile.py, which get tensors without memory.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from multiprocessing import get_context
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._cext import default_tile_context
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
)
from torch import Tensor

from ..launch.calls import Call, Needs, Sizes, bound, every_gradient
from ..launch.plan import BackwardPlan, ForwardPlan, GroupedPlan, plan_backward, plan_forward
from ..launch.rope import RopeBackwardPlan, RopeForwardPlan
from ..launch.target import Target
from ..launch.toolchain import cache_problem
from ..launch.tuned import rules
from ..launch.user_table import TableWarning
from ..ops.passes import cutile, dims, ports
from ..row import Port
from ..spec import NormSpec
from .cubin import Resources, resources
from .specs import sizes_of, title

Plan = ForwardPlan | BackwardPlan | RopeForwardPlan | RopeBackwardPlan
EPS = 1e-6
RESOURCES = " regs spill B  smem B"  # what resources_of writes


@dataclass(frozen=True)
class Compiled(Resources):
    kernel: str
    hints: str
    seconds: float


def arguments(
    spec: NormSpec,
    needs: Needs | None,
    rows: int,
    make: Callable[..., Tensor],
    groups: int = 1,
    sizes: Sizes | None = None,
) -> tuple[Any, ...]:
    """What a bound call takes. needs: of a backward pass; None is a forward pass.

    make: returns a contiguous tensor, given its dtype and its shape. groups: of modulated rows.
    sizes: of heads that are rotated; None for those of sizes_of.
    """
    heads = sizes or (sizes_of(spec, rows) if spec.rotation else None)
    planned = dims.planned(spec, rows, groups, heads)
    tensors = ports.taken(spec) if needs is None else ports.read(spec, needs)

    def tensor(port: Port, dtype: str | None) -> Tensor | None:
        shape = dims.shape(port, planned)
        if port.number:  # as a forward pass returns them
            shape = (prod(shape),)
        return None if dtype is None else make(dtype, *shape)

    return tuple([tensor(port, dtype) for port, dtype in tensors]), EPS


def calls_of(plan: Plan, rows: int, groups: int = 1, sizes: Sizes | None = None) -> list[Call]:
    """The calls of a plan for contiguous tensors without memory. groups, sizes: as of arguments."""
    needs = getattr(plan, "needs", None)
    tensors = arguments(plan.spec, needs, rows, _without_memory, groups, sizes)
    return _recorded(lambda run: cutile.bind(plan, run)(*tensors))


def _without_memory(dtype: str, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _recorded(step: Callable[[cutile.Run], Any]) -> list[Call]:
    """The calls that a function makes by the `run` that it gets."""
    calls: list[Call] = []
    with torch.device("meta"):  # so that nothing is allocated
        step(lambda launches, arrays, _: calls.extend(bound(launches, arrays)))
    return calls


def training_calls(
    spec: NormSpec, target: Target, terms: tuple[int, ...] = (1,), output: bool = False
) -> list[Call]:
    """Every call that inference and training with contiguous tensors can make, for any M.

    Training needs every gradient, also that of the sum x + residual.
    terms: of dy. The graph pass makes several where a step is compiled, and then a norm may have
    the gradient of a sum where nothing was added. output: the graph pass has the backward pass
    write y once more, except where it cannot.
    """
    inference, training = (plan_forward(spec, target, save) for save in (False, True))
    every, calls = every_gradient(spec), []
    terms = (1,) if spec.rotation or spec.modulated else terms
    asked = [every._replace(terms=k) for k in terms]
    if max(terms) > 1:
        asked += [needs._replace(dsum=not needs.dsum) for needs in asked]
    if output and not spec.output_refused:
        asked += [needs._replace(output=True) for needs in asked]
    for needs in asked:
        plan = plan_backward(spec, target, needs)
        for size in _size_classes(spec, training, plan):
            for plan_of_pass in (
                (inference, training, plan) if spec.differentiable else (inference,)
            ):
                calls += calls_of(plan_of_pass, *size)
    return _distinct(calls)


def _distinct(calls: list[Call]) -> list[Call]:
    """One call for each kernel and signature."""
    return list({(c.kernel, signature(c.kernel, c.arguments).symbol): c for c in calls}.values())


def _size_classes(spec: NormSpec, forward: ForwardPlan, backward: BackwardPlan) -> list[tuple]:
    """What calls_of takes behind a plan, at least once for each class that compiles to the same
    kernels: (rows,), of modulated rows (rows, groups), and of rotated heads (0, 1, Sizes).

    The compiler distinguishes extents of 1, multiples of 16, and others. Extents are the number of
    rows, of tokens, of groups, and of partial rows and sums by group. Partial rows grow with the
    rows until the grid is full.
    """
    counts = (1, 2, 3, 15, 16, 17, 256, 4096, 4097)
    if spec.rotation:
        heads = sizes_of(spec, 1)[2:]
        return [(0, 1, Sizes(batch, n, *heads)) for batch, n in product((1, 2, 16), counts)]
    classes: dict[tuple, tuple[int, ...]] = {}

    def add(key: Any, sizes: tuple[int, ...], *extents: int) -> None:
        kinds = tuple((n == 1, n % 16 == 0) for n in extents)
        classes.setdefault((key, kinds), sizes)

    if isinstance(backward, GroupedPlan):
        whole = rules.WHOLE_GROUPS * backward.resident
        whole += -whole % 16
        counts = (*range(1, 34), 256, 512, 577, 4096, 4097)
        for groups, n in product((*range(1, backward.resident), whole, whole + 1), counts):
            sizes = groups * n, groups
            kernel = backward.sum_config(backward.blocks(*sizes), groups), backward.sums(groups)
            scratch = backward.partials(*sizes), backward.group_sums(*sizes)
            extents = *sizes, *[shape[0] for shape in scratch if shape]
            add((kernel, forward.is_small(groups * n)), sizes, *extents)
        return list(classes.values())
    large = 65536
    while not forward.queues(large):
        large *= 2
    for tokens in (*range(1, 34 * backward.config.rows), *range(large, large + 16)):
        rows = tokens * (spec.heads or 1)
        partials = (backward.partials(rows) or ())[:1]
        add(forward.is_small(rows), (rows,), rows, tokens, *partials)
    return list(classes.values())


def precompile(
    specs: list[NormSpec],
    target: Target,
    processes: int | None = None,
    calls: Callable[[NormSpec, Target], list[Call]] = training_calls,
) -> Iterator[list[Compiled]]:
    """Compile the calls of each spec into cuTile's cache, on all cores. calls: training_calls, also
    with its options bound.

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
        yield f"{title(spec)} for {target.name}"
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
    used = vars(resources(cubin))
    return Compiled(kernel=call.kernel._pyfunc.__name__, hints=hints, seconds=seconds, **used)


def cubin_of(call: Call, arch: str) -> bytes:
    """The machine code of a call for an architecture, from cuTile's cache if it is there."""
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    named = signature(call.kernel, call.arguments)
    cubin, *_ = call.kernel._compile(named, default_tile_context, capability)
    return cubin


def signature(kernel: ct.kernel, arguments: tuple) -> KernelSignature:
    """The signature with which a launch with these arguments would compile the kernel.

    cuTile specialises a kernel on its arguments when it first sees them; its own function asks the
    driver. On a machine with a driver the tests compare the results.
    """
    annotations = kernel._annotated_function.parameter_annotations
    parameters = [_parameter(*pair) for pair in zip(arguments, annotations, strict=True)]
    unnamed = KernelSignature(parameters, CallingConvention.cutile_python_v2())
    return unnamed.with_mangled_symbol(kernel._pyfunc.__name__)


def _parameter(argument, annotation=None):
    """annotation: None for an item of a tuple, which is a tensor or a constant."""
    if isinstance(argument, tuple):
        return tuple(map(_parameter, argument))
    if isinstance(argument, Tensor):
        return constraint(argument)
    if annotation is None:
        return argument
    if annotation.constant:
        return ConstantConstraint(argument)
    return ScalarConstraint(ct.float32 if isinstance(argument, float) else ct.int32)


def constraint(array: Tensor) -> ArrayConstraint:
    """What the compiler knows of a tensor, which may be without memory.

    An extent or stride of 1 is a constant. The compiler knows whether an extent is divisible by 16,
    whether a stride is divisible by 16 bytes, and whether the base address is divisible by 16.
    """
    dtype = getattr(ct, str(array.dtype).removeprefix("torch."))
    vector, strides = 16 // array.itemsize, array.stride()
    rows = sorted(zip(strides, array.shape, strict=True))
    overlapping = any(outer[0] < inner[0] * inner[1] for inner, outer in pairwise(rows))
    return ArrayConstraint(
        dtype,
        array.dim(),
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=overlapping,
        stride_constant=[1 if s == 1 else None for s in strides],
        shape_constant=[1 if n == 1 else None for n in array.shape],
        stride_divisible_by=[vector if s != 1 and s % vector == 0 else 1 for s in strides],
        shape_divisible_by=[16 if n % 16 == 0 else 1 for n in array.shape],
        base_addr_divisible_by=1 if array.data_ptr() % 16 else 16,
    )


def _compile_nth(item: tuple[NormSpec, Target, Callable, int]) -> Compiled:
    spec, target, calls, index = item
    return compile_call(calls(spec, target)[index], target.arch)
