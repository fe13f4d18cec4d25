"""The kernels of one training step on a GPU, as PyTorch's profiler sees them."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_LENGTH = 100


def of_step(step: Callable) -> list[dict]:
    """The name, calls and ms of each kernel of one step, those with the most time first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return listed((event.name, event.device_time_total) for event in events)


def listed(ran: Iterable[tuple[str, float]]) -> list[dict]:
    """The kernels of each name, given the names and the microseconds of all that ran.

    cuTile appends _K and the types of the arguments to the name of a kernel's function.
    """
    found: dict[str, dict] = {}
    for name, us in ran:
        shown = name.partition("_K")[0][:NAME_LENGTH]
        line = found.setdefault(shown, {"name": shown, "calls": 0, "ms": 0.0})
        line["calls"] += 1
        line["ms"] += us / 1e3
    return sorted(found.values(), key=lambda line: -line["ms"])
