"""Norm modules of a model, served by tilenorm in place."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from ..nn import LayerNorm, RMSNorm
from .form import Form
from .recognition import Unrecognised, looks_like_a_norm, recognise


class Patched(NamedTuple):
    """A module that tilenorm serves: its names in the model, its class, what it computes."""

    name: str
    cls: type[nn.Module]
    how: str


class Left(NamedTuple):
    """A module that looks like a norm and stays as it is, and why."""

    name: str
    cls: type[nn.Module]
    reason: str


class PatchedNorm:
    """Goes before a norm's own class in the class that a patched module gets."""

    _tilenorm_class: type[nn.Module]
    _tilenorm_form: Form

    def forward(self, *args, **kwargs) -> Tensor:
        return self._tilenorm_form.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _new, (self._tilenorm_class, self._tilenorm_form), *state


@cache
def _patched(cls: type[nn.Module], form: Form) -> type[nn.Module]:
    """A subclass of cls, under its name, with the forward of the form."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(
        cls.__name__, (PatchedNorm, cls), same | {"_tilenorm_class": cls, "_tilenorm_form": form}
    )


def _new(cls: type[nn.Module], form: Form) -> nn.Module:
    """An instance without its state, for pickle and deepcopy."""
    patched = _patched(cls, form)
    return patched.__new__(patched)


class Report:
    """What `patch` did: `patched` and `left`, of each module that looks like a norm."""

    def __init__(
        self, patched: list[Patched], left: list[Left], modules: list[tuple[nn.Module, type]]
    ):
        self.patched, self.left = tuple(patched), tuple(left)
        self._modules = modules  # and their classes now, in the order of `patched`
        self._undone = False

    def undo(self) -> None:
        """Give the patched modules their own classes again: they are as they were.

        Raises RuntimeError, before anything changes, when that was done already, or when a module
        has got yet another class since, as from fully_shard.
        """
        if self._undone:
            raise RuntimeError("undo: this patch is undone already")
        for (module, cls), entry in zip(self._modules, self.patched, strict=True):
            if type(module) is not cls:
                raise RuntimeError(
                    f"undo: {entry.name} got another class after the patch, {_path(type(module))}"
                )
        for (module, _), entry in zip(self._modules, self.patched, strict=True):
            module.__class__ = entry.cls
        self._undone, self._modules = True, []

    def __str__(self) -> str:
        kinds = {}
        for name, cls, how in self.patched:
            kinds.setdefault(f"{cls.__name__} is {how}", []).append(name)
        for name, cls, reason in self.left:
            kinds.setdefault(f"{cls.__name__} is left, {reason}", []).append(name)
        lines = [f"{len(self.patched)} norms patched, {len(self.left)} left"]
        for kind, names in kinds.items():
            others = f", {len(names) - 2} others" if len(names) > 2 else ""
            last = f" and {names[-1]}" if len(names) > 1 else ""
            lines.append(f"  {kind}: {names[0]}{others}{last}")
        return "\n".join(lines)


def patch(model: nn.Module, *, where: Callable[[str, nn.Module], bool] | None = None) -> Report:
    """Let tilenorm compute the norms of a model, in place.

    A module is taken for a norm by its numbers, not by its name: a twin of its class with random
    parameters is run on the CPU, in float32 and 16 bits, and has to give, with its gradients, what
    tilenorm.rms_norm, layer_norm or gated_rms_norm give for one choice of weight offset, rounding
    and eps. So are torch.nn's norms recognised, those of Hugging Face's models, and others. What
    looks like a norm and is none of these is left, and the report says why.

    A patched module stays the same object, with its parameters, hooks and attributes (a changed
    eps counts), and gets another class: a subclass of its own, under the same name, with tilenorm's
    forward. isinstance, state_dict, copies and pickles are as before; a copy is patched too.
    Outputs have the dtypes that they had, under torch.autocast too.

    Args:
        model: any module, which may be a norm itself, on any device, or on meta. Patch it before
            FSDP1, or hooks that replace forward, as Accelerate's, take hold of it.
        where: where(name, module) says which modules to patch, by their qualified names; None is
            all. A module in two places is patched if it holds for one of them.

    Returns:
        A report of what was patched and what was left, readable as a str, with undo().

    Raises:
        TypeError: model is not a module, or where not a function.
        RuntimeError: some of it is patched already; nothing has changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: argument 'model' takes a torch.nn.Module, got {_kind(model)}")
    if where is not None and not callable(where):
        raise TypeError(f"patch: argument 'where' takes a function or None, got {_kind(where)}")
    names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, (name, *_) in names.items():
        if isinstance(module, PatchedNorm):
            raise RuntimeError(f"patch: {name or 'the model'} is patched already; undo that first")
    patched, left, found = [], [], []
    for module, places in names.items():
        if not looks_like_a_norm(module):
            continue
        name, cls = ", ".join(places) or "the model", type(module)
        try:
            if isinstance(module, (RMSNorm, LayerNorm)):
                raise Unrecognised("it is tilenorm's")
            if where is not None and not any(where(place, module) for place in places):
                raise Unrecognised("where does not hold")
            form = recognise(module)
        except Unrecognised as reason:
            left.append(Left(name, cls, str(reason)))
        else:
            patched.append(Patched(name, cls, form.describe(module)))
            found.append((module, _patched(cls, form)))
    for module, cls in found:
        module.__class__ = cls
    return Report(patched, left, found)


def _kind(value: object) -> str:
    return type(value).__name__


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
