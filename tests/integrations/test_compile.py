"""tilenorm.compile: forward, backward, caches, options of torch.compile, and CUDA graphs."""

import importlib.util

import pytest
import torch
from torch import nn

import tilenorm

from ..ops.helpers import EACH_DEVICE, EPS, NEEDS_GPU, random
from .graphs import HuggingFaceNorm, argument, calls

N, ROWS = 64, 6


class Model(nn.Module):
    """A transformer block without attention, followed by a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.before, self.after = HuggingFaceNorm(N, EPS), nn.LayerNorm(N)
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x):
        return self.after(x + self.down(torch.relu(self.up(self.before(x)))))


def model(device, dtype=torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(device, dtype)


@pytest.fixture
def graphs(monkeypatch):
    """A list of all graphs in which tilenorm.compile replaces norms, in order."""
    graph_modules = []
    module = importlib.import_module("tilenorm.integrations.compile")
    replace = module.replace_chosen

    def spy(graph_module, *others):
        graph_modules.append(graph_module)
        return replace(graph_module, *others)

    monkeypatch.setattr(module, "replace_chosen", spy)
    return graph_modules


@EACH_DEVICE
def test_matches_eager_with_dynamic_batch(device, graphs, dynamo):
    """One graph without breaks serves every batch size, forward and backward."""
    module = model(device)
    run = tilenorm.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (5, 7, 9):
        x = random(2, rows, N, device=device).requires_grad_()
        with dynamo.config.patch(error_on_recompile=rows != 5):
            y = run(x)
        inputs = (x, *module.parameters())
        got = (y, *torch.autograd.grad(y.sin().sum(), inputs))
        y = module(x)
        expected = (y, *torch.autograd.grad(y.sin().sum(), inputs))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    assert [kind(node) for node in calls(graphs[-1])] == ["rms", "add_layer"]
    assert not dynamo.utils.counters["graph_break"]


def kind(node) -> str:
    added, norm = node.args[1] is not None, argument(node, "norm")
    return f"add_{norm}" if added else norm


@EACH_DEVICE
def test_matches_eager_under_autocast(device, dynamo):
    module, x = model(device), random(2, ROWS, N, device=device)
    run = tilenorm.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        got, expected = run(x), module(x)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_statistics_are_saved_only_if_a_gradient_is_needed(grad, graphs, dynamo):
    module, x = model("cpu"), random(2, ROWS, N)
    with torch.set_grad_enabled(grad):
        assert tilenorm.compile(module, backend="eager")(x).requires_grad == grad
    assert [argument(node, "save") for node in calls(graphs[0])] == [grad] * 2


def test_where_selects_norms(graphs, dynamo):
    @tilenorm.compile(where=lambda node: "layer_norm" in node.name, backend="eager")
    def function(x):
        return torch.nn.functional.layer_norm(torch.rms_norm(x, (N,)), (N,)).relu()

    function(random(ROWS, N))
    assert [kind(node) for node in calls(graphs[0])] == ["layer"]
    assert [kind for kind, _ in function.tilenorm_report.replaced] == ["layer_norm"]


def test_options_have_the_meaning_of_torch_compile(dynamo):
    guard_counts = []

    def keep_all(guards):
        guard_counts.append(len(guards))
        return [True] * len(guards)

    options = {"guard_filter_fn": keep_all}
    x = random(ROWS, N)
    module = model("cpu")
    torch.testing.assert_close(
        tilenorm.compile(module, backend="eager", options=options)(x), module(x)
    )
    assert guard_counts
    assert options == {"guard_filter_fn": keep_all}


def test_user_defined_backend_receives_graph_and_options(dynamo):
    backend_calls = []

    def backend(graph_module, inputs, **options):
        backend_calls.append((calls(graph_module), options))
        return graph_module

    tilenorm.compile(model("cpu"), backend=backend, options={"mine": 1})(random(ROWS, N))
    ((nodes, options),) = backend_calls
    assert len(nodes) == 2
    assert options == {"options": {"mine": 1}}


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
        expected = [y, *torch.autograd.grad(loss, module.parameters())]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-5, atol=2**-5 * b.abs().max().item())
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_the_report_tells_what_was_replaced_and_what_was_left(dynamo):
    def before(node):
        return node.name != "layer_norm"

    module = model("cpu")
    run = tilenorm.compile(module, where=before, backend="eager")
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
