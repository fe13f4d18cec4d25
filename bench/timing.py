"""The time of a call: on the GPU from replays of a CUDA graph, on the CPU from the clock.

Calls are functions without arguments, and each has its own copy of the inputs. They are called
in turn, and the last results of all are kept. Between two uses of a tensor the calls move
several times the size of the L2 cache, so inputs and outputs are cold.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice

import torch

from bench.check import as_tuple
from bench.text import first_line

L2_MULTIPLE = 4
MOST_SETS = 64
# A graph moves at least so many bytes, which take a millisecond on the fastest GPU. Launching the
# graph adds a few microseconds, which do not matter then.
GRAPH_BYTES = 4_000_000_000
MOST_CALLS = 512
WARM_UP_S = 0.2
BUDGET_S, CPU_BUDGET_S = 0.1, 0.02  # of the samples of a call
HOST_S = 1.0  # of the host time of a call on a GPU; on a CPU it is CPU_BUDGET_S
HEAD_START = 2_000_000  # GPU cycles, about a millisecond, in which the host runs ahead
LEAST = 3  # samples of a host time
_MARK = 7.0


class Timer:
    """Points on the time line of a device. The host runs ahead of a GPU."""

    def __init__(self, device: str):
        self.on_cpu = device == "cpu"

    def mark(self):
        """This point: where the GPU is when it has done what was queued, or the CPU's clock."""
        if self.on_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark) -> None:
        """Wait until the GPU has reached a point."""
        if not self.on_cpu:
            mark.synchronize()

    def between(self, start, end) -> float:
        """The microseconds between two points that were reached."""
        return (end - start) * 1e6 if self.on_cpu else start.elapsed_time(end) * 1e3

    def of_each(self, calls: Iterable[Callable], before: Callable = lambda: None) -> list[float]:
        """The microseconds of each call, with something else before it."""
        marks = []
        for call in calls:
            before()
            start = self.mark()
            call()
            marks.append((start, self.mark()))
        self.wait(marks[-1][1])
        return [self.between(*ends) for ends in marks]


def summarize(samples_us: Sequence[float], kind: str, note: str = "") -> dict:
    """The fields of a line, of at least two samples. The spread is (p80 - p20) / median."""
    p20, *_, p80 = statistics.quantiles(samples_us, n=5, method="inclusive")
    median = statistics.median(samples_us)
    found = {"median_us": median, "spread": (p80 - p20) / median, "samples": len(samples_us)}
    return found | {"timing": kind, "error": note}


def idle(device: str) -> None:
    """Wait until a GPU has nothing to do."""
    if device != "cpu":
        torch.cuda.synchronize()


def rotating_sets(bytes_per_call: int, device: str) -> int:
    """The number of copies of the inputs with which every call finds a cold L2 cache."""
    if device == "cpu":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_SETS, max(2, -(-L2_MULTIPLE * l2 // bytes_per_call)))


def measure(make: Callable[[], Callable], nbytes: int, device: str) -> dict:
    """Time a call that moves so many bytes. ``make`` makes one with tensors of its own.

    On a GPU, calls that a graph cannot capture are timed by events.
    """
    calls = [make() for _ in range(rotating_sets(nbytes, device))]
    for call in calls:
        call()
    if device == "cpu":
        return _sampled(Timer(device), calls, 5, CPU_BUDGET_S, "clock")
    try:
        return _by_graph(calls, nbytes, Timer(device))
    except Exception as error:  # providers raise many types when capturing fails
        torch.cuda.synchronize()  # raises again if the GPU no longer works
        cause = error.__context__ or error  # ending a broken capture raises another error
        return _by_events(calls, device, f"no CUDA graph: {first_line(cause)}")


def _sampled(timer, calls, least: int, budget_s: float, kind: str, each: int = 1) -> dict:
    """Samples of ``each`` calls, taken in turn: as many as there is time for, at most 100."""
    (first_us,) = timer.of_each(calls[:1])
    count = max(least, min(100, int(budget_s * 1e6 / first_us)))
    times = timer.of_each(islice(cycle(calls), count))
    return summarize([us / each for us in times], kind)


def _by_graph(calls, nbytes, timer) -> dict:
    rounds = min(MOST_CALLS, -(-GRAPH_BYTES // nbytes)) // len(calls)
    count = max(1, rounds) * len(calls)
    results = [None] * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(count):
            results[i % len(calls)] = calls[i % len(calls)]()
    try:
        _replay_rewrites(graph, results)
        return _sampled(timer, [graph.replay], 10, BUDGET_S, "graph", count)
    finally:
        graph.reset()


def _replay_rewrites(graph, results) -> None:
    """Raise if a replay does not write an output.

    A provider may launch work on a stream of its own. That work is not in the graph, and would seem
    to take no time.
    """
    torch.cuda.synchronize()  # wait for such work, which could otherwise overwrite the mark later
    tensors = [tensor.detach() for result in results for tensor in as_tuple(result)]
    for tensor in tensors:
        tensor.fill_(_MARK)
    graph.replay()
    if any((tensor == _MARK).all() for tensor in tensors):
        raise RuntimeError("a replay does not write the outputs")


def _by_events(calls, device, note) -> dict:
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.zeros(L2_MULTIPLE * l2 // 4, device=device)

    def before() -> None:
        flush.sum()  # only reads, so the call has no dirty cache lines to write back
        torch.cuda._sleep(HEAD_START)

    return summarize(Timer(device).of_each(islice(cycle(calls), 30), before), "events", note)


def host(call: Callable, device: str, samples: int = 40, calls: int = 20) -> dict[str, float]:
    """What the host spends on one call, the medians of samples: the microseconds ``us`` by the
    clock and ``cpu_us`` of all threads of the process, and the ``spread`` by the clock.

    The GPU work of the call has to be shorter than its host work, because only the time between two
    samples waits for the GPU. A call that is slow, as one on a CPU is, has fewer samples of fewer
    calls, so that they take no longer than their budget; at least LEAST samples of a call.
    """
    budget_s = CPU_BUDGET_S if device == "cpu" else HOST_S
    call()  # may compile
    (first_us,) = Timer("cpu").of_each([call])
    calls = max(1, min(calls, int(budget_s * 1e6 / LEAST / first_us)))
    warm = time.perf_counter() + min(WARM_UP_S, budget_s)
    while time.perf_counter() < warm:
        call()
    times: list[list[float]] = []
    gc.disable()
    try:
        end = time.perf_counter() + budget_s
        while len(times) < LEAST or (len(times) < samples and time.perf_counter() < end):
            idle(device)
            start = time.perf_counter(), time.process_time()
            for _ in range(calls):
                call()
            ends = time.perf_counter(), time.process_time()
            times.append([(b - a) * 1e6 / calls for a, b in zip(start, ends, strict=True)])
    finally:
        gc.enable()
    us, cpu_us = zip(*times, strict=True)
    found = summarize(us, "clock")
    return {
        "us": found["median_us"],
        "cpu_us": statistics.median(cpu_us),
        "spread": found["spread"],
    }
