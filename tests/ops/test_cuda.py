"""What only a GPU can show: memory, streams, graphs, synchronisation, sizes, the first call."""

import os
import subprocess
import sys

import pytest
import torch

from tilenorm.launch.plan import Needs, plan_backward, plan_forward
from tilenorm.ops import library
from tilenorm.ops.registry import device_of

from .cuda_helpers import call, same, step, tensors
from .helpers import NEEDS_GPU, assert_within, formula, oracle, random

pytestmark = NEEDS_GPU


def requested(which: str) -> int:
    """Bytes that were asked for; what is allocated may be a larger block."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak_of(function) -> int:
    """The bytes in use at the peak of a call, beyond those in use before it."""
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    peak = requested("peak") - before
    del kept
    return peak


def workspace_of(plan, rows: int, matrix: int) -> int:
    """Bytes of the one float32 a (row, chunk) that rows too wide for one block need, and no more
    than a small part of the matrix.
    """
    shape = plan.workspace(rows)
    size = 4 * shape[0] * shape[1] if shape else 0
    assert size <= matrix // 256
    return size


ROWS = 4096
WIDTHS = [256, 1000, 1024, 4096, 12288, 16384, 32768, 65536]


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("n", WIDTHS)
def test_memory_forward(n, grad):
    x, weight, _, _ = tensors(ROWS, n)
    x.requires_grad_(grad)
    weight.requires_grad_(grad)
    call(x, weight)  # the first call compiles
    matrix, rstd = ROWS * n * 2, ROWS * 4 if grad else 0
    spec = library.spec_of(x, weight, None, n, 0.0)
    plan = plan_forward(spec, device_of("cuda", 0).target, grad)
    assert peak_of(lambda: call(x, weight)) == matrix + rstd + workspace_of(plan, ROWS, matrix)


@pytest.mark.parametrize("n", WIDTHS)
def test_memory_backward(n):
    x, weight, _, dy = tensors(ROWS, n)
    torch.autograd.grad(call(x, weight), (x, weight), dy)
    y = call(x, weight)
    peak = peak_of(lambda: torch.autograd.grad(y, (x, weight), dy))
    matrix, dw = ROWS * n * 2, n * 2
    target = device_of("cuda", 0).target
    spec = library.spec_of(x, weight, None, n, 0.0)
    plan = plan_backward(spec, target, Needs(True, True, False))
    scratch = 4 * target.multiprocessors * n * 4
    assert peak <= matrix + dw + scratch + workspace_of(plan, ROWS, matrix)


def test_a_step_leaves_nothing_but_gradients():
    x, weight, _, dy = tensors(ROWS, 4096)
    torch.autograd.grad(call(x, weight), (x, weight), dy)
    before = requested("current")
    grads = torch.autograd.grad(call(x, weight), (x, weight), dy)
    assert requested("current") - before == sum(g.numel() * 2 for g in grads)


def test_a_frozen_weight_takes_no_scratch():
    x, weight, _, dy = tensors(ROWS, 4096)
    weight.requires_grad_(False)
    torch.autograd.grad(call(x, weight), x, dy)
    y = call(x, weight)
    assert peak_of(lambda: torch.autograd.grad(y, x, dy)) == ROWS * 4096 * 2


def ops_seen(function) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {e.name for e in profile.events() if e.name.startswith("tilenorm::")}


def test_eager_calls_do_not_go_through_the_dispatcher():
    inputs = tensors(5, 64)
    step(*inputs)
    x = inputs[0].detach()
    op = torch.ops.tilenorm.rms_norm
    assert ops_seen(lambda: op(x, None, None, 64, 1e-6, 0.0, False)) == {"tilenorm::rms_norm"}
    assert not ops_seen(lambda: step(*inputs))
    assert not ops_seen(lambda: call(x, None))


@pytest.mark.parametrize("n", [64, 4096, 65536])
def test_nothing_waits_for_the_gpu(n):
    inputs = tensors(100, n)
    step(*inputs)
    call(inputs[0].detach(), *(t.detach() for t in inputs[1:3]))  # compiles the other forward pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*inputs)
        with torch.no_grad():
            call(*inputs[:3])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n", [64, 4096, 65536])
def test_on_the_current_stream(n):
    inputs = tensors(2000, n)
    expected = step(*inputs)
    x = torch.zeros_like(inputs[0]).requires_grad_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream, the kernels would read x before this
        with torch.no_grad():
            x.copy_(inputs[0])
        got = step(x, *inputs[1:])
    stream.synchronize()
    assert same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_on_the_device_of_the_input(current):
    expected = step(*tensors(100, 4096))
    inputs = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in tensors(100, 4096)]
    with torch.cuda.device(current):
        got = step(*inputs)
        assert torch.cuda.current_device() == current
    assert all(t.device.index == 1 for t in got)
    assert same([t.to("cuda:0") for t in got], expected)


@pytest.mark.parametrize("n", [64, 4096, 65536])
def test_captured_in_a_graph(n):
    x, weight, bias, dy = tensors(300, n)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, weight, bias, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, weight, bias, dy)
    for seed in range(2):
        with torch.no_grad():
            for number, tensor in enumerate((x, weight, bias, dy)):
                tensor.copy_(random(*tensor.shape, seed=4 * seed + number))
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, step(x, weight, bias, dy)), f"replay {seed}"


def check_against_float64(rows, n):
    x, weight, _, dy = tensors(rows, n)
    y = call(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    for name, part in (("first", slice(0, 2)), ("last", slice(-5, None))):
        found = oracle(x[part], (n,), weight, dy=dy[part])
        assert_within(f"{name} rows of y", y[part], found.y)
        assert_within(f"{name} rows of dx", dx[part], found.dx, terms=found.dx_terms)
    expected = torch.zeros(n, dtype=torch.float64, device="cuda")
    step_rows = max(1, (1 << 26) // n)
    for start in range(0, rows, step_rows):
        part = slice(start, start + step_rows)
        expected += (formula(x.detach()[part].double(), (n,)) * dy[part]).sum(0)
    assert_within("dw", dw, expected.cpu(), rows=rows)


@pytest.mark.parametrize("n", [1024, 65536])
def test_more_than_two_to_the_31_elements(n):
    rows = (1 << 31) // n + 3
    needed = 6 * rows * n * 2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    try:
        check_against_float64(rows, n)
    finally:
        torch.cuda.empty_cache()


FIRST_CALL = """
import time, torch, tilenorm
x = torch.randn(512, {n}, device="cuda", dtype=torch.bfloat16)
w = torch.ones({n}, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
w.requires_grad_()
start = time.perf_counter()
y = tilenorm.rms_norm(x.requires_grad_(), ({n},), w)
torch.cuda.synchronize()
forward = time.perf_counter()
torch.autograd.grad(y, (x, w), torch.ones_like(y))
torch.cuda.synchronize()
print(forward - start, time.perf_counter() - forward)
"""


@pytest.mark.parametrize("n", [4096, 16384, 65536])
def test_the_first_call_compiles_in_three_seconds(n, tmp_path):
    environment = os.environ | {"CUDA_TILE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL.format(n=n)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    forward, backward = map(float, done.stdout.split())
    assert forward < 3
    assert backward < 3
