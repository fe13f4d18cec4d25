"""tilenorm.compile with Inductor: sums folded into gradients, and outputs that are not saved."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support.calls import EPS, SLOW, random
from tilenorm.integrations import joint
from tilenorm.integrations.compile import OPTION
from tilenorm.integrations.fx import Folds
from tilenorm.integrations.joint import FoldPass
from tilenorm.ops.pytorch import torch_private

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


def block(kind=Block, dtype=BF16) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


def model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": N, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "head_dim": N // 4, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes)
    return transformers.AutoModel.from_config(config).to(BF16).train()


def step(module: nn.Module, x: Tensor, **options) -> tuple[dict[str, Tensor], object]:
    """The output of a compiled module, the gradients of its parameters and of x, and the report."""
    torch._dynamo.reset()
    torch.manual_seed(1)  # for dropout
    named = dict(module.named_parameters())
    if x.is_floating_point():
        named["input"] = x = x.detach().requires_grad_()
    run = tilenorm.compile(module, **options)
    y = run(x)
    y = y if isinstance(y, Tensor) else y[0]
    dy = random(*y.shape, dtype=y.dtype, seed=9)
    grads = torch.autograd.grad(y, list(named.values()), dy, materialize_grads=True)
    return dict(zip(named, grads, strict=True)) | {"output": y.detach()}, run.tilenorm_report


FOLDED = ["2 terms", "3 terms", "sum"]
X = random(2, ROWS, N, dtype=BF16)
# Additions of two gradients of rows, without and with folding; norms whose output is not saved with
# low memory; and parts of the names of the parameters whose gradients are rounded once where dx and
# another are added.
MODELS = {
    "block": (4, 0, 2, ("input",)),
    "checkpointed": (5, 1, 0, ("input",)),  # the forward pass, computed again, has one
    # The sum is the gradient of a norm's output and of what was added to this output.
    "olmo2": (10, 10, 0, ()),
    # Each layer adds the gradients of two norms of one input.
    "gpt_neox": (3, 0, 4, ("embed", "layers.0")),
}
BLOCKS = {"block": Block, "checkpointed": Checkpointed}
NAMES = [name if name == "block" else pytest.param(name, marks=SLOW) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_take_over_the_sums(name, stepwise, monkeypatch):
    """With low memory the outputs are not saved. The gradients have the same bits."""
    before, after, outputs, rounded = MODELS[name]
    module = block(BLOCKS[name]) if name in BLOCKS else model(name)
    x = X if name in BLOCKS else torch.arange(32).view(2, 16) * 5 % 128
    found, report = step(module, x)
    assert len(sums(stepwise.backward[-1].graph, N)) == after
    assert ("sum" in [kind for kind, _ in report.folded]) == bool(rounded)
    saved, again = stepwise.saved, sum(counted(stepwise.backward[-1].graph, op) for op in NORMS)
    assert again == 2 * (name == "checkpointed")  # its forward pass keeps its tags
    assert ("." in report.replaced[0][1]) == (name == "checkpointed")  # the subgraph's name
    stepwise.forward.clear()
    low, report = step(module, x, memory="low")
    assert [kind for kind, _ in report.folded].count("output") == outputs
    assert stepwise.saved == saved - outputs * x.shape[0] * x.shape[1] * N * BF16.itemsize
    written = stepwise.backward[-1].graph.find_nodes(op="call_function", target=NORM_BACKWARD)
    assert [argument(call, "output") for call in written].count(True) == outputs
    stepwise.forward.clear()
    monkeypatch.setattr(joint, "fold_sums", lambda graph, output: Folds())
    plain, report = step(module, x)
    assert len(sums(stepwise.backward[-1].graph, N)) == before and not report.folded
    assert stepwise.saved == saved
    for n, grad in plain.items():
        assert torch.equal(low[n], found[n]), n
        if not any(part in n for part in rounded):
            assert torch.equal(found[n], grad), n
        torch.testing.assert_close(found[n], grad, rtol=2**-5, atol=2**-5 * grad.abs().max().item())


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
        _, report = step(block(), X, **options)
    assert [kind for kind, _ in report.folded] == FOLDED
    assert not report.unfolded and report.not_folding is None
    assert "joint graph 0: 3 folds, 0 not folded" in str(report)
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
    _, report = step(block(), X, backend="aot_eager")
    assert "the backend is not Inductor" in str(report) and not report.folds
    monkeypatch.setattr("tilenorm.integrations.compile.inductor_joint_config", lambda: None)
    _, report = step(block(), X, memory="low")
    assert "no joint_custom_post_pass" in str(report) and not report.folds
    assert len(report.replaced) == 2
