"""unpatch: give the patched modules of a model back the classes that they had before the patch."""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from .replaced import calls_of_class, dispatching


class PatchedModule:
    """Mixin: the first base class of a patched module's class."""

    _tilenorm_class: type[nn.Module]  # the class before the patch
    _tilenorm_forward: Callable  # what the patch computes: takes the module and its arguments
    _tilenorm_made: tuple  # the function that makes this class, and its arguments

    def __reduce_ex__(self, protocol):
        return new_module, self._tilenorm_made, *super().__reduce_ex__(protocol)[2:]


def new_module(make: Callable[..., type[nn.Module]], *arguments) -> nn.Module:
    """An instance without attributes, for pickle and deepcopy. Pickles contain this name."""
    cls = make(*arguments)
    return cls.__new__(cls)


def patched_subclass(
    mixin: type[PatchedModule], cls: type[nn.Module], forward: Callable, **namespace
) -> type[nn.Module]:
    """A subclass of cls with the same name and this forward, which an instance of cls can get.

    Raises whatever cls raises where it has no subclasses, and TypeError where Python cannot give an
    instance of cls the subclass.
    """
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    kept |= {"_tilenorm_class": cls, "_tilenorm_forward": forward, "forward": dispatching(cls)}
    metaclass: Any = type(cls)
    made = metaclass(cls.__name__, (mixin, cls), kept | namespace)
    set_class(object.__new__(cls), made)
    return made


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)  # the class may have its own __setattr__


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Revert what `patch` did to the modules of a model. It needs no report.

    It finds every patched module that named_modules() finds: in a model that was patched, in copies
    and pickles of it and averages over its steps (AveragedModel), and in what peft, Accelerate and
    FSDP make of it, in any order. Norms and blocks (residual=True) get back the class that they
    had. Where fully_shard or a parametrization has derived a class from a patched one, the
    module gets the class that it would have without the patch. Parameters, hooks and attributes
    stay. A forward that hooks or other code stored while the module was patched runs the forward of
    the module's class from now on.

    Args:
        model: a module; it may be a norm itself. A model without patched modules stays as it is.

    Returns:
        The names of the modules that were reverted, as in the report of `patch`.

    Raises:
        TypeError: model is not a module.
        RuntimeError: a module has a class that was derived from a patched one and cannot be derived
            anew, because it uses super(). The message names the module. No module is changed.
    """
    check_argument("unpatch", "model", model, isinstance(model, nn.Module), "a torch.nn.Module")
    found = names_of(model).items()
    names = {m: title(names) for m, names in found if isinstance(m, PatchedModule)}
    revert("unpatch", names)
    return tuple(names.values())


def check_argument(caller: str, name: str, value: object, right: bool, takes: str) -> None:
    if not right:
        raise TypeError(f"{caller}: argument '{name}' takes {takes}, got {type(value).__name__}")


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The modules of a model, each with its qualified names in it."""
    names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def title(names: list[str]) -> str:
    return ", ".join(names) or "the model"


def revert(caller: str, names: dict[nn.Module, str]) -> None:
    """Give patched modules the classes that they would have without a patch."""
    changes = []
    for module, name in names.items():
        try:
            changes.append((module, _unpatched(type(module))))
        except Exception as error:
            raise RuntimeError(f"{caller}: {name} cannot be reverted: {error}") from error
    change_classes(changes)


def change_classes(changes: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give modules other classes, whose forward replaced forwards now call."""
    places = [(module, put) for module, _ in changes for put in calls_of_class(module)]
    for module, cls in changes:
        set_class(module, cls)
    for module, put in places:
        put(MethodType(type(module).forward, module))


@cache
def _unpatched(cls: Any) -> type[nn.Module]:
    """The class that a module of a class would have without the patch."""
    if "_tilenorm_class" in vars(cls):
        return _unpatched(cls._tilenorm_class)
    if not issubclass(cls, PatchedModule):
        return cls
    namespace = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
    for name, value in namespace.items():
        if "__class__" in getattr(getattr(value, "__code__", None), "co_freevars", ()):
            text = f"{cls.__module__}.{cls.__qualname__}, derived after the patch,"
            raise TypeError(f"its class {text} uses super() in {name}")
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, tuple(map(_unpatched, cls.__bases__)), namespace)
