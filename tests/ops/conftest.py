import warnings

import pytest

import tilenorm
from tilenorm.launch import plan, toolchain
from tilenorm.ops import cutile, dispatch, plans, reference, registry

from .pretended import pretended_gpu

CACHES = (
    registry._select,
    registry._told,
    registry.failures,
    registry.device_of,
    toolchain.compiler_problem,
    toolchain.toolkit_problem,
    plans._runner,
    dispatch.remembered,
    plan.plan_forward,
    plan.plan_backward,
)


@pytest.fixture
def no_memory():
    """What was decided before the test is forgotten, and so is what the test decides."""
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def as_on_a_gpu(device, no_memory):
    """On a CPU, its tensors take CUDA's path."""
    if device == "cuda":
        yield
    else:
        with pretended_gpu():
            yield


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """These tests choose the backend themselves, and know that the reference runs on the CPU."""
    monkeypatch.delenv("TILENORM_BACKEND", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tilenorm.ReferenceWarning)
        yield


@pytest.fixture
def gradients_made(no_memory, monkeypatch):
    """A list that gets, for each backward pass, the names of what gradients were computed of."""
    made = []
    names = ("input", "residual", "gate", "weight", "bias")

    def spy(function):
        def call(*args, **kwargs):
            outputs = function(*args, **kwargs)
            made.append({n for n, t in zip(names, outputs, strict=True) if t is not None})
            return outputs

        return call

    for module in (cutile, reference):
        monkeypatch.setattr(module, "backward", spy(module.backward))
    return made
