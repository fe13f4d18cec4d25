"""unpatch: give the patched modules of a model back the classes that they had before the patch."""

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from .replaced import calls_of_class, dispatching, patched_ones


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
    mixin: type[PatchedModule], cls: type[nn.Module], **namespace
) -> type[nn.Module]:
    """A subclass of cls with the same name, whose forward runs _tilenorm_forward."""
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    kept |= {"_tilenorm_class": cls, "forward": dispatching(cls)}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (mixin, cls), kept | namespace)


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
            anew, because it uses super(); or its forward was replaced by a function that calls a
            patched module outside of the model. The message names the module. No module is changed
            in these cases.
    """
    check_argument("unpatch", "model", model, isinstance(model, nn.Module), "a torch.nn.Module")
    names = {
        module: ", ".join(found) or "the model"
        for module, found in names_of(model).items()
        if isinstance(module, PatchedModule)
    }
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


def revert(caller: str, names: dict[nn.Module, str]) -> None:
    """Give patched modules the classes that they would have without a patch."""
    changes = []
    for module, name in names.items():
        if any(isinstance(m, PatchedModule) and m not in names for m in patched_ones(module)):
            raise RuntimeError(
                f"{caller}: the forward that was set on {name} calls a patched module elsewhere, as"
                " hooks of a copy call the original; revert that one first"
            )
        try:
            changes.append((name, module, _unpatched(type(module))))
        except Exception as error:
            raise RuntimeError(f"{caller}: {name} cannot be reverted: {error}") from error
    change_classes(caller, changes)


def change_classes(caller: str, changes: list[tuple[str, nn.Module, type[nn.Module]]]) -> None:
    """Give modules, each with its name, other classes, whose forward replaced forwards now call.

    Raises RuntimeError if a module refuses its class; then no module is changed.
    """
    stored = [(module, put) for _, module, _ in changes for put in calls_of_class(module)]
    before = []
    for name, module, cls in changes:
        before.append((module, type(module)))
        try:
            object.__setattr__(module, "__class__", cls)  # the class may have its own __setattr__
        except Exception as error:
            for done, former in before[:-1]:
                object.__setattr__(done, "__class__", former)
            raise RuntimeError(f"{caller}: the class of {name} cannot change: {error}") from error
    for module, put in stored:
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
        if _uses_super(value):
            text = f"{cls.__module__}.{cls.__qualname__}, derived after the patch,"
            raise TypeError(f"its class {text} uses super() in {name}")
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, tuple(map(_unpatched, cls.__bases__)), namespace)


def _uses_super(value: object) -> bool:
    """Whether a function, method or property of a class refers to that class by super()."""
    parts = [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel")]
    codes = [f.__code__ for f in (value, *parts) if isinstance(f, FunctionType)]
    return any("super" in c.co_names or "__class__" in c.co_freevars for c in codes)
