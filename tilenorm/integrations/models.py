"""patch: give the norm modules of a model tilenorm's forward, in place, with a report and undo."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from ..nn import LayerNorm, RMSNorm, refuse_script
from .blocks import Unchanged, patched_block
from .form import Form
from .recognition import Unrecognised, looks_like_a_norm, recognise
from .replaced import change_class


class Patched(NamedTuple):
    """A report entry for a patched module.

    name: the module's qualified names in the model, joined by commas. cls: its class before the
    patch. how: the tilenorm function and the options that compute its forward.
    """

    name: str
    cls: type[nn.Module]
    how: str


class Left(NamedTuple):
    """A report entry for a module that looks like a norm and was not patched; reason says why."""

    name: str
    cls: type[nn.Module]
    reason: str


class PatchedNorm:
    """Mixin with tilenorm's forward: the first base class of a patched module's class."""

    _tilenorm_class: type[nn.Module]
    _tilenorm_form: Form

    def forward(self, *args, **kwargs) -> Tensor:
        return self._tilenorm_form.forward(self, *args, **kwargs)

    def __prepare_scriptable__(self):
        refuse_script(self)

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _new, (self._tilenorm_class, self._tilenorm_form), *state


@cache
def _patched_class(cls: type[nn.Module], form: Form) -> type[nn.Module]:
    """A subclass of cls with the same name, whose forward computes the form."""
    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"_tilenorm_class": cls, "_tilenorm_form": form}
    return type(cls)(cls.__name__, (PatchedNorm, cls), namespace)


def _new(cls: type[nn.Module], form: Form) -> nn.Module:
    """An instance without attributes, for pickle and deepcopy. Pickles contain this name."""
    patched_class = _patched_class(cls, form)
    return patched_class.__new__(patched_class)


class Report:
    """The result of `patch`: an entry for each module that looks like a norm.

    patched: the entries of the patched modules. left: the entries of the others, with a reason.
    """

    def __init__(
        self, patched: list[Patched], left: list[Left], modules: list[tuple[nn.Module, type]]
    ):
        self.patched, self.left = tuple(patched), tuple(left)
        self._modules = modules  # (module, its class after the patch), in the order of `patched`
        self._undone = False

    def undo(self) -> None:
        """Give every patched module back the class that it had before the patch.

        Raises:
            RuntimeError: undo() was called before, or the class of a module has changed since the
                patch (fully_shard changes it). No module is changed in these cases.
        """
        if self._undone:
            raise RuntimeError("undo: this patch has already been undone")
        for (module, cls), entry in zip(self._modules, self.patched, strict=True):
            if type(module) is not cls:
                now = f"{type(module).__module__}.{type(module).__qualname__}"
                raise RuntimeError(
                    f"undo: the class of {entry.name} changed after the patch, to {now}"
                )
        for (module, _), entry in zip(self._modules, self.patched, strict=True):
            change_class(module, entry.cls)
        self._undone, self._modules = True, []

    def __str__(self) -> str:
        """One line for each combination of class and result, with the names of its modules."""
        names_by_result = {}
        for name, cls, how in self.patched:
            names_by_result.setdefault(f"{cls.__name__} runs {how}", []).append(name)
        for name, cls, reason in self.left:
            result = f"{cls.__name__} is not patched ({reason})"
            names_by_result.setdefault(result, []).append(name)
        lines = [f"{len(self.patched)} modules patched, {len(self.left)} not patched"]
        for result, names in names_by_result.items():
            others = f", {len(names) - 2} others" if len(names) > 2 else ""
            last = f" and {names[-1]}" if len(names) > 1 else ""
            lines.append(f"  {result}: {names[0]}{others}{last}")
        return "\n".join(lines)


def patch(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    residual: bool = False,
) -> Report:
    """Make tilenorm compute the norms of a model. The model is changed in place.

    patch recognises a norm by what it computes, not by its name. It makes a copy of the module with
    random parameters and runs the copy on the CPU. The float32 outputs and gradients and the 16-bit
    outputs must match tilenorm.rms_norm, layer_norm or a gated norm for one choice of weight
    offset, rounding and eps. The norms of torch.nn and most norms of Hugging Face's models match. A
    module that looks like a norm and matches no choice is not patched, and the report gives the
    reason.

    A patched module is the same object, with the same parameters, hooks and attributes. A later
    change of its eps takes effect. Where a forward was replaced on the module by a function that
    calls the former one, as Hugging Face's tensor parallelism does, that function stays and calls
    tilenorm's. Its class becomes a subclass of its former class, with the same
    name and with tilenorm's forward. isinstance, state_dict, copying and pickling work as before,
    and a copy of a patched module is patched too. Outputs keep their dtypes, also under
    torch.autocast.

    Args:
        model: a module on any device, including meta; it may be a norm itself. Patch the model
            before FSDP1 wraps it, and before Accelerate's hooks replace a forward: they keep the
            former one where patch does not look.
        where: where(name, module) returns whether to patch a module, given its qualified name.
            None patches every norm. A module that appears at several places of the model is
            patched if where returns true for one of its names.
        residual: whether blocks also add and normalise in one pass (add_rms_norm, add_layer_norm).
            The source of a block's forward is read. Where it has `self.norm(a + b)`, or where
            `x = a + b` stands before `y = self.norm(x)` with nothing but copies of x between them,
            as in most layers of Hugging Face, the block's class becomes a subclass whose forward
            computes both at once.
            The outputs have the same bits. The gradient of the sum is rounded once instead of
            twice. A norm with hooks, and terms of several shapes or dtypes, run as before.

    Returns:
        A report of the modules that were patched and of those that were not. str(report) is
        readable, and report.undo() reverts the patch.

    Raises:
        TypeError: model is not a module, where is neither a function nor None, or residual is not a
            bool.
        RuntimeError: a module of the model is already patched. No module is changed in this case.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"patch: argument 'model' takes a torch.nn.Module, got {type(model).__name__}"
        )
    if where is not None and not callable(where):
        raise TypeError(
            f"patch: argument 'where' takes a function or None, got {type(where).__name__}"
        )
    if not isinstance(residual, bool):
        raise TypeError(f"patch: argument 'residual' takes a bool, got {type(residual).__name__}")
    names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, (name, *_) in names.items():
        if isinstance(module, PatchedNorm):
            raise RuntimeError(
                f"patch: {name or 'the model'} is already patched; undo that patch first"
            )
    patched, left, new_classes = [], [], []
    for module, module_names in names.items():
        if not looks_like_a_norm(module):
            continue
        name, cls = ", ".join(module_names) or "the model", type(module)
        try:
            if isinstance(module, (RMSNorm, LayerNorm)):
                raise Unrecognised("it is a tilenorm module")
            if where is not None and not any(where(n, module) for n in module_names):
                raise Unrecognised("where() excludes it")
            form = recognise(module)
        except Unrecognised as reason:
            left.append(Left(name, cls, str(reason)))
        else:
            patched.append(Patched(name, cls, form.describe(module)))
            new_classes.append((module, _patched_class(cls, form)))
    if residual:
        _add_blocks(names, patched, left, new_classes)
    for module, cls in new_classes:
        change_class(module, cls)
    return Report(patched, left, new_classes)


def _add_blocks(names: dict[nn.Module, list[str]], patched: list, left: list, new: list) -> None:
    """Add entries for the blocks: the modules with a norm among their children that is patched."""
    norms = {module for module, _ in new}
    for block, block_names in names.items():
        inside = tuple(name for name, child in block.named_children() if child in norms)
        if not inside or block in norms:
            continue
        name, cls = ", ".join(block_names) or "the model", type(block)
        try:
            block_class = patched_block(cls, inside)
        except Unchanged as reason:
            left.append(Left(name, cls, str(reason)))
        else:
            how = f"the sum before {' and '.join(block_class._tilenorm_sums)} with the norm"
            patched.append(Patched(name, cls, how))
            new.append((block, block_class))
