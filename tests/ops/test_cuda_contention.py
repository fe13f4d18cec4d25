"""On a GPU: rows that blocks share while something else holds it; first calls from many threads.

Each test runs this file as a program, in a process of its own, so that a hang ends with the
process. `python -m tests.ops.test_cuda_contention SCENARIO FORM N` ends with 0 if all results have
the bits that they have alone.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.calls import FAMILY, NEEDS_GPU, same
from tests.support.on_gpu import made, train
from tests.support.stand_in_driver import ROOT
from tilenorm.launch.kernel import Kernel

pytestmark = NEEDS_GPU

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


def beside(scenario: str, form: str, n: str) -> None:
    """Run a scenario with a step of a form on rows of n elements."""
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


def first_calls(devices: str) -> None:
    """Each thread calls every form, the first calls of all of them at once, and in a thread of
    autograd's own the first backward passes.
    """
    places = [f"cuda:{i}" for i in range(int(devices))]
    compiled, first = [], Kernel._first

    def count(self, signature, context, capability):
        compiled.append((self, signature.symbol, capability))
        return first(self, signature, context, capability)

    Kernel._first = count
    inputs = {(f, d): made(FAMILY[f], 100, 4096, device=d) for f in FAMILY for d in places}
    barrier, found = threading.Barrier(8), []

    def run(number):
        torch.cuda.set_device(number % len(places))
        barrier.wait()
        # The device of the inputs is current in half of the calls.
        for (name, device), given in inputs.items():
            found.append((name, device, train(FAMILY[name], *given)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(len(places)):
        torch.cuda.synchronize(i)
    assert len(found) == 8 * len(inputs), len(found)
    assert len(compiled) == len(set(compiled)), "a kernel was compiled twice"
    for name, device, results in found:
        assert all(str(t.device) == device for t in results.values())
        assert same(results, train(FAMILY[name], *inputs[name, device])), (name, device)


def ended(*arguments: str, **environment: str) -> None:
    """Run this file as a program, and fail if it fails or hangs."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            env=os.environ | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"hangs: {' '.join(arguments)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form, n", [("rms_norm", 65536), ("add_layer_norm", 262144)])
@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_the_same_bits_while_something_else_holds_the_gpu(scenario, form, n):
    ended(scenario, form, str(n))


@pytest.mark.parametrize("devices", [1, 2])
def test_first_calls_in_many_threads(devices, tmp_path):
    if torch.cuda.device_count() < devices:
        pytest.skip("needs two GPUs")
    ended("first_calls", str(devices), CUDA_TILE_CACHE_DIR=str(tmp_path))


if __name__ == "__main__":
    first_calls(*sys.argv[2:]) if sys.argv[1] == "first_calls" else beside(*sys.argv[1:])
