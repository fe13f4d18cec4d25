from functools import partial

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from bench import timing


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    normed = F.rms_norm(input, normalized_shape, None, eps)
    return normed if weight is None else normed * weight


def _gated(norm):
    return lambda input, gate, *rest: norm(input, *rest) * F.silu(gate)


def _of_sum(norm):
    def add_norm(input, residual, *rest):
        total = input + residual
        return norm(total, *rest), total

    return add_norm


def _added_to(norm):
    return lambda input, residual, *rest: residual + norm(input, *rest)


_STAND_INS = {
    "rms_norm": _rms_norm,
    "layer_norm": F.layer_norm,
    "add_rms_norm": _of_sum(_rms_norm),
    "add_layer_norm": _of_sum(F.layer_norm),
    "rms_norm_add": _added_to(_rms_norm),
    "layer_norm_add": _added_to(F.layer_norm),
    "gated_rms_norm": _gated(_rms_norm),
    "gated_layer_norm": _gated(F.layer_norm),
}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """On the CPU, time the host with few calls and without warming up: no test uses the value."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
        monkeypatch.setattr(timing, "host", partial(timing.host, samples=2, calls=2))


@pytest.fixture
def graphs(monkeypatch) -> list:
    """The graphs that torch.compile and tilenorm.compile make. They run as they are."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for module in (torch, tilenorm):
        monkeypatch.setattr(module, "compile", partial(module.compile, backend=backend))
    return found


@pytest.fixture
def stand_in(monkeypatch):
    """PyTorch in place of tilenorm: these tests are about the bench."""
    for name, function in _STAND_INS.items():
        monkeypatch.setattr(tilenorm, name, function, raising=False)
    monkeypatch.setattr(tilenorm, "__version__", "0.0", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"
