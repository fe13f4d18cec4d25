"""What quantised norms refuse, what serves in their place, and who else sees their calls."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tilenorm
from tests.quantized import HOWS, arguments, check
from tilenorm.launch import plan
from tilenorm.launch.config import Hints, SharedForward
from tilenorm.launch.plan import ForwardPlan
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools.explain import explain_spec, planned_device

from .helpers import random
from .pretended import pretended_gpu

X = torch.ones(3, 128)


def test_transforms_are_refused():
    with pytest.raises(NotImplementedError, match="quantise what tilenorm"):
        torch.vmap(lambda x: tilenorm.rms_norm_quantized(x, (128,), scaling="row").q)(X[None])


@pytest.mark.parametrize(
    "arch, op, hidden, reason",
    [
        ("sm_80", "rms_norm", 128, "sm_80: cuTile has no 8-bit floats before sm_90"),
        ("sm_90", "add_layer_norm", 10240, "would add up these rows in another order"),
    ],
)
def test_a_cast_follows_the_plain_norm(arch, op, hidden, reason):
    """Its kernels give y, whose bits q has. No warning says so, but `explain` does."""
    rows = [random(3, hidden, dtype=torch.bfloat16, seed=i) for i in range(1 + ("add" in op))]
    given = {"eps": 1e-6, "backend": "cutile"}
    with pretended_gpu(arch), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = getattr(tilenorm, op)(*rows, (hidden,), **given)
        y, total = plain if len(rows) > 1 else (plain, None)
        for how in (HOWS[0], HOWS[2]):
            asked = arguments(how)
            found = getattr(tilenorm, f"{op}_quantized")(*rows, (hidden,), **given, **asked)
            check(how, found, y, hidden, asked["scale"])
            assert total is None or torch.equal(found.residual_out, total)
    spec = NormSpec.of(f"{op}_quantized", hidden, "bfloat16", quantized=HOWS[0])
    found = explain_spec(spec, 100, planned_device(arch))
    assert found.chosen == "cutile" and reason in found.forward_source
    assert [step.kernel for step in found.forward] == ["row_forward"]


def test_segments_that_cut_groups(monkeypatch):
    config, target = SharedForward(Hints(), (64,)), Target.of("sm_90")
    monkeypatch.setattr(plan.heuristics, "chosen", lambda *_: config)
    spec = NormSpec("rms", 256, "bfloat16", quantized=HOWS[2])
    apart = ForwardPlan(spec, target, config, True)
    assert "cuts groups of 128 elements" in apart.casts_apart
    assert plan.plan_forward.__wrapped__(spec, target, True).spec == spec.unquantized
    assert replace(apart, spec=replace(spec, quantized=HOWS[5])).casts_apart is None


def test_a_mode_sees_the_call():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    class Sub(torch.Tensor):
        pass

    y = X.as_subclass(Sub)
    found = tilenorm.add_rms_norm_quantized(y, X, (128,), eps=1.0, scaling="block")
    assert type(found.q) is Sub
    with Mode():
        tilenorm.rms_norm_quantized(X, (128,), scaling="row")
    assert torch.ops.tilenorm.rms_norm_quantized in seen
