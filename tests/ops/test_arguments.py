"""Bad input raises at once, as PyTorch's functions do, and by name; nothing runs."""

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

import tilenorm
from tests.support.calls import TORCH
from tests.support.pretended import WARM, pretended_gpu
from tests.support.quantized import bits
from tests.support.wrong_calls import Function, Wrong, of_functions, of_integrations, of_modules
from tilenorm.launch import plan
from tilenorm.ops import call as calls
from tilenorm.ops.passes import bound, cutile, reference, registry
from tilenorm.table import NORMS, OPS

FUNCTIONS = dict([*of_functions(), *of_modules(), *of_integrations()])
PLANS = (bound.bound_for, plan.plan_forward, plan.plan_backward)


@contextmanager
def nothing_runs():
    """In this block nothing may be computed, launched, remembered, planned or warned of."""

    def fail(*_, **__):
        raise AssertionError("ran on bad input")

    names = [(cutile, "bind_forward"), (cutile, "bind_backward"), (cutile, "launch")]
    names += [(reference, name) for name in ("bind_forward", "formula", "backward")]
    names += [(calls, "remember"), (registry.warnings, "warn")]
    planned = [cache.cache_info().currsize for cache in PLANS]
    drawn = torch.get_rng_state()
    with ExitStack() as stack:
        for module, name in names:
            stack.enter_context(patch.object(module, name, fail))
        yield
    assert [cache.cache_info().currsize for cache in PLANS] == planned
    assert torch.equal(torch.get_rng_state(), drawn)


def expected_type(wrong: Wrong) -> type[Exception]:
    if isinstance(wrong.expected, type):
        return wrong.expected
    with warnings.catch_warnings(), pytest.raises(Exception) as raised:
        warnings.simplefilter("ignore")
        wrong.expected()
    return raised.type


def problem_of(call: Callable, message: str, kind: type[Exception]) -> str | None:
    """How a wrong call is not refused as it has to be, or None."""
    with nothing_runs():
        try:
            call()
        except Exception as raised:
            error = raised
        else:
            return "is not refused"
    # PyTorch has either for a dtype or layout: NotImplementedError is a kind of RuntimeError.
    kinds = {kind, NotImplementedError} if kind is RuntimeError else {kind}
    if TORCH < (2, 13) and kind is RuntimeError:
        kinds.add(ValueError)  # what an RMSNorm's input of too few dimensions raises from 2.13 on
    right = type(error) in kinds and re.search(message, str(error), re.DOTALL)
    return None if right else f"raises {error!r}, not {kind} of {message!r}"


def problems_of(function: Function, kinds: dict[str, type[Exception]]) -> str:
    """Of all wrong calls of a function, and of explain with the same arguments."""
    calls = [(what, w.call, w.message) for what, w in function.wrong.items()]
    calls += [(what, w.explained, w.message) for what, w in function.wrong.items() if w.explained]
    found = ((what, problem_of(call, message, kinds[what])) for what, call, message in calls)
    return "\n".join(f"{what}: {problem}" for what, problem in found if problem)


def same(a: object, b: object) -> bool:
    a, b = (r if isinstance(r, tuple) else (r,) for r in (a, b))
    pairs = zip(a, b, strict=True)
    return all(
        x == y if not isinstance(x, torch.Tensor) else torch.equal(bits(x), bits(y))
        for x, y in pairs
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_calls(name, no_memory, request):
    """Also after a right call, whose plan is remembered. A right call works after a wrong one."""
    function = FUNCTIONS[name]
    kinds = {what: expected_type(wrong) for what, wrong in function.wrong.items()}
    assert not problems_of(function, kinds)
    result = function.right()
    assert not problems_of(function, kinds)
    assert same(function.right(), result)
    if name in OPS:
        request.getfixturevalue("extension")
        with pretended_gpu():
            results = [function.right() for _ in range(WARM)]
            assert not problems_of(function, kinds)
            assert same(function.right(), results[0])


@pytest.mark.parametrize("op", NORMS)
def test_by_keyword_alone_beyond_pytorch(op):
    parameters = inspect.signature(getattr(tilenorm, op)).parameters
    inputs = ["input", *(n for n in ("residual", "gate") if n in parameters)]
    pytorch = ["normalized_shape", "weight", *(["bias"] if "layer" in op else []), "eps"]
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == inputs + pytorch
    assert all(p.kind is p.KEYWORD_ONLY for n, p in parameters.items() if n not in positional)
