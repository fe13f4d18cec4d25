"""tilenorm.patch: what a patched module keeps, undo, the report, and errors."""

import inspect

import pytest
import torch
from torch import nn
from torch.func import functional_call

import tilenorm
from tests.support.calls import random

from . import norms
from .drawn_norms import gated_norm
from .graphs import trained
from .norms import N

X = random(5, N)


class Block(nn.Module):
    """A module with one norm registered under two names, and two norms that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.LayerNorm(N), nn.Linear(N, N)
        self.last, self.tied = norms.Custom(), norms.Custom()
        self.again = self.first
        self.tied.weight = self.last.weight
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed))

    def forward(self, x):
        return self.tied(self.last(self.again(self.inner(self.first(x)))))


def test_patch_and_undo_keep_modules_parameters_and_attributes():
    model = Block()
    expected, classes = trained(model, X), [*map(type, model.modules())]
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    attributes = {name: dict(vars(module)) for name, module in modules.items()}
    text, state = str(model), model.state_dict()
    signature = inspect.signature(model.last.forward)
    report = tilenorm.patch(model)
    assert [entry.name for entry in report.patched] == ["first, again", "last", "tied"]
    assert isinstance(model.first, nn.LayerNorm) and isinstance(model.last, norms.Custom)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.again is model.first and model.tied.weight is model.last.weight
    assert {name: vars(module) for name, module in modules.items()} == attributes
    assert str(model) == text
    assert type(model.last).__qualname__ == "Custom"
    assert list(model.state_dict()) == list(state)
    Block().load_state_dict(model.state_dict())
    assert inspect.signature(model.last.forward) == signature
    torch.testing.assert_close(trained(model, X), expected)
    report.undo()
    assert {name: vars(module) for name, module in modules.items()} == attributes
    assert [*map(type, model.modules())] == classes
    torch.testing.assert_close(trained(model, X), expected, rtol=0, atol=0)
    tilenorm.patch(model)


def test_hooks_run():
    model, events = Block(), []
    model.first.register_forward_pre_hook(lambda *_: events.append("before"))
    tilenorm.patch(model)
    model.first.register_forward_hook(lambda *_: events.append("after"))
    model.first.register_full_backward_hook(lambda *_: events.append("backward"))
    model(random(5, N).requires_grad_()).sum().backward()
    assert events == ["before", "after"] * 2 + ["backward"] * 2


def test_eps_and_weight_are_those_of_the_call():
    module = norms.Custom()
    tilenorm.patch(module)
    module.eps, weight = 1.0, random(N, seed=3)
    got = functional_call(module, {"weight": weight}, (random(5, N),))
    assert torch.equal(got, tilenorm.rms_norm(random(5, N), (N,), weight, 1.0))


def test_keyword_arguments():
    model, x, z = nn.ModuleList([nn.LayerNorm(8), gated_norm()]), random(5, 8), random(5, 8, seed=1)
    tilenorm.patch(model)
    layer, gated = model
    assert torch.equal(layer(input=x), layer(x))
    for y in (gated(x=x, gate=z), gated(x, gate=z)):
        assert torch.equal(y, gated(x, z))
    assert torch.equal(gated(x, gate=None), gated(x))
    wrong = (layer, (), {}), (layer, (x, z), {}), (layer, (x,), {"z": z})
    for module, args, kwargs in (*wrong, (gated, (), {"gate": z}), (gated, (x,), {"x": x})):
        with pytest.raises(TypeError, match=r"\(\) (missing|takes|got)"):
            module(*args, **kwargs)


def test_where_selects_modules():
    model = Block()

    def where(name, module):
        return module is getattr(model, name) and name in ("again", "tied")

    report = tilenorm.patch(model, where=where)
    assert [entry.name for entry in report.patched] == ["first, again", "tied"]
    assert [(e.name, e.cls) for e in report.left] == [("last", norms.Custom)]


def test_report_as_text():
    others = {"last": norms.Custom(), "b": nn.BatchNorm1d(N), "c": nn.BatchNorm1d(N)}
    layers = [nn.LayerNorm(N) for _ in range(4)]
    report = tilenorm.patch(nn.ModuleDict({"layers": nn.ModuleList(layers), **others}))
    assert str(report).splitlines() == [
        "5 modules patched, 2 not patched",
        "  LayerNorm runs layer_norm offset=0.0 rounding=late eps=1e-05:"
        " layers.0, 2 others and layers.3",
        "  Custom runs rms_norm offset=0.0 rounding=late eps=1e-06: last",
        "  BatchNorm1d is not patched (it has other tensors than parameters:"
        " running_mean, running_var, num_batches_tracked): b and c",
    ]
    report = tilenorm.patch(nn.Linear(N, N), residual=True)
    assert str(report) == "no norm was found" and not report.patched


def test_exported():
    model, x = Block(), random(5, N)
    tilenorm.patch(model)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    called = [str(node.target) for node in program.graph.nodes]
    assert sum("tilenorm" in target for target in called) == 4
