"""Layers that are compared alone: what 8-bit floats change of a gradient, and what errors do."""

from dataclasses import asdict, replace

import pytest
import torch

from bench import models, pair
from bench.gradients import LEAST_SIZE, MOST_CHANGE_ALONE, compared_by_layer, input_change
from bench.models import NormLinear
from bench.shapes import LLAMA, MODELS, tiny
from bench.step import Settings, Training, made
from bench.variants import VARIANTS, prepared, twin

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
VARIANTS_IN_EIGHT_BITS = [name for name, variant in VARIANTS.items() if variant.linear]


@pytest.fixture(autouse=True)
def llamas_gain(monkeypatch):
    """A projection makes as much of its input as with 4096 columns of Llama's weights."""
    gain = models.INITIAL_DEVIATION * 4096**0.5
    monkeypatch.setattr(models, "INITIAL_DEVIATION", gain / settings().shape.hidden ** 0.5)


def settings() -> Settings:
    model = tiny(MODELS[LLAMA])
    shape = replace(model.shape, fused=True)
    return Settings(shape, LLAMA, model.batch, model.length, device="cpu", warm_up=1)


def training() -> Training:
    given = settings()
    model = made(given)
    model.reset(0)
    return Training.of(model, given)


def eager(start: Training, name: str):
    """The model of a variant, without its compiler."""
    return prepared(twin(start.model), replace(VARIANTS[name], compiler=None), False).call


class WithoutItsInput(NormLinear):
    def forward(self, x):
        return super().forward(x.detach())


@pytest.mark.parametrize("name", VARIANTS_IN_EIGHT_BITS)
def test_steps_in_eight_bits_change_each_layer_by_percents(name):
    start = training()
    found = compared_by_layer(start, [eager(start, "eager"), eager(start, name)])
    assert 0.01 < found["gradient_change"] < 0.2 < MOST_CHANGE_ALONE
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.02)
    assert all(p.grad is None for p in start.model.parameters())


def test_two_steps_in_eight_bits_are_closer_to_each_other():
    start = training()
    models = {name: eager(start, name) for name in ("eager", *VARIANTS_IN_EIGHT_BITS)}
    plain, *eights = models.values()
    change = compared_by_layer(start, eights)["gradient_change"]
    assert 0 < change < compared_by_layer(start, [plain, eights[0]])["gradient_change"]


def test_equal_layers_have_no_change_and_the_head_is_one():
    start = training()
    model = eager(start, "eager")
    assert compared_by_layer(start, [model, model])["gradient_change"] == 0
    other = twin(model)
    other.head.register_forward_hook(lambda head, given, loss: loss * 2)
    found = compared_by_layer(start, [model, other])
    assert found["gradient_change"] == pytest.approx(1)
    assert found["gradient"].startswith("head")


@pytest.mark.parametrize("part", ["attention.qkv", "ffn.gate_up"])
def test_gradient_that_is_left_out_of_a_layer_is_found_there(part):
    start = training()
    other = eager(start, "eager")
    other.blocks[0].get_submodule(part).__class__ = WithoutItsInput
    found = compared_by_layer(start, [eager(start, "eager"), other])
    assert found["gradient_change"] > MOST_CHANGE_ALONE
    assert found["gradient"].startswith("blocks.0")


def test_gradient_of_an_input_is_compared_without_what_the_residual_passes_on():
    passed, added = torch.tensor([30.0, 40.0]), torch.tensor([6.0, 8.0])
    assert input_change(passed + added, passed, passed) == pytest.approx(1)
    assert input_change(added, added * 1.25, None) == pytest.approx(0.25)
    changed = passed + torch.tensor([0.5, 0.0])
    assert input_change(passed, changed, passed) == pytest.approx(0.5 / (LEAST_SIZE * 50))
    assert input_change(torch.zeros(2), torch.zeros(2), None) == 0


def test_pair_with_a_wrong_layer_is_not_timed(monkeypatch):
    wrong = replace(VARIANTS["rows-compile"], compiler=None, linear=left_without_its_input)
    monkeypatch.setattr(pair, "VARIANTS", VARIANTS | {"wrong": wrong})
    found = pair.measure(["eager", "wrong"], asdict(settings()), 2, float("inf"))
    assert found["status"] == "wrong" and found["layers_alone"] and "pairs_us" not in found
    assert f"more than {MOST_CHANGE_ALONE}" in found["error"]


def left_without_its_input(both: NormLinear) -> NormLinear:
    both.__class__ = WithoutItsInput
    return both
