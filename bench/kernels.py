"""The kernels of one training step on a GPU: names, times, and the bytes that they move.

The times are those of PyTorch's profiler. The bytes are counted where tilenorm and the code that
Inductor generated launch their kernels: each tensor among the arguments once, since a kernel reads
or writes it, and a tensor that Inductor updates in place twice. A tensor that is much larger than
the index space of an Inductor kernel is a table, of which the kernel reads a part: it counts with
as many elements as the index space. Kernels of PyTorch and of libraries have no bytes here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_LENGTH = 100
TABLE = 4  # a tensor is a table if it has more than this times the elements of the index space


class Ran(NamedTuple):
    """A kernel that the profiler saw: when it started, in microseconds, and how long it took."""

    name: str
    start_us: float
    us: float


class Launched(NamedTuple):
    """A launch that was counted. ``label`` is the name that a report shows."""

    kernel: str
    label: str
    bytes: int | None


def of_step(step: Callable) -> list[dict]:
    """The kernels of one step, those with the most time first."""
    with counted() as launches:
        ran = _profiled(step)
    return listed(ran, launches)


def listed(ran: Sequence[Ran], launches: Sequence[Launched]) -> list[dict]:
    """The name, calls, ms and bytes of each kernel. ``bytes`` is None where they are not known.

    Kernels of one name run in the order of their launches. If there are not as many of them as
    launches, nothing is known about their bytes.
    """
    waiting = {}
    for launch in launches:
        waiting.setdefault(launch.kernel, []).append(launch)
    running = {}
    for kernel in sorted(ran, key=lambda kernel: kernel.start_us):
        running.setdefault(_function(kernel.name, waiting), []).append(kernel)
    found = {}
    for function, kernels in running.items():
        known = waiting.get(function, [])
        if len(known) != len(kernels):
            known = [Launched(k.name, k.name[:NAME_LENGTH], None) for k in kernels]
        for kernel, launch in zip(kernels, known, strict=True):
            line = found.setdefault(launch.label, {"name": launch.label, "calls": 0, "ms": 0.0})
            line["calls"] += 1
            line["ms"] += kernel.us / 1e3
            line["bytes"] = None if launch.bytes is None else line.get("bytes", 0) + launch.bytes
    return sorted(found.values(), key=lambda line: -line["ms"])


@contextmanager
def counted() -> Iterator[list[Launched]]:
    """A list of the launches of tilenorm and of Inductor's kernels in this block."""
    from tilenorm.launch import kernel as launching
    from tilenorm.ops import cutile

    launches, launch = [], launching.launch_kernel

    def launch_kernel(stream, grid, kernel, arguments, **options):
        launches.append(_of_tilenorm(kernel._pyfunc.__name__, arguments))
        return launch(stream, grid, kernel, arguments, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(launching, "launch_kernel", launch_kernel))
        # No address is a multiple of this: no call repeats an earlier one by the driver.
        stack.enter_context(patch.object(cutile, "VECTOR_BYTES", 1 << 62))
        if tuner := _inductors_kernel():
            run = tuner.run

            def run_kernel(kernel, *arguments, **options):
                names = kernel.fn.arg_names
                launches.append(_of_inductor(kernel.fn.__name__, names, arguments))
                return run(kernel, *arguments, **options)

            stack.enter_context(patch.object(tuner, "run", run_kernel))
        yield launches


def _inductors_kernel() -> Any:
    """The class of the kernels in Inductor's code. Its name is private to PyTorch."""
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError:
        return None
    return CachingAutotuner


def _of_tilenorm(name: str, arguments: tuple) -> Launched:
    tensors = [a for a in _flat(arguments) if isinstance(a, Tensor)]
    return Launched(name, f"{name} of {len(tensors)} arrays", sum(t.nbytes for t in tensors))


def _flat(arguments) -> Iterator:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _flat(argument)
        else:
            yield argument


def _of_inductor(name: str, names: Sequence[str], arguments: Sequence) -> Launched:
    named = list(zip(names, arguments, strict=False))  # without the constants at the end
    sides = [value for called, value in named if "numel" in called]  # xnumel, r0_numel
    points, moved = math.prod(sides) if sides else math.inf, 0
    for called, argument in named:
        if isinstance(argument, Tensor):
            elements = argument.numel()
            if elements > TABLE * points:
                elements = points
            moved += elements * argument.itemsize * (1 + called.startswith("in_out"))
    return Launched(name, name[:NAME_LENGTH], moved)


def _function(name: str, known: dict) -> str:
    """The function of a kernel. cuTile appends _K and the types of the arguments to its name."""
    function = name.partition("_K")[0]
    return function if name not in known and function in known else name


def _profiled(step: Callable) -> list[Ran]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return [
        Ran(event.name, event.time_range.start, event.device_time_total)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
