"""How long a call takes: on the GPU by replaying a CUDA graph, on the CPU by the clock.

``calls`` are functions without arguments, each on its own copy of the inputs. They are called in
turn and the last ``len(calls)`` results are kept, so inputs and outputs alike are cold: between
two uses of a tensor, several times the L2 cache has been moved.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.check import as_tuple
from bench.record import first_line

L2_MULTIPLE = 4
MOST_SETS = 64
# One graph moves this much at least, a millisecond on the fastest GPU, so that the few
# microseconds that launching a graph adds are lost in it.
GRAPH_BYTES = 4_000_000_000
MOST_CALLS = 512
WARM_UP_S = 0.2
_HEAD_START = 2_000_000  # GPU cycles, about a millisecond: the host is never what is waited for
_MARK = 7.0


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of the samples, and (p80 - p20) / median."""

    median_us: float
    spread: float
    samples: int
    kind: str  # "graph", "events" or "clock"
    note: str = ""  # why it is not the kind that was hoped for


def summarize(samples_us: Sequence[float], kind: str, note: str = "") -> Timing:
    """The statistics of at least two samples."""
    p20, *_, p80 = statistics.quantiles(samples_us, n=5, method="inclusive")
    median = statistics.median(samples_us)
    return Timing(median, (p80 - p20) / median, len(samples_us), kind, note)


def rotating_sets(bytes_per_call: int, device: str) -> int:
    """How many copies of the inputs make every call find a cold L2."""
    if device == "cpu":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_SETS, max(2, -(-L2_MULTIPLE * l2 // bytes_per_call)))


def measure(calls: Sequence[Callable], bytes_per_call: int, device: str, budget_s: float) -> Timing:
    """Time a call; on a GPU by graph, or, where the calls cannot be captured, by events."""
    if device == "cpu":
        return _by_clock(calls, budget_s)
    for call in calls:
        call()
    try:
        return _by_graph(calls, bytes_per_call, budget_s)
    except Exception as error:  # whatever a provider raises when it cannot be captured
        torch.cuda.synchronize()  # raises again if the GPU itself is lost
        cause = error.__context__ or error  # ending a broken capture raises once more
        return _by_events(calls, device, f"no CUDA graph: {first_line(cause)}")


def _by_graph(calls, bytes_per_call, budget_s) -> Timing:
    rounds = min(MOST_CALLS, -(-GRAPH_BYTES // bytes_per_call)) // len(calls)
    count = max(1, rounds) * len(calls)
    results = [None] * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(count):
            results[i % len(calls)] = calls[i % len(calls)]()
    try:
        _replay_rewrites(graph, results)
        (first_ms,) = _replay(graph, 1)
        times = _replay(graph, max(10, min(100, int(budget_s * 1e3 / first_ms))))
    finally:
        graph.reset()
    return summarize([ms * 1e3 / count for ms in times], "graph")


def _replay_rewrites(graph, results) -> None:
    """Raise if a replay leaves an output as it was: work launched on a stream of a provider's own
    would not be in the graph, and would seem to take no time."""
    torch.cuda.synchronize()  # such work has then been done, and cannot hide the mark
    tensors = [tensor.detach() for result in results for tensor in as_tuple(result)]
    for tensor in tensors:
        tensor.fill_(_MARK)
    graph.replay()
    if any((tensor == _MARK).all() for tensor in tensors):
        raise RuntimeError("a replay does not write the outputs")


def _replay(graph, times: int) -> list[float]:
    """Milliseconds of each replay."""
    events = [_event_pair() for _ in range(times)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _by_events(calls, device, note) -> Timing:
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.zeros(L2_MULTIPLE * l2 // 4, device=device)
    events = [_event_pair() for _ in range(30)]
    for i, (start, end) in enumerate(events):
        flush.sum()  # read, not written: no dirty lines are left for the call to write back
        torch.cuda._sleep(_HEAD_START)
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return summarize([start.elapsed_time(end) * 1e3 for start, end in events], "events", note)


def _event_pair():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _by_clock(calls, budget_s) -> Timing:
    for call in calls:
        call()
    samples, deadline = [], time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < deadline and len(samples) < 100):
        start = time.perf_counter()
        calls[len(samples) % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e6)
    return summarize(samples, "clock")


def host(call: Callable, device: str, samples: int = 40, calls: int = 20) -> float:
    """Median microseconds that the host spends on one call.

    The call must be small: its GPU work has to be shorter than its host work, and the GPU is
    waited for only between samples.
    """
    call()  # which may compile
    warm = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm:
        call()
    times = []
    gc.disable()
    try:
        for _ in range(samples):
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) * 1e6 / calls)
    finally:
        gc.enable()
    return statistics.median(times)
