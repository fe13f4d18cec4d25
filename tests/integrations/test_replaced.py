"""tilenorm.patch and undo where hooks store a module's forward before or after, and put it back."""

import copy
import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilenorm
from tests.support.calls import TORCH, random
from tilenorm.integrations.patch.classes import UNREACHED, PatchedModule
from tilenorm.ops import functional

from . import norms
from .norms import N

HIDDEN = {}  # a place where nobody looks


class Manager:
    """An object that keeps a forward, and calls it in a method or when it is called."""

    def __init__(self, inner):
        self.kept = {"inner": inner}

    def run(self, x):
        return self.kept["inner"](x)

    __call__ = run


def in_an_attribute(module, inner, name):
    vars(module)[name] = inner
    call = functools.partial(lambda m, x: getattr(m, name)(x), module)  # as Accelerate does
    return functools.update_wrapper(call, inner), lambda: vars(module).pop(name)


def in_an_object(module, inner, name):
    kept = SimpleNamespace(forward=inner)
    call = functools.partial(lambda m, x: kept.forward(x), module)  # as diffusers does
    return call, lambda: kept.forward


def in_a_closure(module, inner, name):  # as the tensor parallelism of Hugging Face does
    return lambda x: inner(x), lambda: inner


def as_a_partial(module, inner, name):
    call = functools.partial(inner)  # that of a partial is a copy, and nothing leads to the partial
    return call, lambda: call if isinstance(inner, functools.partial) else call.func


def in_an_argument(module, inner, name):
    call = functools.partial(lambda first, x: first(x), inner)
    return call, lambda: call.args[0]


def in_a_method(module, inner, name):
    manager = Manager(inner)
    return manager.run, lambda: manager.kept["inner"]


def in_a_callable(module, inner, name):
    manager = Manager(inner)
    return manager, lambda: manager.kept["inner"]


def hidden(module, inner, name):
    HIDDEN[name] = inner
    return lambda x: HIDDEN[name](x), lambda: HIDDEN.pop(name)


class OwnSetattr(nn.LayerNorm):
    def __setattr__(self, name, value):
        assert name != "__class__", "this class has its own way to set attributes"
        super().__setattr__(name, value)


WAYS = [in_an_attribute, in_an_object, in_a_closure, as_a_partial, in_an_argument, in_a_method]
WAYS += [in_a_callable]
NORMS = {"Hugging Face's": norms.Custom, "PyTorch's": lambda: OwnSetattr(N)}
STEPS = [*WAYS, hidden, *("patch", "undo", "unpatch", "back") * 3]


def runs_tilenorm(module: nn.Module) -> tuple[bool, Tensor]:
    """Whether a module computes a norm by tilenorm, and its output."""
    names = [f"{added}{norm}_norm" for added in ("", "add_") for norm in ("rms", "layer")]
    counted = {n: mock.Mock(side_effect=getattr(functional, n)) for n in names}
    with mock.patch.multiple(functional, **counted):
        y = module(random(5, N))
    return any(function.called for function in counted.values()), y


@given(st.sampled_from(sorted(NORMS)), st.lists(st.sampled_from(STEPS)))
@settings(max_examples=10, deadline=None)
def test_stored_forwards_in_any_order(name, steps):
    """After each step, the module's numbers are those of its class."""
    module, stored, report = NORMS[name](), [], None
    cls, expected = type(module), module(random(5, N))
    for what in steps:
        if what == "patch" and not report:
            report = tilenorm.patch(module)
            if report.left:
                assert report.left[0].reason == UNREACHED and hidden in [way for way, _ in stored]
                report = None
        elif what == "undo" and report:
            report.undo()
            report = None
        elif what == "unpatch":
            assert tilenorm.unpatch(module) == (("the model",) if report else ())
            report = None
        elif what == "back" and stored:
            _, take_off = stored.pop()
            module.forward = take_off()
        elif callable(what):
            module.forward, take_off = what(module, module.forward, f"_kept{len(stored)}")
            stored.append((what, take_off))
        called, y = runs_tilenorm(module)
        assert called == isinstance(module, PatchedModule) == bool(report)
        torch.testing.assert_close(y, expected, rtol=1e-5 * called, atol=1e-5 * called)
        assert report or type(module) is cls


def test_other_modules_in_the_closure_keep_their_forward():
    one, other = norms.Custom(), norms.Custom()
    first, second = one.forward, other.forward
    one.forward = lambda x: first(second(x))
    report = tilenorm.patch(one)
    assert runs_tilenorm(one)[0] and not isinstance(other, PatchedModule)
    assert not runs_tilenorm(other)[0]
    report.undo()
    assert not runs_tilenorm(one)[0]


def test_a_copy_whose_forward_calls_the_original_is_left():
    """deepcopy keeps functions: the copy's forward has the original's weights, also without us."""
    module = norms.Custom()
    module.forward, _ = in_a_closure(module, module.forward, "")
    (entry,) = tilenorm.patch(copy.deepcopy(module)).left
    assert entry.reason == UNREACHED and len(tilenorm.patch(module).patched) == 1


def test_a_closure_that_holds_itself_and_an_unset_variable():
    module = norms.Custom()
    original = module.forward

    def forward(x):
        return original(x) if forward else unset

    module.forward = forward
    tilenorm.patch(module)
    assert runs_tilenorm(module)[0]
    if module is None:
        unset = None


@pytest.mark.parametrize("way", [None, *WAYS[:2]], ids=lambda way: getattr(way, "__name__", ""))
def test_compiled(dynamo, way):
    """The graph follows a patch, and its end."""
    if way is None and TORCH < (2, 13):
        pytest.skip("TorchDynamo 2.11 has no guard on a module's class")
    module, targets = norms.Custom(), []
    expected = module(random(5, N))
    if way:
        module.forward, _ = way(module, module.forward, "kept")

    def backend(graph, inputs):
        targets.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    run = torch.compile(module, fullgraph=True, backend=backend)
    for change in (tilenorm.patch, tilenorm.unpatch):
        change(module)
        torch.testing.assert_close(run(random(5, N)), expected)
    assert [any("tilenorm" in target for target in graph) for graph in targets] == [True, False]
