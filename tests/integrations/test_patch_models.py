"""Patched models with random weights: outputs, gradients, saved models.

The error of a patched model may be twice the error of the original model. Both errors are measured
against a run in float64.
"""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tilenorm

from ..ops.helpers import EACH_DEVICE, name_of, slow
from ..tolerance import TIMES_TORCH
from .model_rows import MODELS, TRANSFORMERS, built, step

BF16, F32 = torch.bfloat16, torch.float32
# With residual, modulation and rotation: how many calls compute more than a norm.
PASSES = {"llama": 2, "qwen3": 4, "gemma3_text": 4, "olmo2": 2, "bert": 4, "flux": 6, "lumina2": 5}
PASSES |= {"gemma2": 2, "gpt_neox": 0, "wan": 3}


class InFloat64(TorchFunctionMode):
    """Turns every cast to float32 inside a model into a cast to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in (kwargs or {}).items()}
        return function(*args, **kwargs)


def errors(results: dict[str, Tensor], truth: dict[str, Tensor], dtype) -> dict[str, float]:
    """The error of each tensor in the 2-norm, relative to the norm of the true tensor.

    The error of a gradient that is nearly zero is relative to the largest gradient's norm. The
    gradient of attention's key bias is such a gradient: its terms add up to 0.
    """
    gradients = max(t.norm() for n, t in truth.items() if n != "outputs")
    result = {}
    for name, tensor in truth.items():
        size = tensor.norm()
        if name != "outputs" and size < torch.finfo(dtype).eps * gradients:
            size = gradients
        result[name] = ((results[name].cpu() - tensor).norm() / size).item()
    return result


def assert_as_exact(patched, original, truth, dtype):
    """The budget of a gradient is twice the largest error of the original model's gradients."""
    patched_errors, original_errors = (errors(r, truth, dtype) for r in (patched, original))
    for names in (["outputs"], [n for n in truth if n != "outputs"]):
        budget = TIMES_TORCH * max(original_errors[n] for n in names)
        over = {n: patched_errors[n] for n in names if not patched_errors[n] <= budget}
        assert not over, f"errors over the budget of {budget:.2g}: {over}"


def each_model(*quick: str):
    return pytest.mark.parametrize("name", [*quick, *slow(*(m for m in MODELS if m not in quick))])


def check(name, device, dtype, prepare=lambda model: model, autocast=False, **options):
    """Compare a patched model with the original. prepare: maps the patched model to what runs.
    options: of patch.
    """
    model = built(name).to(device, dtype)
    with InFloat64():
        truth = step(copy.deepcopy(model).cpu().double(), name)
    with torch.autocast(device, BF16, enabled=autocast):
        original = step(model, name)
        tilenorm.patch(model, **options)
        patched = step(model, name, prepare(model))
    assert {n: t.dtype for n, t in patched.items()} == {n: t.dtype for n, t in original.items()}
    assert_as_exact(patched, original, truth, dtype)


@pytest.mark.any_torch
@EACH_DEVICE
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@each_model("llama", "gemma3_text", "bert", "flux")
def test_outputs_and_gradients(name, dtype, device):
    check(name, device, dtype)


@pytest.mark.any_torch
@EACH_DEVICE
@pytest.mark.parametrize("name", ["llama", "flux", *slow("qwen3", "gemma3_text", "gpt_neox")])
def test_outputs_and_gradients_under_autocast(name, device):
    check(name, device, F32, autocast=True)


@pytest.mark.parametrize("dtype", [BF16, *slow(F32)], ids=name_of)
@each_model("qwen3", "gemma3_text", "olmo2", "bert", "wan")
def test_more_in_the_pass_of_a_norm(name, dtype, passes):
    check(name, "cpu", dtype, residual=True, modulation=True, rotation=True)
    assert len(passes) == PASSES[name]


@EACH_DEVICE
@pytest.mark.parametrize("name", ["qwen3", *slow(*(n for n in TRANSFORMERS if n != "qwen3"))])
def test_compiled(name, device, dynamo):
    dtype, backend = (BF16, "inductor") if device == "cuda" else (F32, "aot_eager")
    check(name, device, dtype, partial(torch.compile, fullgraph=True, backend=backend))
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
