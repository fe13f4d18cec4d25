"""What quantised norms refuse, what serves in their place, and who else sees their calls."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tilenorm
from tests.quantized import HOWS
from tilenorm.launch.config import Hints, SharedForward
from tilenorm.ops import registry
from tilenorm.spec import NormSpec

from .pretended import pretended_gpu

X = torch.ones(3, 128)
WRONG = {
    "scaling": (ValueError, {"scaling": "column"}, r"'scaling' takes 'row' or .*, got 'column'"),
    "no word": (ValueError, {"scaling": 1}, r"'scaling' takes 'row' or .*, got 1"),
    "dtype": (
        NotImplementedError,
        {"dtype": torch.float16},
        r"'dtype' takes torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16",
    ),
    "layout": (
        ValueError,
        {"layout": "swizzled"},
        r"'layout' takes 'row' with scaling='row', got 'swizzled'",
    ),
    "power of 2": (
        ValueError,
        {"scaling": "mx", "power_of_2": True},
        r"'power_of_2' takes no True with scaling='mx': its scales are powers of two always",
    ),
    "flag": (TypeError, {"return_amax": 1}, r"'return_amax' takes a bool, got int"),
    "scale": (ValueError, {"scale": X[0, :1]}, r"'scale' takes None with scaling='row'"),
    "no scale": (
        TypeError,
        {"scaling": "tensor"},
        r"'scale' takes a Tensor of one float32 with scaling='tensor', got NoneType",
    ),
    "scales": (
        RuntimeError,
        {"scaling": "tensor", "scale": X[0]},
        r"'scale' takes one torch.float32 on cpu, got \[128\] torch.float32 on cpu",
    ),
    "weight": (RuntimeError, {"weight": X[:2]}, r"'weight' takes the shape of normalized_shape"),
    "backend": (ValueError, {"backend": "tile"}, r"backend: got 'tile', takes one of"),
}


@pytest.mark.parametrize("error, given, match", WRONG.values(), ids=WRONG)
def test_wrong_arguments(error, given, match):
    with pytest.raises(error, match=match):
        tilenorm.rms_norm_quantized(X, (128,), **{"scaling": "row"} | given)


@pytest.mark.parametrize("scaling, group", [("block", 128), ("mx", 32)])
def test_rows_are_whole_groups(scaling, group):
    match = f"takes a multiple of {group} elements with scaling='{scaling}', got 120"
    with pytest.raises(RuntimeError, match=match):
        tilenorm.layer_norm_quantized(X[:, :120], (120,), scaling=scaling)


def test_transforms_and_nested_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="quantise what tilenorm"):
        torch.vmap(lambda x: tilenorm.rms_norm_quantized(x, (128,), scaling="row").q)(X[None])
    nested = torch.nested.nested_tensor([X, X], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="'input' takes no nested tensor"):
        tilenorm.rms_norm_quantized(nested, (128,), scaling="row")


def test_an_architecture_without_8_bit_floats(no_memory):
    with pretended_gpu("sm_80"), pytest.warns(tilenorm.ReferenceWarning, match="no 8-bit floats"):
        expected = tilenorm.rms_norm_quantized(X, (128,), scaling="row", backend="reference")
        assert torch.equal(tilenorm.rms_norm_quantized(X, (128,), scaling="row").q, expected.q)
    with pretended_gpu("sm_80"), pytest.raises(RuntimeError, match="no 8-bit floats before sm_90"):
        tilenorm.rms_norm_quantized(X, (128,), scaling="row", backend="cutile")


def test_segments_that_cut_groups_are_refused(monkeypatch):
    config = SharedForward(Hints(), (64,))
    monkeypatch.setattr(registry.heuristics, "forward", lambda *_: config)
    spec = NormSpec("rms", 256, "bfloat16", quantized=HOWS[2])
    device = registry.Device("cuda", registry.Target.of("sm_90"), 13000)
    assert "cuts groups of 128 elements" in registry.cutile_refuses(spec, 1, device)
    assert registry.quantized_refused(replace(spec, quantized=HOWS[5]), device.target) is None


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
    assert torch.ops.tilenorm.norm_quantized in seen
