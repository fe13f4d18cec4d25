"""torch.compile and torch.export: one graph for any number of rows, and the bits of eager calls."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tilenorm

from .helpers import (
    CALLS,
    EACH_DEVICE,
    FAMILY,
    FEW,
    NEEDS_GPU,
    call,
    incoming_of,
    name_of,
    random,
    same,
    slow,
    step,
    tensors_of,
)

OPTIONS = {"offset": 1.0}


def compiled(form, device, function=call, **options):
    """The function compiled for any number of rows, and the backend, which counts compilations:
    inductor, where it needs no C++ compiler.
    """
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    run = torch.compile(
        lambda tensors: function(form, tensors, **options),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    return (lambda _, tensors: run(tensors)), counter


CASES = [("rms_norm", dtype, n) for dtype in (torch.bfloat16, torch.float32) for n in (40, 1001)]
CASES += [(name, torch.bfloat16, 40) for name in FEW[1:]]
CASES += slow(*((name, torch.bfloat16, 40) for name in CALLS if name not in FEW))


@EACH_DEVICE
@pytest.mark.parametrize("name, dtype, n", CASES, ids=name_of)
def test_compiled_the_same_bits_without_recompiling(device, name, dtype, n, dynamo):
    form = CALLS[name]
    function, counter = compiled(form, device, **OPTIONS)
    counts = []
    for rows in (3, 16, 17, 1000):
        tensors = tensors_of(form, rows, n, dtype=dtype, parameter=torch.float32, device=device)
        with dynamo.config.patch(error_on_recompile=rows != 3):
            got = step(form, tensors, function=function)
        expected = step(form, tensors, **OPTIONS)
        if device == "cuda":  # where Inductor adds up the products of which this gradient is made
            for results in (got, expected):
                results.pop("layer_scale", None)
        assert same(got, expected), rows
        counts.append(counter.frame_count)
    # One, or two where PyTorch first takes eps and offset for numbers that vary.
    assert len(set(counts)) == 1
    assert not dynamo.utils.counters["graph_break"]


@EACH_DEVICE
@pytest.mark.parametrize("absent", [0, 1], ids=["output", "sum"])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32], ids=name_of)
def test_compiled_with_one_gradient_absent(device, other, absent, dynamo):
    form = FAMILY["add_rms_norm"]
    tensors = tensors_of(form, 5, 40, dtype=torch.bfloat16, other=other, device=device)
    incoming = [None if i == absent else dy for i, dy in enumerate(incoming_of(tensors))]
    function = compiled(form, device)[0]
    got, expected = step(form, tensors, incoming, function=function), step(form, tensors, incoming)
    # A compiled backward pass sees zeros, not None, where an output is not used.
    assert got.keys() >= expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    assert not any(got[n].any() for n in got.keys() - expected.keys())


def trained(run, module, x, grad):
    """The output, and gradients if asked for."""
    x = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        y = run(x)
    parameters = list(module.parameters())
    return y.detach(), *(torch.autograd.grad(y, [x, *parameters], x.detach()) if grad else ())


@EACH_DEVICE
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("sizes", [1, 2], ids=["dynamic", "default"])
def test_compiled_modules_without_recompiling(device, grad, sizes, dynamo):
    """Left to itself, PyTorch takes the second batch size to tell which dimension varies."""
    block = nn.Sequential(tilenorm.RMSNorm(40, offset=1.0), tilenorm.LayerNorm(40)).to(device)
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    dynamic = True if sizes == 1 else None
    run = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    for rows in (5, 16, 17, 1000):
        x = random(rows, 40, device=device, seed=rows)
        with dynamo.config.patch(error_on_recompile=len(counts) >= sizes):
            got = trained(run, block, x, grad)
        counts.append(counter.frame_count)
        for a, b in zip(got, trained(block, block, x, grad), strict=True):
            assert torch.equal(a, b)
    assert len(set(counts)) == sizes
    assert not dynamo.utils.counters["graph_break"]


@NEEDS_GPU
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled_into_cuda_graphs(grad, dynamo):
    block = nn.Sequential(tilenorm.RMSNorm(256), tilenorm.LayerNorm(256)).cuda()
    run = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # warms up, records, replays
        x = random(64, 256, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in trained(run, block, x, grad)]
        for a, b in zip(got, trained(block, block, x, grad), strict=True):
            assert torch.equal(a, b)
    assert not dynamo.utils.counters["inductor"]["cudagraph_skips"]
