"""``bench train --parallel``: both variants over the same shards, with gloo at a tiny size."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bench import pair, parallel
from bench.pair import Settings, model_of
from bench.shapes import LLAMA, MODELS, tiny

from ..distributed.world import device, on_every_rank

FOREVER = float("inf")


def settings_of(fsdp: int, tp: int, **options) -> Settings:
    shape = replace(tiny(MODELS[LLAMA]), kv_heads=4)
    return Settings(shape, LLAMA, fsdp=fsdp, tp=tp, device=device(), **options)


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
@on_every_rank
def test_the_losses_are_those_of_one_process():
    found = pair.measure(["eager", "patch"], settings_of(1, 4), 1, FOREVER)["losses"]
    given = settings_of(1, 1)
    model = model_of(given.shape, device=device(), dtype=torch.bfloat16)
    (tokens,) = pair.Training(given, model).inputs
    assert found[0] == pytest.approx(model(tokens).item(), rel=2e-3)


def test_rows_that_are_cut_unevenly_are_refused():
    mesh = {"fsdp": SimpleNamespace(size=lambda: 4)}
    model = model_of(replace(tiny(MODELS[LLAMA]), vocab=42), device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="42 rows, which fsdp=4 cuts"):
        parallel.sharded(model, mesh)
