"""Likeness: a key that two modules share if no forward can tell them apart.

The layers of a model have norms that are alike, of which `patch` tries one. Recognition gives twins
parameters of its own, so that the shapes of parameters are part of the key, and their values are
not. Of attributes the key says all: plain values, what containers hold, the code of functions and
what they use, and the attributes of objects. An object whose state Python does not show is like no
other one. Two equal objects are alike: a forward that asks which of them it has is not thought of.
"""

from collections import OrderedDict
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .classes import content_of

# What no forward reads: nn.Module keeps it, or a twin gets another one. A replaced forward is never
# tried, because recognition runs that of the class.
_NOT_READ = {*vars(nn.Module()), "forward"}
_PLAIN = {int, float, complex, bool, str, bytes, type(None), type(...), CodeType}
_PLAIN |= {torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format}
_MOST = 10_000  # values of a module: to describe more takes longer than to try the module


def likeness(module: nn.Module) -> tuple | None:
    """The key; None for a module that has buffers or other modules, which patch leaves at once, and
    for one that cannot be described.
    """
    if module._buffers or module._modules:
        return None
    attributes = {n: v for n, v in vars(module).items() if n not in _NOT_READ}
    parameters = {
        n: p is not None and (tuple(p.shape), p.is_floating_point())
        for n, p in module._parameters.items()
    }
    try:
        return (type(module), *_described(module, [parameters, attributes]))
    except Exception:  # a value may raise anything when it is looked at
        return None


def _described(module: nn.Module, todo: list[Any]) -> list[tuple]:
    """The parts of a description of values. A value that was met before is its number, so that the
    structure of references is described too.
    """
    parts: list[tuple] = []
    numbers, kept = {id(module): 0}, []
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in _PLAIN:  # repr tells 0.0 from -0.0
            parts.append((kind, value if kind is CodeType else repr(value)))
        elif id(value) in numbers:
            parts.append(("again", numbers[id(value)]))
        else:
            numbers[id(value)] = len(numbers)
            kept.append(value)  # so that no other value gets its id
            inner = _inner(value)
            parts.append((kind, ("is", id(value)) if inner is None else len(inner)))
            todo += inner or ()
        if len(parts) > _MOST:
            raise ValueError("too many values")
    return parts


def _inner(value: Any) -> list | None:
    """The values that say all of a value of its type; None if only the value itself does."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return [part for item in value.items() for part in item]
    if kind in (list, tuple):
        return [*value]
    if kind in (set, frozenset):
        return sorted(value, key=repr) if _PLAIN.issuperset(map(type, value)) else None
    if kind is FunctionType:
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, id(value.__globals__)]
        return [*parts, vars(value), *map(content_of, value.__closure__ or ())]
    if kind is MethodType:
        return [value.__func__, value.__self__]
    if kind is partial:
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, (Tensor, nn.Module, type)) or not _shows_its_state(kind):
        return None
    reduced: Any
    try:
        reduced = object.__reduce_ex__(value, 2)
    except TypeError:  # what a class in C keeps
        return None
    _, arguments, state, items, pairs = reduced
    inner = [arguments, state, [*(items or ())], [*(pairs or ())]]
    # Of an object without anything, only itself says which it is.
    return inner if len(arguments) > 1 or any(inner[1:]) else None


def _shows_its_state(kind: type) -> bool:
    """Whether pickle would take all attributes of an object, and ask its class for nothing."""
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in names)
