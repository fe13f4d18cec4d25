"""Which norms patch tries once: those that no forward can tell apart."""

import functools
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import tilenorm
from tilenorm.integrations.patch import models
from tilenorm.integrations.patch.likeness import likeness

from .norms import Custom, N


class Config:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slots:
    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


class Pair(NamedTuple):
    first: object
    second: object


class Hides:
    """An object that leaves out a part of what it is when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return {}


def closure(value):
    return lambda x: (x, value)


def with_default(value):
    def function(x, option=value):
        return x, option

    return function


def with_attribute(value):
    function = closure(0)
    function.option = value
    return function


class Named(dict):
    pass


# How a value is made that holds another one.
HOLDERS = {
    "dict": lambda v: {"a": v, "b": 1},
    "derived dict": lambda v: Named(a=v),
    "list": lambda v: [1, v],
    "tuple": lambda v: (v, v),
    "named tuple": lambda v: Pair(1, v),
    "object": lambda v: Config(a=v, b="c"),
    "slots": lambda v: Slots(v, 2),
    "function": closure,
    "default": with_default,
    "attribute": with_attribute,
    "partial": lambda v: functools.partial(closure(0), v),
    "method": lambda v: Config(a=v).__init__,
}
PLAIN = [0, 1, True, 0.0, -0.0, 1.0, float("nan"), "", b"1", None, torch.float32, (), 1j]
PLAIN += [torch.float16, torch.Size((1,)), (1,), [1], {1}, frozenset({1}), "a", len, Config, 1e-6]
DRAWN = 200


def drawn(rng: Random, depth: int, value) -> object:
    for _ in range(depth):
        value = HOLDERS[rng.choice([*HOLDERS])](value)
    return value


def norm(**attributes) -> nn.Module:
    module = Custom()
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    return module


def test_drawn_modules_are_alike_if_they_are_made_alike():
    """And not if a value differs at any depth, or its type."""
    rng = Random(0)
    for _ in range(DRAWN):
        seed, depth = rng.random(), rng.randrange(5)
        one, other = rng.sample(range(len(PLAIN)), 2)
        made = [drawn(Random(seed), depth, PLAIN[value]) for value in (one, one, other)]
        modules = [norm(a=value, b=2) for value in made]
        keys = [*map(likeness, modules)]
        assert keys[0] is not None and keys[0] == keys[1]
        assert keys[0] != keys[2]


def shared(first, second):
    return {"a": first, "b": second}


FIRST, SECOND = [1], [1]
CLASS = type("Norm", (Custom,), {})
UNLIKE = {
    "another class": (norm(), CLASS()),
    "more attributes": (norm(), norm(a=1)),
    "another key": (norm(a={1: 1}), norm(a={True: 1})),
    "another size": (Custom(8), Custom(9)),
    "another dtype of parameters": (Custom(8), Custom(8).to(torch.complex64)),
    "no parameter": (norm(), norm(_parameters={"weight": None})),
    "one object twice": (norm(a=FIRST, b=FIRST), norm(a=FIRST, b=SECOND)),
    "what pickle leaves out": (norm(a=Hides(1)), norm(a=Hides(2))),
    "generators": (norm(a=torch.Generator()), norm(a=torch.Generator())),
    "tensors": (norm(a=[torch.ones(1)]), norm(a=[torch.ones(1)])),
    "namespaces in C": (norm(a=SimpleNamespace(a=1)), norm(a=SimpleNamespace(a=2))),
    "global variables": (
        norm(a=eval("lambda: N", {"N": 1})),
        norm(a=eval("lambda: N", {"N": 2})),
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_are_not_alike(name):
    one, other = UNLIKE[name]
    assert likeness(one) != likeness(other) and likeness(one) == likeness(one)


def with_itself(**attributes):
    module = norm(**attributes)
    module.hook = functools.partial(closure(0), module)
    module.own = [module.reset if hasattr(module, "reset") else module.forward]
    module.own.append(module.own)
    return module


ALIKE = {
    "values of parameters": (norm(), norm().requires_grad_(False).bfloat16()),
    "training": (norm(), norm().eval()),
    "itself": (with_itself(), with_itself()),
    "a replaced forward": (norm(), norm(forward=lambda x: x)),
    "hooks": (norm(), norm()),
}
ALIKE["hooks"][0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("name", ALIKE)
def test_are_alike(name):
    one, other = ALIKE[name]
    assert likeness(one) == likeness(other) is not None


def test_what_cannot_be_described():
    class Odd:
        def __getattribute__(self, name):
            raise ValueError(name)

    assert likeness(norm(a=[0] * 10**5)) is None
    assert likeness(norm(a=Odd())) is None or tilenorm.patch(norm(a=Odd()))
    assert likeness(nn.BatchNorm1d(N)) is None and likeness(norm(a=nn.Linear(1, 1)))


def test_norms_with_functions_are_tried_once(monkeypatch):
    """As those of torchtitan, which have a dict with a function of their own."""
    tried, recognise = [], models.recognise
    monkeypatch.setattr(models, "recognise", lambda m: tried.append(m) or recognise(m))
    modules = [norm(init={"weight": closure(i // 8)}) for i in range(16)]
    modules += [nn.RMSNorm(n) for n in (N, 8, N, 8)]
    assert len(tilenorm.patch(nn.ModuleList(modules)).patched) == 20 and len(tried) == 4


def test_norms_whose_forwards_were_replaced_are_tried_once(monkeypatch):
    """Those whose former forward is not found are left."""
    tried, recognise = [], models.recognise
    monkeypatch.setattr(models, "recognise", lambda m: tried.append(m) or recognise(m))
    modules = [Custom() for _ in range(4)]
    for module in modules[1:]:
        module.forward = functools.partial(module.forward)
    modules[1].forward = lambda x: x
    report = tilenorm.patch(nn.ModuleList(modules))
    assert [entry.name for entry in report.patched] == ["0", "2", "3"] and len(tried) == 1
