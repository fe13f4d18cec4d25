"""On a GPU: rows that blocks share while something else holds it; first calls from many threads."""

import subprocess
import sys

import pytest
import torch

from tests.stand_in_driver import ROOT

from . import contention
from .helpers import NEEDS_GPU

pytestmark = NEEDS_GPU


def ended(*command: str) -> None:
    """Run a Python program, and fail if it fails or hangs."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=contention.SECONDS,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"hangs: {' '.join(command)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form, n", [("rms_norm", 65536), ("add_layer_norm", 262144)])
@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in contention.SCENARIOS])
def test_the_same_bits_while_something_else_holds_the_gpu(scenario, form, n):
    ended("-m", "tests.ops.contention", scenario, form, str(n))


# Each thread calls every form, the first calls of all of them at once, and in a thread of
# autograd's own the first backward passes.
FIRST_CALLS = """
import os, sys, tempfile, threading
os.environ["CUDA_TILE_CACHE_DIR"] = tempfile.mkdtemp()
import torch
from tilenorm.launch.kernel import Kernel
from tests.ops.cuda_helpers import made, train
from tests.ops.helpers import FAMILY, same

devices = [f"cuda:{{i}}" for i in range({devices})]
compiled, first = [], Kernel._first
def count(self, signature, context, capability):
    compiled.append((self, signature.symbol, capability))
    return first(self, signature, context, capability)
Kernel._first = count
inputs = {{(f, d): made(FAMILY[f], 100, 4096, device=d) for f in FAMILY for d in devices}}
barrier, found = threading.Barrier(8), []
def run(number):
    torch.cuda.set_device(number % len(devices))
    barrier.wait()
    # The device of the inputs is current in half of the calls.
    for (name, device), given in inputs.items():
        found.append((name, device, train(FAMILY[name], *given)))
threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for i in range(len(devices)):
    torch.cuda.synchronize(i)
assert len(found) == 8 * len(inputs), len(found)
assert len(compiled) == len(set(compiled)), "a kernel was compiled twice"
for name, device, results in found:
    assert all(str(t.device) == device for t in results.values())
    alone = train(FAMILY[name], *inputs[name, device])
    assert same(results, alone), (name, device)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_first_calls_in_many_threads(devices):
    if torch.cuda.device_count() < devices:
        pytest.skip("needs two GPUs")
    ended("-c", FIRST_CALLS.format(devices=devices))
