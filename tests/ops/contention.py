"""Programs that run norms of wide rows while something else holds the GPU.

`python -m tests.ops.contention SCENARIO FORM N` ends with 0 if all results have the bits that they
have alone. Each runs in a process of its own, so that a hang ends with the process.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_helpers import made, train
from .helpers import FAMILY, same

ROWS = 150
SECONDS = 240  # after which a process is taken to hang
BESIDE = 30  # seconds beside another process, most of which is its start
PRODUCTS = 800  # the driver's queue holds some 1024 launches, and the host waits where it is full


def matmuls(count: int = PRODUCTS) -> None:
    """Queue products that fill every multiprocessor: 800 of them are 900 TFLOP."""
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(count):
        a @ a


@contextmanager
def beside_matmuls(priority: int = 0) -> Iterator[torch.cuda.Stream]:
    """Products run in a stream of their own beside what the block queues."""
    stream = torch.cuda.Stream(priority=priority)
    with torch.cuda.stream(stream):
        matmuls()
    yield stream
    torch.cuda.synchronize()


def other_kernels(step, expected):
    """Products hold the multiprocessors."""
    with beside_matmuls() as products:
        found = [step() for _ in range(5)]
        torch.cuda.current_stream().synchronize()
        assert not products.query(), "the products ended first: queue more of them"
    assert all(same(results, expected) for results in found)


def preferred_kernels(step, expected):
    """A stream of higher priority takes every multiprocessor that a block of a row leaves."""
    stream = torch.cuda.Stream(priority=0)
    with beside_matmuls(priority=-5), torch.cuda.stream(stream):
        found = [step() for _ in range(3)]
    assert all(same(results, expected) for results in found)


def twelve_streams(step, expected):
    """Grids of wide rows, from twelve threads, each in its stream: together they do not fit."""
    found, barrier = [], threading.Barrier(12)

    def run():
        stream = torch.cuda.Stream()
        barrier.wait()
        with torch.cuda.stream(stream):
            results = [step() for _ in range(4)]
        stream.synchronize()
        found.extend(results)

    threads = [threading.Thread(target=run) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 48 and all(same(results, expected) for results in found)


def graphs(step, expected):
    """Two captured steps, replayed in two streams, while products run."""
    captured = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        captured.append((graph, results, torch.cuda.Stream()))
    with beside_matmuls():
        for _ in range(20):
            for graph, _, stream in captured:
                with torch.cuda.stream(stream):
                    graph.replay()
        for _, results, stream in captured:
            stream.synchronize()
            assert same(results, expected)


def another_process(step, expected):
    """A process of the same rows and products. The driver preempts grids to take turns, or MPS
    runs both side by side.
    """
    with subprocess.Popen([sys.executable, "-m", __spec__.name, "load", *sys.argv[2:]]) as other:
        try:
            end = time.monotonic() + BESIDE
            while time.monotonic() < end:
                assert same(step(), expected)
                torch.cuda.synchronize()
            assert other.poll() is None, "the other process ended first"
        finally:
            other.kill()


def load(step, expected):
    """What another_process starts. It kills this process."""
    while True:
        matmuls(50)
        assert same(step(), expected)


SCENARIOS = (other_kernels, preferred_kernels, twelve_streams, graphs, another_process)


def main(scenario: str, form: str, n: str) -> None:
    tensors, incoming = made(FAMILY[form], ROWS, int(n))

    def step():
        return train(FAMILY[form], tensors, incoming)

    stream = torch.cuda.Stream()  # a capture may not follow a step in the default stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # from then on calls are repeated, and load no kernel
            expected = step()
    torch.cuda.synchronize()
    globals()[scenario](step, expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
