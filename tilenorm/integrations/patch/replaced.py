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
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

UNREACHED = "its forward was replaced on this instance, and patch does not find the former one"


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


def calls_of_class(module: nn.Module) -> list[Callable[[object], None]]:
    """For a module whose forward was replaced: the places that hold the forward of its class.

    Each place is a function that puts another forward there.
    """
    return [
        partial(_put, holder, value)
        for holder, value in _reached(module)
        if type(value) is MethodType and value.__self__ is module and _is_of_class(value, module)
    ]


def _is_of_class(method: MethodType, module: nn.Module) -> bool:
    """Whether a method runs the forward of the module's class, or of a patch of it."""
    code: Any = getattr(method.__func__, "__code__", None)
    return method.__func__ is type(module).forward or code in dispatching.__code__.co_consts


def _reached(module: nn.Module) -> Iterator[tuple[object, object]]:
    """Each value that a module whose forward was replaced holds, and what holds it; and so on."""
    todo: list[Any] = [vars(module)] if "forward" in vars(module) else []
    seen: dict[int, Any] = {}
    while todo:
        holder = todo.pop()
        if id(holder) not in seen:
            seen[id(holder)] = holder  # kept, so that no other object gets its id
            for value in _held(holder):
                yield holder, value
                todo.append(value)


def _held(holder: Any) -> list:
    """The values of a dict, what a function, method or partial uses, and the attributes of all
    that can be called and of what functions use.
    """
    kind = type(holder)  # isinstance() would ask the object, and weakref.proxy may raise
    if issubclass(kind, dict):
        return [*dict.values(holder)]
    used = []
    if issubclass(kind, FunctionType):
        used = [*map(content_of, holder.__closure__ or ()), holder.__kwdefaults__]
    elif issubclass(kind, MethodType):
        used = [holder.__func__, holder.__self__]
    elif issubclass(kind, partial):
        used = [holder.func, *holder.args, holder.keywords]
    elif not callable(holder) or issubclass(kind, nn.Module):
        return []
    return used + [_attributes(value) for value in (*used, holder)]


def _attributes(value: object) -> dict | None:
    if type(value) is ModuleType:  # a Python module holds no module's forward, but much else
        return None
    try:
        return vars(value)
    except Exception:  # it has none, or is no longer there
        return None


def content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _put(holder: Any, old: object, new: object) -> None:
    """Replace a value that `_held` returns."""
    if isinstance(holder, dict):
        for key in [key for key, value in dict.items(holder) if value is old]:
            dict.__setitem__(holder, key, new)
    elif isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            if content_of(cell) is old:
                cell.cell_contents = new
    elif isinstance(holder, partial):
        state = (holder.func, *holder.args)
        function, *args = (new if value is old else value for value in state)
        changed: Any = holder
        changed.__setstate__((function, tuple(args), holder.keywords, vars(holder)))
