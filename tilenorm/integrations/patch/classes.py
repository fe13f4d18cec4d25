"""unpatch: give the patched modules of a model back the classes that they had before the patch.

Hooks replace `module.forward` by a function that calls the former one: Hugging Face's tensor
parallelism, Accelerate and diffusers do so. Each keeps the class's forward, bound to the module, at
another place: in a closure, in an attribute of the module, in an object of its own. Stored before a
patch, that forward is searched, and the patch puts its own in its place: all else that the function
does is untouched. Stored after a patch, it needs no search: see `forward_of`.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ...nn import refuse_script
from ...ops.arguments import check_argument
from .form import Form
from .forwards import SUM, forward_of, is_forward_of_a_patch, sum_of

UNREACHED = "its forward was replaced on this instance, and patch does not find the former one"

Put = Callable[[object], None]  # puts a value in the place of another


class PatchedModule:
    """Mixin: the first base class of a patched module's class."""

    _tilenorm_class: type[nn.Module]  # the class before the patch
    _tilenorm_forward: Callable  # what the patch computes: takes the module and its arguments
    _tilenorm_made: tuple  # the function that makes this class, and its arguments
    _tilenorm_how: Callable[[nn.Module], str]  # what computes an instance, for the report

    __prepare_scriptable__ = refuse_script

    def __reduce_ex__(self, protocol):
        return new_module, self._tilenorm_made, *super().__reduce_ex__(protocol)[2:]


def new_module(make: Callable[..., type[nn.Module]], *arguments) -> nn.Module:
    """An instance without attributes, for pickle and deepcopy. Pickles contain this name."""
    cls = make(*arguments)
    return cls.__new__(cls)


def patched_subclass(
    cls: type[nn.Module],
    forward: Callable,
    again: tuple,
    how: Callable,
    namespace: dict[str, Any],
    form: Form | None = None,
) -> type[nn.Module]:
    """A subclass of cls with the same name, this forward and namespace, which an instance of cls
    can get. again: the function that makes this class, and its arguments. how: as in PatchedModule.
    form: of a norm.

    Raises whatever cls raises where it has no subclasses, and TypeError where Python cannot give an
    instance of cls the subclass.
    """
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes = {"_tilenorm_class": cls, "_tilenorm_forward": forward}
    attributes |= {"_tilenorm_made": again, "_tilenorm_how": how}
    metaclass: Any = type(cls)
    subclass = metaclass(cls.__name__, (PatchedModule, cls), kept | attributes | namespace)
    # Both compare the class of a module with this one.
    type.__setattr__(subclass, "forward", forward_of(cls, subclass, form))
    if form is not None:
        type.__setattr__(subclass, SUM, sum_of(cls, subclass, form))
    set_class(object.__new__(cls), subclass)
    return subclass


@cache
def patched_norm(cls: type[nn.Module], form: Form) -> type[nn.Module]:
    """A subclass of a norm's class, whose forward computes the form by tilenorm."""
    again, namespace = (patched_norm, cls, form), {"_tilenorm_form": form}
    return patched_subclass(cls, form.forward, again, form.describe, namespace, form)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)  # the class may have its own __setattr__


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Revert what `patch` did to the modules of a model.

    It finds every patched module that named_modules() finds: in a model that was patched, in copies
    and pickles of it and averages over its steps (AveragedModel), and in what peft, Accelerate and
    FSDP make of it, in any order. Norms and blocks (residual, modulation) get back the class that
    they had. Where fully_shard or a parametrization has derived a class from a patched one, the
    module gets the class that it would have without the patch. Parameters, hooks and attributes
    stay. A forward that hooks or others stored while the module was patched runs that of its class
    from now on. A copy whose hooks call the original, as those of diffusers do, calls it as before:
    revert that one too.

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
    names_of_modules = names_of(model).items()
    names = {m: title(names) for m, names in names_of_modules if isinstance(m, PatchedModule)}
    revert("unpatch", names)
    return tuple(names.values())


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


def calls_of_class(module: nn.Module) -> list[Put]:
    """For a module whose forward was replaced: the places that hold the forward of its class, or of
    a patch of it.
    """
    forward = type(module).forward
    return [
        put
        for value, put in _reached(module)
        if put and type(value) is MethodType and value.__self__ is module
        if value.__func__ is forward or is_forward_of_a_patch(value.__func__)
    ]


def _reached(module: nn.Module) -> Iterator[tuple[object, Put | None]]:
    """Each value that a module whose forward was replaced holds, and what these hold; and so on."""
    todo: list[Any] = [vars(module)] if "forward" in vars(module) else []
    seen: dict[int, Any] = {}
    while todo:
        holder = todo.pop()
        if id(holder) not in seen:
            seen[id(holder)] = holder  # kept, so that no other object gets its id
            for value, put in _held(holder):
                yield value, put
                todo.append(value)


def _held(holder: Any) -> list[tuple[Any, Put | None]]:
    """The values of a dict, what a function, method or partial uses, and the attributes of all
    that can be called and of what functions use. A value that can be replaced has a place.
    """
    kind = type(holder)  # isinstance() would ask the object, and weakref.proxy may raise
    if issubclass(kind, dict):
        return [(v, partial(dict.__setitem__, holder, k)) for k, v in dict.items(holder)]
    used: list[tuple[Any, Put | None]] = []
    if issubclass(kind, FunctionType):
        used = [
            (content_of(c), partial(setattr, c, "cell_contents")) for c in holder.__closure__ or ()
        ]
        used.append((holder.__kwdefaults__, None))
    elif issubclass(kind, MethodType):
        used = [(holder.__func__, None), (holder.__self__, None)]
    elif issubclass(kind, partial):
        used = [(v, partial(_put, holder, i)) for i, v in enumerate((holder.func, *holder.args))]
        used.append((holder.keywords, None))
    elif not callable(holder) or issubclass(kind, nn.Module):
        return []
    return used + [(_attributes(value), None) for value, _ in (*used, (holder, None))]


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


def _put(holder: partial, place: int, value: object) -> None:
    state = [holder.func, *holder.args]
    state[place] = value
    changed: Any = holder
    changed.__setstate__((state[0], tuple(state[1:]), holder.keywords, vars(holder)))
