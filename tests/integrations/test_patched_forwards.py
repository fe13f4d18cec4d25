"""The forward of a patched class: its frames, its code object, and the calls that are not plain."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tilenorm
from tests.support.calls import random
from tests.support.served import entered
from tilenorm.integrations.patch.forwards import FILE
from tilenorm.ops import functional

from .drawn_norms import gated_norm
from .norms import Custom, N, UnitOffset

PACKAGE = tilenorm.__path__[0]


def frames(call: Callable, function: str) -> list[str]:
    """The names of the package's functions that a warm call enters, up to a public function."""
    for _ in range(3):
        call()
    seen = entered(call, lambda file: file.startswith((PACKAGE, FILE)))
    return seen[: seen.index(function) + 1]


class Sum(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, h):
        x = x + h
        y = self.norm(x)
        return y, x


class ProductAndSum(Sum):
    def forward(self, x, h):
        return self.norm(x + 2 * h), x


def patched(module: nn.Module, **options) -> nn.Module:
    assert not tilenorm.patch(module, **options).left
    return module


NORMS = {
    "layer_norm": lambda: nn.LayerNorm(N),
    "layer_norm without bias": lambda: nn.LayerNorm(N, bias=False),
    "layer_norm without weight": lambda: nn.LayerNorm(N, elementwise_affine=False),
    "layer_norm of two dimensions": lambda: nn.LayerNorm((5, N)),
    "rms_norm": lambda: nn.RMSNorm(N),
    "rms_norm of Llama": lambda: LlamaRMSNorm(N),
    "rms_norm of an own class": Custom,
    "rms_norm of litgpt's Gemma": UnitOffset,
}
X = random(3, 5, N)


@pytest.mark.parametrize("name", NORMS)
def test_one_frame_up_to_the_function(name):
    module = patched(NORMS[name]())
    function, *_ = name.split()
    assert frames(lambda: module(X), function) == ["forward", function]


def test_one_frame_with_a_gate():
    module, x = patched(gated_norm()), random(3, 8)
    assert frames(lambda: module(x, x), "gated_rms_norm") == ["forward", "gated_rms_norm"]
    assert frames(lambda: module(x), "rms_norm") == ["forward", "rms_norm"]


@pytest.mark.parametrize("block", [Sum, ProductAndSum])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_one_frame_from_a_blocks_sum_to_the_function(norm, block):
    """The block's own forward stands behind the one that asks for the block's class."""
    function = "add_layer_norm" if norm is nn.LayerNorm else "add_rms_norm"
    module = patched(block(norm(N)), residual=True)
    assert frames(lambda: module(X, X), function) == ["forward", "sum_and_norm", function]


OWN = {
    "rms_norm": tilenorm.RMSNorm,
    "layer_norm": tilenorm.LayerNorm,
    "modulated_rms_norm": tilenorm.ModulatedRMSNorm,
    "modulated_layer_norm": tilenorm.ModulatedLayerNorm,
}


@pytest.mark.parametrize("function", OWN)
def test_one_frame_in_tilenorms_modules(function):
    module = OWN[function](N)
    scale = (random(3, 1, N),) if "modulated" in function else ()
    assert frames(lambda: module(X, *scale), function) == ["forward", function]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(module):
    parametrize.register_parametrization(module, "weight", Doubled())


def with_a_plain_weight(module):
    weight = module.weight.detach() * 2
    del module.weight
    module.weight = weight


def with_a_property(module):
    """In a class that was derived after the patch."""
    double = property(lambda self: 2 * self._parameters["weight"])
    module.__class__ = type("Derived", (type(module),), {"weight": double})


def sharded(module):
    """As FSDP does: a derived class, and other parameters during the forward."""
    module.__class__ = type("Sharded", (type(module),), {})
    module._parameters["weight"] = nn.Parameter(module.weight.detach() * 2)


def with_another_parameter(module):
    module._parameters["weight"] = module.weight.detach() * 2


class Gathered(dict):
    """As DeepSpeed's: an item is gathered when it is asked for."""

    def __getitem__(self, name):
        return 2 * dict.__getitem__(self, name)


def gathered(module):
    module.__dict__["_parameters"] = Gathered(module._parameters)


CHANGES = [parametrized, with_a_plain_weight, with_a_property, sharded, with_another_parameter]
CHANGES += [gathered]
EACH_CHANGE = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
MAKERS = (lambda: patched(nn.RMSNorm(N)), lambda: patched(Custom()), lambda: tilenorm.RMSNorm(N))


@EACH_CHANGE
def test_the_weight_is_the_modules_attribute(change):
    """Whatever gives the module its weight, the norm is twice as large."""
    for make in MAKERS:
        module = make()
        with torch.no_grad():
            module.weight.copy_(random(N, seed=1))
            expected = 2 * module(X)
            change(module)
            torch.testing.assert_close(module(X), expected, rtol=1e-6, atol=1e-6)


@EACH_CHANGE
def test_the_weight_of_a_sum_is_the_modules_attribute(change):
    module = patched(Sum(nn.RMSNorm(N)), residual=True)
    with torch.no_grad():
        y, x = module(X, X)
        change(module.norm)
        torch.testing.assert_close(module(X, X), (2 * y, x), rtol=1e-6, atol=1e-6)


class ReadsElsewhere(Custom):
    """A class that says itself what its attributes are."""

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value * 3 if name == "weight" else value


def test_a_class_with_its_own_attributes():
    module = ReadsElsewhere()
    expected = module(X)
    torch.testing.assert_close(patched(module)(X), expected)


def test_a_sum_whose_norm_was_reverted():
    module = patched(Sum(nn.LayerNorm(N)), residual=True)
    tilenorm.unpatch(module.norm)
    assert torch.equal(module(X, X)[0], nn.LayerNorm(N)(X + X))


class Iterates(Sum):
    """Python lets no expression assign where a comprehension takes its elements from."""

    def forward(self, x, h):
        return torch.stack([2 * row for row in self.norm(x + h)]), [
            self.norm(x + h) for _ in range(2)
        ]


class NamesBuiltins(Sum):
    def forward(self, x, getattr, type=None):
        return self.norm(self.norm(x + getattr) + getattr), type


@pytest.mark.parametrize("cls", [Iterates, NamesBuiltins])
def test_sums_in_other_places(cls, passes):
    module = patched(cls(nn.LayerNorm(N)))
    expected = module(X, X)
    other = patched(cls(nn.LayerNorm(N)), residual=True)
    torch.testing.assert_close(other(X, X), expected)
    assert passes == ["add_layer_norm"] * (3 if cls is Iterates else 2)


def norm_class(number: int) -> type[nn.Module]:
    """A class with a forward of its own."""
    source = (
        "def forward(self, x):\n    return (rms(x.float(), self.eps) * self.weight).to(x.dtype)"
    )
    names = {"rms": lambda x, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)}
    exec(compile(source, f"norm_{number}.py", "exec"), names)
    return type(f"Norm{number}", (Custom,), {"forward": names["forward"]})


def graphs_of(modules: list[nn.Module]) -> int:
    """How many graphs TorchDynamo makes of modules for two numbers of dimensions."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for module in modules:
        module.compile(backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=3):
        for module in modules:
            rows = torch.ones(3, module.n)
            for x in (rows, rows.expand(2, 3, module.n)):
                module(*[x] * module.takes)
    return len(graphs)


def test_each_class_has_its_own_recompilations(dynamo):
    """TorchDynamo counts them by code object, and gives up after a number of them: three here."""
    modules = [norm_class(i)(8 + 2 * i) for i in range(2)]
    for module in modules:
        patched(module).n, module.takes = module.weight.numel(), 1
    assert graphs_of(modules) == 4


def test_each_block_has_its_own_recompilations(dynamo):
    modules = [type(f"Block{i}", (Sum,), {})(nn.LayerNorm(8)) for i in range(2)]
    for module in modules:
        patched(module, residual=True).n, module.takes = 8, 2
    assert graphs_of(modules) == 4


def test_tracebacks_show_the_source(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("here")

    module = patched(nn.LayerNorm(N))
    monkeypatch.setattr(functional, "layer_norm", refuse)
    with pytest.raises(ValueError, match="here") as raised:
        module(X)
    (entry,) = [e for e in raised.traceback if str(e.path).startswith(FILE) or FILE in repr(e)]
    assert "functional.layer_norm(x, sizes, weight, bias, self.eps)" in str(entry.statement)


def test_copies_share_the_class_and_its_forward():
    module = patched(nn.LayerNorm(N))
    assert type(copy.deepcopy(module)) is type(module) is type(patched(nn.LayerNorm(N)))
    assert type(patched(nn.LayerNorm(N, bias=False))) is not type(module)
