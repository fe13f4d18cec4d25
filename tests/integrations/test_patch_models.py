"""Patched models with random weights: outputs and gradients are those of the original model."""

from functools import partial

import pytest
import torch

import tilenorm
from tests.support.calls import EACH_DEVICE, slow

from .model_rows import MODELS, built, step

BF16, F32 = torch.bfloat16, torch.float32
# With residual, modulation and rotation: how many calls compute more than a norm.
PASSES = {"llama": 1, "qwen3": 2, "gemma3_text": 2, "olmo2": 1, "bert": 2, "flux": 6, "lumina2": 6}
PASSES |= {"gemma2": 1, "gpt_neox": 0, "wan": 3}


def each_model(*quick: str):
    return pytest.mark.parametrize("name", [*quick, *slow(*(m for m in MODELS if m not in quick))])


def check(name, device, dtype, prepare=lambda model: model, autocast=False, **options):
    """prepare: maps the patched model to what runs. options: of patch.

    A gradient may be nearly zero, such as that of attention's key bias, whose terms add up to 0.
    """
    model = built(name).to(device, dtype)
    with torch.autocast(device, BF16, enabled=autocast):
        expected = step(model, name)
        tilenorm.patch(model, **options)
        got = step(model, name, prepare(model))
    unit = 2**-4 if autocast or dtype == BF16 else 1e-4
    largest = max(t.abs().max().item() for n, t in expected.items() if n != "outputs")
    for n, like in expected.items():
        atol = unit * (like.abs().max().item() if n == "outputs" else largest)
        assert got[n].dtype == like.dtype
        torch.testing.assert_close(got[n], like, rtol=unit, atol=atol)


@pytest.mark.any_torch
@EACH_DEVICE
@pytest.mark.parametrize("dtype, autocast", [(F32, False), *slow((BF16, False), (F32, True))])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "flux"])
def test_outputs_and_gradients(name, dtype, autocast, device):
    check(name, device, dtype, autocast=autocast)


@each_model("qwen3", "gemma3_text", "bert", "wan")
def test_more_in_the_pass_of_a_norm(name, passes):
    dtype = F32 if name in ("gemma2", "bert", "lumina2") else BF16
    check(name, "cpu", dtype, residual=True, modulation=True, rotation=True)
    assert len(passes) == PASSES[name]


@EACH_DEVICE
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_compiled(name, device, dynamo):
    dtype, backend = (BF16, "inductor") if device == "cuda" else (F32, "aot_eager")
    check(name, device, dtype, partial(torch.compile, fullgraph=True, backend=backend))
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
