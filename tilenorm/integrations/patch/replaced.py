"""Forwards that somebody stored: hooks replace `module.forward` by a function that calls it.

Hugging Face's tensor parallelism, Accelerate and diffusers do so, among others. Each keeps the
class's forward, bound to the module, at another place: in a closure, in an attribute of the module,
in an object of its own.

Stored before a patch, that forward is searched, and the patch puts its own in its place: all else
that the function does is untouched. Stored after a patch, it needs no search: see `dispatching`.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from operator import setitem
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

UNREACHED = "its forward was replaced on this instance, and patch does not find the former one"
Put = Callable[[object], None]


def dispatching(cls: type[nn.Module]) -> FunctionType:
    """The forward of a patched subclass of cls, with the signature of the forward of cls.

    It asks at each call which class the module has now. Wherever it is stored, it runs the forward
    of cls once the patch is undone.
    """

    def forward(self, *args, **kwargs):
        return getattr(type(self), "_tilenorm_forward", cls.forward)(self, *args, **kwargs)

    wrapper: Any = update_wrapper(forward, cls.forward, updated=())
    del wrapper.__wrapped__  # Accelerate would take it for a forward that its hooks replaced
    wrapper.__signature__ = inspect.signature(cls.forward)
    return wrapper


def calls_of_class(module: nn.Module) -> list[Put]:
    """For a module whose forward was replaced: the places that hold the forward of its class.

    Each place is a function that puts another forward there.
    """
    return [put for value, put in _reached(module) if put and _is_forward(value, module)]


def patched_ones(module: nn.Module) -> list[nn.Module]:
    """For a module whose forward was replaced: the others whose patched forward it holds."""
    values: list[Any] = [value for value, _ in _reached(module) if _is_dispatching(value)]
    return [value.__self__ for value in values if value.__self__ is not module]


def _is_dispatching(value: object) -> bool:
    function = value.__func__ if type(value) is MethodType else None
    return getattr(function, "__code__", None) in dispatching.__code__.co_consts


def _is_forward(value: object, module: nn.Module) -> bool:
    """Whether a value is the forward of the module's class, or of a patch of it, bound to it."""
    if type(value) is not MethodType or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward or _is_dispatching(value)


def _reached(module: nn.Module) -> Iterator[tuple[object, Put | None]]:
    """The values of `_held` for a module whose forward was replaced, and for all that it holds."""
    todo: list[Any] = [vars(module)] if "forward" in vars(module) else []
    seen: dict[int, Any] = {}
    while todo:
        holder = todo.pop()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder  # kept, so that no other object gets its id
        for value, put in _held(holder):
            yield value, put
            todo.append(value)


def _held(holder: Any) -> Iterator[tuple[object, Put | None]]:
    """The values that an object holds, and for each how to put another one in its place.

    Only containers and what can be called are looked into, and the objects that a function uses.
    """
    kind = type(holder)  # isinstance() would ask the object, and weakref.proxy may raise
    if issubclass(kind, dict):
        for key, value in [*dict.items(holder)]:
            yield value, partial(dict.__setitem__, holder, key)
    elif kind is list:
        for place, value in enumerate(holder):
            yield value, partial(setitem, holder, place)
    elif issubclass(kind, (FunctionType, MethodType, partial)):
        for value, put in _used(holder):
            yield value, put
            yield _attributes(value), None
        yield _attributes(holder), None
    elif callable(holder) and not issubclass(kind, nn.Module):
        yield _attributes(holder), None


def _attributes(value: object) -> dict | None:
    if type(value) is ModuleType:  # a Python module holds no module's forward, but much else
        return None
    try:
        return vars(value)
    except Exception:  # it has none, or is no longer there
        return None


def _used(function: FunctionType | MethodType | partial) -> Iterator[tuple[object, Put | None]]:
    """The values that a function holds: variables, defaults, arguments, or an object."""
    if isinstance(function, MethodType):
        yield function.__func__, None
        yield function.__self__, None
    elif isinstance(function, partial):
        state = (function.func, *function.args)
        yield from ((value, partial(_put, function, place)) for place, value in enumerate(state))
        yield function.keywords, None
    else:
        for cell in function.__closure__ or ():
            yield content_of(cell), partial(setattr, cell, "cell_contents")
        for place, value in enumerate(function.__defaults__ or ()):
            yield value, partial(_put_default, function, place)
        yield function.__kwdefaults__, None


def content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _put(function: partial, place: int, value: object) -> None:
    """Replace the function (place 0) or a positional argument of a functools.partial."""
    state = [function.func, *function.args]
    state[place] = value
    changed: Any = function
    changed.__setstate__((state[0], tuple(state[1:]), function.keywords, vars(function)))


def _put_default(function: FunctionType, place: int, value: object) -> None:
    defaults = function.__defaults__
    function.__defaults__ = (*defaults[:place], value, *defaults[place + 1 :])
