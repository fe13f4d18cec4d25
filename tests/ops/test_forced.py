"""tilenorm.launch.forced: one configuration serves the calls of a block, and no call after it."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

import tilenorm
from tests.support.calls import random
from tests.support.cases import target
from tests.support.pretended import pretended_gpu
from tests.support.uses import of_kernels
from tilenorm.launch import forced
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.config import Backward, Hints, RopeForward, RowForward
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import OPS, ROTATED_NORMS
from tilenorm.tools.explain import explain_spec, planned_device

B = torch.bfloat16
ONE_ROW = RowForward(rows=1)
ONE_HEAD = RopeForward(rows=1, tiles=1)


@contextmanager
def recorded():
    """A list of all launches of the block, of first calls and of those that repeat others."""
    seen = []
    first, again = cutile.launch, cutile.prepare

    def launch(stream, launches, arrays):
        seen.extend(launches)
        return first(stream, launches, arrays)

    def prepare(index, stream, launches, *how):
        repeat = again(index, stream, launches, *how)

        def repeated(*given):
            seen.extend(launches)
            return repeat(*given)

        return repeated

    with patch.object(cutile, "launch", launch), patch.object(cutile, "prepare", prepare):
        yield seen


def launches_of(call, seen: list) -> list:
    """What each of three calls launches: the first, one that prepares, and one that repeats."""
    taken = []
    for _ in range(3):
        seen.clear()
        call()
        taken.append([(launch.kernel, launch.grid, launch.after) for launch in seen])
    assert taken[0] and taken.count(taken[0]) == 3
    return taken[0]


@pytest.mark.parametrize("name", OPS)
def test_every_op_runs_with_the_configuration_and_then_with_its_own_again(name, in_python):
    use = of_kernels(name)
    function, rows = use.bound(use.tensors((B, B), "cpu"))
    call = partial(function, *rows)
    with pretended_gpu(), torch.no_grad(), recorded() as seen:
        before = launches_of(call, seen)
        with forced(ONE_HEAD if name in ROTATED_NORMS else ONE_ROW):
            inside = launches_of(call, seen)
        assert launches_of(call, seen) == before != inside


def test_a_backward_pass_has_the_configuration(in_python):
    use = of_kernels("rms_norm")
    function, rows = use.bound(use.tensors((B, B), "cpu"))

    def step():
        function(*rows)["output"].sum().backward()

    with pretended_gpu(), recorded() as seen:
        before = launches_of(step, seen)
        with forced(Backward((256,), hints=Hints(1))):
            inside = launches_of(step, seen)
        assert launches_of(step, seen) == before != inside
    assert inside[0] == before[0]  # the forward pass has no configuration of a backward pass


def test_the_inner_of_two_blocks_serves():
    spec, sm_90 = NormSpec("rms", 256, "bfloat16", "bfloat16"), target("sm_90")
    of_two = RowForward(rows=2)
    backward = Backward((256,), hints=Hints(3))
    own = plan_forward(spec, sm_90, True).config
    with forced(ONE_ROW), forced(backward):
        with forced(of_two):
            assert plan_forward(spec, sm_90, True).config == of_two
        assert plan_forward(spec, sm_90, True).config == ONE_ROW
    assert plan_forward(spec, sm_90, True).config == own
    assert plan_backward(spec, sm_90, every_gradient(spec)).config != backward


def test_explain_says_that_a_configuration_is_forced():
    spec = NormSpec("rms", 256, "bfloat16", "bfloat16")
    with forced(ONE_ROW):
        told = explain_spec(spec, 100, planned_device("sm_90"))
    assert told.forward_source == "forced" != told.backward_source


WRONG = {
    "too narrow": (RowForward(widths=(128,)), "widths .* do not fit a row of 256"),
    "no power of two": (RowForward(rows=3), "rows 3 is not a power of two"),
    "of other kernels": (ONE_HEAD, "RopeForward is for other kernels"),
}


@pytest.mark.parametrize("config, reason", WRONG.values(), ids=WRONG)
def test_a_configuration_that_cannot_serve_raises_and_launches_nothing(config, reason):
    x = random(4, 256, dtype=B)
    message = f"rms_norm: the argument 'config' of tilenorm.launch.forced .* got {type(config)}"
    message = message.replace(str(type(config)), type(config).__name__)
    with pretended_gpu(), recorded() as seen, forced(config):
        with pytest.raises(ValueError, match=f"{message}.*: {reason}"):
            tilenorm.rms_norm(x, (256,))
        assert not seen
    with pretended_gpu(), recorded() as seen:
        tilenorm.rms_norm(x, (256,))
        assert seen


def test_what_is_no_configuration_is_refused():
    refused = pytest.raises(TypeError, match=r"argument .config. takes one of RowForward, .* int")
    with refused, forced(3):
        pass


@pytest.mark.parametrize("quantized", [None, "row"])
def test_small_batches_have_no_variant_of_a_forced_configuration(quantized):
    config, shape = RowForward(64, Hints(2)), (1, 1 << 20)
    spec = NormSpec("layer", 256, "bfloat16", "bfloat16", "bfloat16")
    if quantized:
        spec = replace(spec, quantized=Quantization(quantized))
    tabled = plan_forward(spec, target("sm_90"), False)
    with forced(config):
        plan = plan_forward(spec, target("sm_90"), False)
        assert plan.config == config != tabled.config
        small, large = (plan.launches(rows, 1e-6)[-1] for rows in shape)
        assert small.kernel is large.kernel
