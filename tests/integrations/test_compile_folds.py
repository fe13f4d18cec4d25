"""tilenorm.compile with Inductor: sums folded into gradients, and outputs that are not saved."""

import shutil

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import tilenorm
from tilenorm.integrations import joint
from tilenorm.integrations.compile import OPTION
from tilenorm.integrations.fx import Folds
from tilenorm.integrations.joint import FoldPass
from tilenorm.ops import torch_private

from ..ops.helpers import EPS, random
from .graphs import NORM_BACKWARD, NORMS, HuggingFaceNorm, argument
from .stepwise import counted, sums

N, ROWS = 320, 6  # compile leaves norms of 256 elements and fewer to Inductor
BF16 = torch.bfloat16


class Block(nn.Module):
    """A transformer block with three projections in the place of attention."""

    def __init__(self):
        super().__init__()
        self.before, self.after = HuggingFaceNorm(N, EPS), nn.LayerNorm(N)
        self.q, self.k, self.v, self.o = (nn.Linear(N, N, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(N, N, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.before(x)
        x = x + self.o(self.q(h).sigmoid() * self.k(h).tanh() + self.v(h))
        h = self.after(x)
        return x + self.down(self.gate(h).relu() * self.up(h))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.fixture
def unfolded(monkeypatch):
    """A function after whose call nothing is folded."""

    def stop():
        monkeypatch.setattr(joint, "fold_sums", lambda graph, output: Folds())

    return stop


def block(kind=Block, dtype=BF16) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


def step(module, x, **options):
    """The gradients of a compiled module's parameters and of x, its output, and its report."""
    torch._dynamo.reset()
    x = x.detach().requires_grad_()
    run = tilenorm.compile(module, fullgraph=True, **options)
    y = run(x)
    dy = random(*y.shape, dtype=y.dtype, seed=9)
    named = {"input": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(y, list(named.values()), dy)
    return dict(zip(named, grads, strict=True)) | {"output": y.detach()}, run.tilenorm_report


FOLDED = ["2 terms", "3 terms", "sum"]


def test_gradients_take_over_the_sums(stepwise, unfolded):
    """With low memory the outputs are not saved. The gradients have the same bits."""
    x = random(2, ROWS, N, dtype=BF16)
    got, report = step(block(), x)
    assert [kind for kind, _ in report.folded] == FOLDED
    assert not report.unfolded and report.not_folding is None
    assert "joint graph 0: 3 folds, 0 not folded" in str(report)
    (backward,) = stepwise.backward
    assert not sums(backward.graph, N) and counted(backward.graph, NORM_BACKWARD) == 2
    saved = stepwise.saved
    stepwise.forward.clear()
    low, report = step(block(), x, memory="low")
    assert sorted(kind for kind, _ in report.folded) == sorted([*FOLDED, "output", "output"])
    assert stepwise.saved == saved - 2 * x.numel() * x.element_size()
    calls = stepwise.backward[-1].graph.find_nodes(op="call_function", target=NORM_BACKWARD)
    assert all(argument(call, "output") for call in calls)
    unfolded()
    expected, other = step(block(), x)
    assert not other.folded
    assert len(sums(stepwise.backward[-1].graph, N)) == 4
    for name, grad in expected.items():
        assert torch.equal(got[name], low[name])
        if name == "input":  # rounded once where the sum with dx is folded
            torch.testing.assert_close(got[name], grad, rtol=2**-7, atol=2**-7)
        else:
            assert torch.equal(got[name], grad), name


def returned(block, x):
    h = block.before(x)
    return x + block.q(h) + block.k(h), h


def product(block, x):
    """The gradient of the norm's output needs that output."""
    h = block.before(x)
    return x + h * block.k(h)


OUTPUTS_LEFT = {
    "a result": (returned, BF16, "is a result of the graph"),
    "activated": (lambda b, x: x + b.q(b.before(x).sin()), BF16, "which is made of y"),
    "a product": (product, BF16, "reads y before this gradient is computed"),
    "other bits": (lambda b, x: x + b.q(b.after(x)), torch.float32, "writes no y for LayerNorm"),
    "checkpointed": (Checkpointed.forward, BF16, "its forward pass is computed again"),
}


@pytest.mark.parametrize("name", OUTPUTS_LEFT)
def test_outputs_that_are_saved_all_the_same_stay(name, stepwise):
    forward, dtype, reason = OUTPUTS_LEFT[name]
    kind = type("Other", (Checkpointed,), {"forward": forward})
    run = tilenorm.compile(block(kind, dtype), memory="low", fullgraph=True)
    y = run(random(2, ROWS, N, dtype=dtype).requires_grad_())
    (y[0] + y[1] if isinstance(y, tuple) else y).sum().backward()
    report = run.tilenorm_report
    assert "output" not in [kind for kind, _ in report.folded]
    assert any(reason in why for _, why in report.unfolded), str(report)


def test_a_checkpointed_block_is_computed_again_as_before(stepwise, unfolded):
    """Its forward pass keeps its tags. The sums of its gradients are folded all the same."""
    x = random(2, ROWS, N, dtype=BF16)
    got, report = step(block(Checkpointed), x)
    assert [kind for kind, _ in report.folded] == FOLDED
    saved = stepwise.saved
    assert sum(counted(stepwise.backward[0].graph, op) for op in NORMS) == 2
    unfolded()
    stepwise.forward.clear()
    expected, _ = step(block(Checkpointed), x)
    assert stepwise.saved == saved
    assert all(torch.equal(got[n], g) for n, g in expected.items() if n != "input")


def test_one_graph_for_every_batch(stepwise, dynamo):
    module = block(dtype=torch.float32)
    run = tilenorm.compile(module, fullgraph=True, dynamic=True)
    for rows in (4, 7, 9):
        x = random(2, rows, N).requires_grad_()
        with dynamo.config.patch(error_on_recompile=rows != 4):
            y = run(x)
        dy = random(2, rows, N, seed=3)
        named = (x, *module.parameters())
        got = torch.autograd.grad(y, named, dy)
        for a, b in zip(got, torch.autograd.grad(module(x), named, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    assert [kind for kind, _ in run.tilenorm_report.folded] == FOLDED
    assert len(stepwise.backward) == 1


def recorder(seen: list):
    """A user's own pass for Inductor's joint graphs, which does not say what it is."""

    def own(graph):
        seen.append(counted(graph, torch.ops.aten.add.Tensor))

    return own


@pytest.mark.parametrize("by", ["options", "configuration"])
def test_a_users_own_pass_runs_before(by, stepwise):
    from torch._inductor import config

    seen = []
    own = {OPTION: recorder(seen)}
    options, configured = ({"options": own}, {}) if by == "options" else ({}, own)
    with config.patch(configured):
        _, report = step(block(), random(ROWS, N, dtype=BF16), **options)
    assert [kind for kind, _ in report.folded] == FOLDED
    (additions,) = seen
    assert additions > 4


def test_compiled_code_is_known_by_what_the_pass_does():
    keys = {FoldPass(None, output, print).uuid() for output in (False, True)}
    keys.add(FoldPass([FoldPass(None, True, print)], True, print).uuid())
    assert len(keys) == 3 and None not in keys
    assert FoldPass(None, True, len).uuid() in keys
    # The code of an unknown pass stays out of caches.
    assert FoldPass([recorder([])], True, print).uuid() is None


def test_other_backends_and_other_pytorchs_fold_nothing_and_say_so(monkeypatch, stepwise):
    """Every PyTorch from 2.9 on has the hook."""
    assert hasattr(torch_private.inductor_joint_config(), OPTION)
    x = random(ROWS, N, dtype=BF16)
    _, report = step(block(), x, backend="aot_eager")
    assert "the backend is not Inductor" in str(report) and not report.folds
    monkeypatch.setattr("tilenorm.integrations.compile.inductor_joint_config", lambda: None)
    _, report = step(block(), x, memory="low")
    assert "no joint_custom_post_pass" in str(report) and not report.folds
    assert len(report.replaced) == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs Inductor's compiler")
def test_caches_hit_and_keep_what_was_folded(dynamo):
    """A second run takes its code from the caches; with other options it is other code."""
    x = random(2, ROWS, N)
    results = []
    counters = dynamo.utils.counters
    with fresh_cache():
        nothing = {"where": lambda node: False}
        for options in (nothing, {}, {}, {"memory": "low"}, {"memory": "low"}):
            counters.clear()
            got, report = step(block(dtype=torch.float32), x, **options)
            hits = counters["aot_autograd"]["autograd_cache_hit"]
            results.append((got, hits, len(report.folded)))
    grads, hits, folded = zip(*results, strict=True)
    assert [bool(n) for n in hits] == [False, False, True, False, True]
    # Of a LayerNorm in float32 no output is written again.
    assert folded == (0, 3, 0, 4, 0)
    for other in grads[2:]:
        assert all(torch.equal(other[name], grad) for name, grad in grads[1].items())
    module = block(dtype=torch.float32)
    dy = random(*x.shape, seed=9)
    expected = torch.autograd.grad(module(x), list(module.parameters()), dy)
    for (name, _), grad in zip(module.named_parameters(), expected, strict=True):
        atol = 1e-4 * grad.abs().max().item()
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=atol)


WIDTH = 64
SIZES = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "head_dim": 16, "pad_token_id": 0}
# Additions of two gradients of rows, without and with folding; norms whose output is not saved with
# low memory; and parts of the names of the parameters whose gradients are rounded once where dx and
# another are added.
MODELS = {
    "llama": (7, 0, 4, ("embed",)),
    "gemma3_text": (7, 0, 4, ("embed",)),
    # The sum is the gradient of a norm's output and of what was added to this output.
    "olmo2": (10, 10, 0, ()),
    # Each layer adds the gradients of two norms of one input.
    "gpt_neox": (3, 0, 4, ("embed", "layers.0")),
    # Three terms come before the gradient of the embedding's norm, behind dropout.
    "bert": (9, 3, 3, ()),
}


def gradients(name: str, **options) -> tuple[dict, object]:
    """The gradients of a compiled model's parameters, and the report."""
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES)
    module = transformers.AutoModel.from_config(config).bfloat16().train()
    run = tilenorm.compile(module, where=lambda node: True, **options)
    torch.manual_seed(1)  # for dropout
    y = run(input_ids=torch.arange(32).view(2, 16) * 5 % 128)[0]
    y.backward(random(*y.shape, dtype=y.dtype, seed=2))
    named = module.named_parameters()
    return {n: p.grad for n, p in named if p.grad is not None}, run.tilenorm_report


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sums_and_outputs_of_models(name, stepwise, monkeypatch):
    """Which additions of gradients stay in Hugging Face's models, and the gradients' bits."""
    before, after, outputs, rounded = MODELS[name]
    found, _ = gradients(name)
    assert len(sums(stepwise.backward[-1].graph, WIDTH)) == after
    saved = stepwise.saved
    stepwise.forward.clear()
    low, report = gradients(name, memory="low")
    assert [kind for kind, _ in report.folded].count("output") == outputs
    assert stepwise.saved == saved - outputs * 32 * WIDTH * BF16.itemsize
    monkeypatch.setattr(joint, "fold_sums", lambda graph, output: Folds())
    plain, _ = gradients(name)
    assert len(sums(stepwise.backward[-1].graph, WIDTH)) == before
    for n, grad in plain.items():
        assert torch.equal(low[n], found[n]), n
        if not any(part in n for part in rounded):
            assert torch.equal(found[n], grad), n
        torch.testing.assert_close(found[n], grad, rtol=2**-5, atol=2**-5 * grad.abs().max().item())
