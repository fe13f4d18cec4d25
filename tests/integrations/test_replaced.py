"""tilenorm.patch where a forward was replaced on the instance, as by Hugging Face's TP."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import tilenorm
from tilenorm.integrations.form import Form
from tilenorm.integrations.models import PatchedNorm

from ..ops.helpers import random
from . import norms
from .norms import N

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
NORMS = {"Hugging Face's": norms.Custom, "PyTorch's": lambda: nn.LayerNorm(N)}
EACH_NORM = pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)


def hooked(module: nn.Module, before=lambda x: x, after=lambda y: y) -> nn.Module:
    """As transformers.distributed.tensor_parallel.TensorParallelLayer.install_forward."""
    original_forward, calls = module.forward, []

    def tp_forward(*args, **kwargs):
        calls.append(args)
        return after(original_forward(before(args[0]), *args[1:], **kwargs))

    module.forward = tp_forward
    return module


def runs_tilenorm(module: nn.Module) -> bool:
    with mock.patch.object(Form, "compute", autospec=True, side_effect=Form.compute) as compute:
        module(random(5, N))
    return compute.called


@EACH_NORM
@pytest.mark.parametrize("times", [1, 2])
def test_the_replaced_forward_stays_and_calls_tilenorm(make, times):
    module = make()
    for _ in range(times):
        hooked(module, lambda x: x * 2, lambda y: y + 1)
    before, x = module.forward, random(5, N)
    expected = module(x)
    assert not runs_tilenorm(module)
    report = tilenorm.patch(module)
    assert module.forward is before and isinstance(module, PatchedNorm) and not report.left
    assert runs_tilenorm(module)
    torch.testing.assert_close(module(x), expected)
    report.undo()
    assert module.forward is before and not runs_tilenorm(module)
    assert torch.equal(module(x), expected)


@EACH_NORM
def test_a_forward_that_is_replaced_after_the_patch_is_undone_too(make):
    module = make()
    expected = module(random(5, N))
    report = tilenorm.patch(module)
    hooked(module)
    assert runs_tilenorm(module)
    report.undo()
    assert not runs_tilenorm(module) and torch.equal(module(random(5, N)), expected)


def test_other_modules_in_the_closure_keep_their_forward():
    one, other = norms.Custom(), norms.Custom()
    hooked(one, before=other.forward)
    report = tilenorm.patch(one)
    assert runs_tilenorm(one) and not isinstance(other, PatchedNorm)
    assert not runs_tilenorm(other)
    report.undo()
    assert not runs_tilenorm(one)


def test_a_copy_whose_forward_calls_the_original_is_left():
    """deepcopy keeps functions: the copy's forward has the original's weights, also without us."""
    module = hooked(norms.Custom())
    other = copy.deepcopy(module)
    (entry,) = tilenorm.patch(other).left
    assert "and calls no other" in entry.reason
    assert len(tilenorm.patch(module).patched) == 1


def test_a_closure_that_holds_itself_or_an_unset_variable():
    module = norms.Custom()
    original = module.forward

    def forward(x, again=True):
        if not again:
            unset()
        return forward(original(x), False) if again is None else original(x)

    module.forward = forward
    tilenorm.patch(module)
    assert runs_tilenorm(module)
    if module is None:
        unset = None


def test_compiled(dynamo):
    module = hooked(norms.Custom())
    expected = module(random(5, N))
    tilenorm.patch(module)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(random(5, N)), expected)
    assert any("tilenorm" in str(node.target) for g in graphs for node in g.graph.nodes)
