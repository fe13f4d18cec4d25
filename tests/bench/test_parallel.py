"""``bench train --parallel``: both variants over the same shards, with gloo at a tiny size."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import tilenorm
from bench import pair, parallel, provenance, report, train
from bench.pair import Settings, model_of
from bench.shapes import LLAMA, MODELS, tiny
from tests.support.pretended import GPU
from tilenorm.ops.passes import registry
from tilenorm.ops.torch_ops.sharded_rows import SHARDED
from tilenorm.spec import NormSpec

from ..distributed.world import device, mesh, on_every_rank

FOREVER = float("inf")
SPLIT = (LLAMA, "Qwen3 8B", "OLMo 2 7B")  # the models that tensor parallelism is for


def settings_of(fsdp: int, tp: int, model: str = LLAMA, **options) -> Settings:
    shape = replace(tiny(MODELS[model]), kv_heads=4)
    return Settings(shape, model, fsdp=fsdp, tp=tp, device=device(), **options)


@pytest.mark.slow
@on_every_rank
def test_a_pair_over_a_mesh():
    """All ranks have the same fields, with losses as one process has them, the same in each run."""
    given, tp = settings_of(2, 2, deterministic=True), 2
    found = pair.measure(["eager", "patch-add"], given, 2, FOREVER)
    assert found["gpus"] == len(found["ranks"]) == 4 and len(found["pairs_us"]) == 2
    assert found["gradient_change"] < 0.02
    own = torch.tensor(found["ranks"][dist.get_rank()]["pairs_us"])
    assert (own <= torch.tensor(found["pairs_us"])).all()
    assert len({str(each) for each in parallel.of_all(found["pairs_us"])}) == 1
    assert "Block runs the sum" in found["reports"][1]
    again = pair.measure(["eager", "patch-add"], given, 2, FOREVER)
    assert again["losses"] == found["losses"] and again["step_losses"] == found["step_losses"]
    # A loss is of a sample's tokens: the first process of each group has a batch of its own.
    losses = parallel.of_all(found["step_losses"])
    assert [losses[r] == losses[0] for r in range(4)] == [r < tp for r in range(4)]
    assert all(after < before for before, after in zip(losses[0], losses[0][1:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
@on_every_rank
def test_the_losses_are_those_of_one_process(name):
    found = pair.measure(["eager", "patch-add"], settings_of(1, 4, name), 1, FOREVER)["losses"]
    given = settings_of(1, 1, name)
    model = model_of(given.shape, device=device(), dtype=torch.bfloat16)
    (tokens,) = pair.Training(given, model).inputs
    assert found == pytest.approx([model(tokens).item()] * 2, rel=2e-3)


class Seen(torch.nn.Module):
    """In the place of a norm: it keeps how many columns of x a process gets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, device=device()))

    def forward(self, x):
        self.columns = x.to_local().shape[-1]
        return x


@on_every_rank
def test_tilenorms_norm_gets_a_processs_columns():
    own = torch.full((3, 1), float(dist.get_rank()), device=device())
    norm = parallelize_module(Seen(), mesh("4"), parallel.ColumnParallel(gathers=False))
    assert norm.weight.placements == (Shard(0),)
    assert torch.equal(norm(own), own)
    assert norm.columns == 1


@on_every_rank
def test_pytorchs_norm_gets_whole_rows():
    """It returns a process's columns, and the gradients of these."""
    columns = slice(dist.get_rank(), dist.get_rank() + 1)
    weight = torch.arange(1.0, 5.0, device=device()).requires_grad_()
    x = torch.arange(12.0, device=device()).reshape(3, 4).sin().requires_grad_()
    y = F.rms_norm(x, (4,), weight, 1e-6)
    dx, dw = torch.autograd.grad(y, (x, weight), y.detach())
    norm = nn.RMSNorm(4, 1e-6, device=device())
    norm.weight = nn.Parameter(weight.detach())
    norm = parallelize_module(norm, mesh("4"), parallel.ColumnParallel(gathers=True))
    own = x.detach()[:, columns].requires_grad_()
    found = norm(own)
    found.backward(found.detach())
    assert norm.weight.placements == norm.weight.grad.placements == (Shard(0),)
    torch.testing.assert_close(found, y[:, columns])
    torch.testing.assert_close(own.grad, dx[:, columns])
    torch.testing.assert_close(norm.weight.grad.to_local(), dw[columns])


def test_rows_that_are_cut_have_pytorchs_operations(monkeypatch):
    """Whatever else the kernels do not serve raises an error, and is not timed in their place."""
    monkeypatch.setenv("TILENORM_BACKEND", "cutile")
    with warnings.catch_warnings():
        parallel.serve_cut_rows()
        assert registry.requested_backend() is None
        where = "rms_norm", [NormSpec("rms", 64, "bfloat16")], GPU, None
        registry.select_reference(*where, SHARDED)
        with pytest.raises(tilenorm.ReferenceWarning, match="the driver is old"):
            registry.select_reference(*where, "the driver is old")


def test_the_command_serves_rows_that_are_cut_on_a_gpu(monkeypatch):
    """What describes the run asks for the kernels once more."""
    monkeypatch.setenv("TILENORM_BACKEND", "")  # so that what the command sets ends with the test
    monkeypatch.delenv("TILENORM_BACKEND")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(provenance, "describe_run", lambda *_: {"record": "run"})
    monkeypatch.setattr(parallel, "joined", lambda _: nullcontext(0))
    monkeypatch.setattr(report, "render", lambda *_: "")
    asked = []
    monkeypatch.setattr(
        train, "_pairs", lambda *_: asked.append(registry.requested_backend()) or ()
    )
    with warnings.catch_warnings():
        train.main(["--pair", "eager", "patch-add", "--parallel", "tp=1"])
        train.main(["--pair", "eager", "patch-add"])
    assert asked == [None, "cutile"]


def test_rows_that_are_cut_unevenly_are_refused():
    mesh = {"fsdp": SimpleNamespace(size=lambda: 4)}
    model = model_of(replace(tiny(MODELS[LLAMA]), vocab=42), device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="42 rows, which fsdp=4 cuts"):
        parallel.sharded(model, mesh)
