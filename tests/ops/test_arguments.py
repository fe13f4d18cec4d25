"""Bad input raises at once, as PyTorch's functions do, and by name; nothing runs."""

import inspect
import re
import warnings
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

import tilenorm
from tilenorm.launch import plan
from tilenorm.ops import bound, cutile, reference, registry
from tilenorm.ops import call as calls
from tilenorm.table import NORMS

from .helpers import EACH_FORM, NEEDS_GPU, TORCH, call, tensors_of
from .wrong_calls import Wrong, of_functions
from .wrong_uses import of_integrations, of_modules

WRONG = dict([*of_functions(), *of_modules(), *of_integrations()])
PLANS = (bound._bound, plan.plan_forward, plan.plan_backward)


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


def assert_refused(wrong: Wrong, kind: type[Exception]) -> None:
    with nothing_runs(), pytest.raises(Exception) as raised:
        wrong.call()
    assert re.search(wrong.message, str(raised.value), re.DOTALL)
    # PyTorch has either for a dtype or layout: NotImplementedError is a kind of RuntimeError.
    kinds = {kind, NotImplementedError} if kind is RuntimeError else {kind}
    if TORCH < (2, 13) and kind is RuntimeError:
        kinds.add(ValueError)  # what an RMSNorm's input of too few dimensions raises from 2.13 on
    assert raised.type in kinds


def same(a: object, b: object) -> bool:
    a, b = (r if isinstance(r, tuple) else (r,) for r in (a, b))
    pairs = zip(a, b, strict=True)
    return all(x == y if not isinstance(x, torch.Tensor) else equal(x, y) for x, y in pairs)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name, no_memory):
    """Also after a right call, whose plan is remembered. A right call works after a wrong one.
    explain raises the same.
    """
    wrong = WRONG[name]
    kind = expected_type(wrong)
    assert_refused(wrong, kind)
    result = wrong.right()
    assert_refused(wrong, kind)
    assert same(wrong.right(), result)
    if wrong.explained:
        assert_refused(wrong._replace(call=wrong.explained), kind)


def test_there_are_many_wrong_calls():
    assert len(WRONG) > 300
    assert {op for op in NORMS if any(name.startswith(op) for name in WRONG)} == {*NORMS}


@pytest.mark.parametrize("op", NORMS)
def test_by_keyword_alone_beyond_pytorch(op):
    parameters = inspect.signature(getattr(tilenorm, op)).parameters
    inputs = ["input", *(n for n in ("residual", "gate") if n in parameters)]
    pytorch = ["normalized_shape", "weight", *(["bias"] if "layer" in op else []), "eps"]
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == inputs + pytorch
    assert all(p.kind is p.KEYWORD_ONLY for n, p in parameters.items() if n not in positional)


@NEEDS_GPU
@EACH_FORM
def test_what_is_on_another_device(form):
    tensors = tensors_of(form, 3, 8)
    for name in form.names[1:]:
        argument = form.argument if name == form.other else name
        with pytest.raises(RuntimeError, match=rf"'{argument}' takes .* cpu, got cuda:0"):
            call(form, tensors | {name: tensors[name].cuda()})
        elsewhere = {n: t if n == name else t.cuda() for n, t in tensors.items()}
        with pytest.raises(RuntimeError, match=rf"'{argument}' takes .* cuda:0, got cpu"):
            call(form, elsewhere)
