"""tilenorm.compile: its report, options of torch.compile, CUDA graphs, and norms that stay."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import tilenorm
from tests.support.calls import EACH_DEVICE, EPS, NEEDS_GPU, random

from . import rotations
from .graphs import FeedForward, HuggingFaceNorm, argument, calls, kinds_of
from .modulations import GATED, gated

N, ROWS = 64, 6


def model(device="cpu", dtype=torch.float32) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(HuggingFaceNorm(N, EPS), nn.LayerNorm(N), N).to(device, dtype)


def assert_same_step(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        atol = tolerance * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol)


@EACH_DEVICE
@pytest.mark.parametrize("autocast", [False, True])
def test_matches_eager(device, autocast, dynamo):
    module, x = model(device), random(2, ROWS, N, device=device).requires_grad_()
    run = tilenorm.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for function in (run, module):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = function(x)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (x, *module.parameters()))))
    assert_same_step(*results, 2**-5 if autocast else 1e-5)
    kinds = [kind for kind, _ in run.tilenorm_report.replaced]
    assert kinds == ["rms_norm", "layer_norm" if autocast else "add_layer_norm"]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_the_backend_gets_the_graph_and_the_options(grad, dynamo):
    """Statistics are saved only if a gradient is needed."""
    given, guards = [], []

    def backend(graph_module, inputs, **options):
        given.append((calls(graph_module), options))
        return graph_module

    def keep_all(found):
        guards.extend(found)
        return [True] * len(found)

    options = {"guard_filter_fn": keep_all, "mine": 1}
    module, x = model(), random(2, ROWS, N)
    run = tilenorm.compile(module, backend=backend, options=options)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(run(x), module(x))
    ((nodes, passed),) = given
    assert [argument(node, "save") for node in nodes] == [grad] * 2
    assert passed == {"options": {"mine": 1}} and guards
    assert options == {"guard_filter_fn": keep_all, "mine": 1}


@NEEDS_GPU
def test_reduce_overhead_captures_cuda_graphs(dynamo):
    pytest.importorskip("triton")
    module = model("cuda", torch.bfloat16)
    # The norms here are so small that compile leaves them to Inductor.
    run = tilenorm.compile(module, where=lambda node: True, mode="reduce-overhead", fullgraph=True)
    for step in range(4):
        x = random(2, ROWS, N, device="cuda", dtype=torch.bfloat16, seed=step)
        torch.compiler.cudagraph_mark_step_begin()
        y = run(x)
        loss = (y.float() * x.float()).sum()
        got = [t.clone() for t in (y, *torch.autograd.grad(loss, module.parameters()))]
        y = module(x)
        loss = (y.float() * x.float()).sum()
        assert_same_step(got, (y, *torch.autograd.grad(loss, module.parameters())), 2**-5)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_the_report_tells_what_was_replaced_and_what_was_left(dynamo):
    module = model()
    decorate = tilenorm.compile(where=lambda node: node.name != "layer_norm", backend="eager")
    run = decorate(module)
    report = run.tilenorm_report
    assert str(report) == "no graph was captured yet" and not report.replaced + report.left
    run(random(2, ROWS, N))
    assert [kind for kind, _ in report.replaced] == ["rms_norm"]
    ((name, reason),) = report.left
    assert reason == "where() excludes it" and name in str(report) and reason in str(report)
    assert str(report).startswith("graph 0: 1 norms replaced, 1 not replaced")
    assert not hasattr(module, "tilenorm_report")
    torch.compiler.reset()
    assert not report.graphs


def test_layers_compiled_alone_share_their_code(dynamo):
    """The code, and so its entry in a report, is the first one's."""
    first, second = (tilenorm.compile(HuggingFaceNorm(N, EPS), backend="eager") for _ in range(2))
    first(random(2, N))
    second(random(2, N))
    assert len(first.tilenorm_report.graphs) == 1 and not second.tilenorm_report.graphs


def rotated(x, w, cos, sin):
    q = rotations.NORMS["OLMo 2"](x, w).view(*x.shape[:2], -1, rotations.D).transpose(1, 2)
    return rotations.rotate(q, cos[:, None], sin[:, None])


B, T, D = "samples", "tokens", rotations.D
# A function, the ops that its norms become, and the shapes of its tensors.
VARYING = {
    "modulated": (gated, [GATED], [*[(B, T, 48)] * 2, *[(B, 48)] * 2]),
    "rotated": (rotated, ["rms_norm_rope"], [(B, T, 4 * D), (4 * D,), *[(1, T, D)] * 2]),
}


@pytest.mark.parametrize("name", VARYING)
def test_one_graph_for_every_batch(name, dynamo):
    function, kinds, shapes = VARYING[name]
    run = tilenorm.compile(function, backend="eager", fullgraph=True, rotation=True)
    for sizes in ({B: 2, T: 6}, {B: 3, T: 5}, {B: 4, T: 9}):
        tensors = [random(*[sizes.get(n, n) for n in shape], seed=len(shape)) for shape in shapes]
        for tensor, shape in zip(tensors, shapes, strict=True):
            if sizes[B] == 2:
                dynamo.mark_dynamic(tensor, [i for i, n in enumerate(shape) if n in sizes])
        with dynamo.config.patch(error_on_recompile=sizes[B] != 2):
            got = run(*tensors)
        torch.testing.assert_close(got, function(*tensors), rtol=1e-5, atol=1e-5)
    assert kinds_of(run.tilenorm_report) == kinds


@pytest.mark.parametrize("rows", [1, 100])
def test_small_norms_are_left_to_inductor(rows, stepwise):
    run = tilenorm.compile(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 257), nn.RMSNorm(257)))
    run(random(rows, 256))
    assert kinds_of(run.tilenorm_report) == ["rms_norm"]
    ((_, reason),) = run.tilenorm_report.left
    assert reason == "Inductor fuses a norm of 256 elements with its neighbours"


def test_cut_rows_of_dtensors(one_process_mesh, dynamo):
    """The functions in torch.compile itself, from PyTorch 2.9 on."""
    x = distribute_tensor(random(ROWS, N), one_process_mesh, [Shard(1)]).requires_grad_()
    run = torch.compile(tilenorm.layer_norm, backend="aot_eager", fullgraph=True)
    results = [
        (y := f(x, (N,)), *torch.autograd.grad(y.sin().sum(), x))
        for f in (run, tilenorm.layer_norm)
    ]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got.full_tensor(), expected.full_tensor())
