"""patch: give the norm modules of a model tilenorm's forward, in place, with a report and undo."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ...nn import LayerNorm, RMSNorm
from ...ops.arguments import check_argument
from .blocks import REWRITERS, patched_block
from .classes import (
    UNREACHED,
    PatchedModule,
    calls_of_class,
    change_classes,
    names_of,
    patched_norm,
    revert,
    title,
)
from .likeness import likeness
from .recognition import looks_like_a_norm, recognise
from .twin import Unrecognised, place_of

Result = type[nn.Module] | str  # the patched class of a module, or the reason why it is left


class Patched(NamedTuple):
    """A report entry for a patched module. name: its qualified names in the model, joined by
    commas. cls: its class before the patch. how: the tilenorm function and options of its forward.
    """

    name: str
    cls: type[nn.Module]
    how: str


class Left(NamedTuple):
    """A report entry for a module that looks like a norm and was not patched; reason says why."""

    name: str
    cls: type[nn.Module]
    reason: str


class Report:
    """The result of `patch`: an entry for each module that looks like a norm, in `patched`, or with
    a reason in `left`.
    """

    def __init__(self, patched: dict[nn.Module, Any], left: dict, names: dict[nn.Module, str]):
        self.patched = tuple(
            Patched(names[m], type(m), cls._tilenorm_how(m)) for m, cls in patched.items()
        )
        self.left = tuple(Left(names[m], type(m), reason) for m, reason in left.items())
        self._modules = {m: names[m] for m in patched}

    def undo(self) -> None:
        """Revert the patch: what `unpatch` does, for the modules of this report that are patched.

        Copies of these modules stay patched, also those that peft makes for modules_to_save.
        Raises RuntimeError, and changes no module, if the patch has already been undone, or if
        `unpatch` would raise.
        """
        names = {m: name for m, name in self._modules.items() if isinstance(m, PatchedModule)}
        if self.patched and not names:
            raise RuntimeError("undo: this patch has already been undone")
        revert("undo", names)
        self._modules = {}

    def __str__(self) -> str:
        """One line for each combination of class and result, with the names of its modules."""
        if not self.patched and not self.left:
            return "no norm was found"
        names_by_result = {}
        for text, entries in (("runs {}", self.patched), ("is not patched ({})", self.left)):
            for name, cls, how in entries:
                result = f"{cls.__name__} {text.format(how)}"
                names_by_result.setdefault(result, []).append(name)
        lines = [f"{len(self.patched)} modules patched, {len(self.left)} not patched"]
        for result, names in names_by_result.items():
            others = f", {len(names) - 2} others" if len(names) > 2 else ""
            end = f" and {names[-1]}" if len(names) > 1 else ""
            lines.append(f"  {result}: {names[0]}{others}{end}")
        return "\n".join(lines)


def patch(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    residual: bool = False,
    modulation: bool = False,
    rotation: bool = False,
) -> Report:
    """Make tilenorm compute the norms of a model. The model is changed in place.

    patch recognises a norm by what it computes, not by its name. It runs a copy of the module with
    random parameters on the CPU. The outputs and gradients in float32, bfloat16 and float16 must
    match tilenorm.rms_norm, layer_norm or a gated norm for one choice of weight offset, rounding,
    groups and eps. A module that looks like a norm is not patched, and the report gives the reason,
    if it matches no choice, does more than compute, or branches on sizes or values. The runs decide
    which numbers of dimensions, dtypes and arguments tilenorm serves. Any other call runs the
    forward of the module's own class, and raises what it raised before.

    A patched module is the same object, with the same parameters, hooks and attributes. A later
    change of its eps takes effect. Its class becomes a subclass of its former class, with the same
    name and with tilenorm's forward. isinstance, state_dict, copying and pickling work as before,
    and a copy of a patched module is patched too. Outputs keep their dtypes, also under
    torch.autocast. Where hooks of Accelerate and diffusers, or Hugging Face's tensor parallelism,
    have replaced a module's forward by a function that calls the former one, that function stays
    and calls tilenorm's. patch leaves the module if it does not find the former forward.

    Args:
        model: a module on any device, including meta; it may be a norm itself. Patch the model
            before FSDP1 wraps it.
        where: where(name, module) returns whether to patch a module, given its qualified name.
            None patches every norm. A module that appears at several places of the model is
            patched if where returns true for one of its names.
        residual: whether blocks also add and normalise in one pass (add_rms_norm, add_layer_norm).
            The source of a block's forward is read. Where it has `self.norm(a + b)`, or `x = a + b`
            before a statement with `self.norm(x)`, the block's class becomes a subclass whose
            forward computes both at once. Only names, constants, attributes and an `if` may stand
            between them, for which no other code runs. The outputs have the same bits. The gradient
            of the sum is rounded once instead of twice. A norm with hooks, and terms of several
            shapes or dtypes, run as before. The sum is contiguous, whatever strides the terms have.
        modulation: whether blocks also modulate in the pass of the norm (modulated_rms_norm,
            modulated_layer_norm), as the adaptive norms of diffusion transformers do. The source is
            read in the same way. Where it has `self.norm(x) * (1 + a) + b`, or `y = self.norm(x)`
            right before `y = y * (1 + a) + b`, one pass computes both, if a and b have a row for
            each sample or token, or one row. It computes in float32 and rounds once. The block
            rounds after each operation: in 16 bits, the results have other bits and a smaller
            error. With residual, a sum right before belongs to the pass. What CUDA's autocast runs
            is as before. These passes have not been timed on a GPU.
        rotation: whether attention also rotates queries and keys in the pass of their norms
            (rms_norm_rope). The source is read in the same way. Where it normalises both, may swap
            heads and tokens, and calls a function with the numbers of Hugging Face's
            apply_rotary_pos_emb, one pass computes all. In 16 bits the results have the same bits
            with Qwen 3's norms. Where a norm rounds once, as those of Gemma 3 and OLMo 2 do, the
            pass rounds once too, and they have other bits. It has not been timed on a GPU.

    Returns:
        A report, whose str() is readable. report.undo() and tilenorm.unpatch(model) revert the
        patch.

    Raises:
        TypeError: model is not a module, where is neither a function nor None, or residual,
            modulation or rotation is not a bool.
        RuntimeError: a module of the model is already patched. No module is changed in this case.
    """
    check_argument("patch", "model", model, isinstance(model, nn.Module), "a torch.nn.Module")
    check_argument("patch", "where", where, where is None or callable(where), "a function or None")
    asked = {"modulation": modulation, "residual": residual, "rotation": rotation}
    for name, value in asked.items():
        check_argument("patch", name, value, isinstance(value, bool), "a bool")
    names = names_of(model)
    for module, (name, *_) in names.items():
        if isinstance(module, PatchedModule):
            text = f"{name or 'the model'} is already patched"
            raise RuntimeError(f"patch: {text}; tilenorm.unpatch(model) reverts that")
    results: dict[nn.Module, Result] = {}
    known: dict[tuple | None, Result] = {}
    for module in filter(looks_like_a_norm, names):
        if isinstance(module, (RMSNorm, LayerNorm)):
            results[module] = "it is a tilenorm module"
        elif where is not None and not any(where(name, module) for name in names[module]):
            results[module] = "where() excludes it"
        else:
            key = likeness(module)
            recognised = None if key is None else known.get(key)
            results[module] = _result(module, partial(_recognised, module), recognised)
            if results[module] != UNREACHED:
                known[key] = results[module]
    norms = {module for module, result in results.items() if not isinstance(result, str)}
    kinds = tuple(kind for kind in REWRITERS if asked[kind])
    for block in names if kinds else ():
        inside = tuple(name for name, child in block.named_children() if child in norms)
        if inside and block not in norms:
            results[block] = _result(block, partial(patched_block, type(block), inside, kinds))
    left = {m: reason for m, reason in results.items() if isinstance(reason, str)}
    patched: dict = {m: cls for m, cls in results.items() if m not in left}
    report = Report(patched, left, {module: title(names[module]) for module in results})
    change_classes([*patched.items()])
    return report


def _recognised(module: nn.Module) -> type[nn.Module]:
    return patched_norm(type(module), recognise(module))


def _result(
    module: nn.Module, make: Callable[[], type[nn.Module]], known: Result | None = None
) -> Result:
    """What is made for a module, or known of one that is alike; or why the module is left."""
    if "forward" in vars(module) and not calls_of_class(module):
        return UNREACHED
    if known is not None:
        return known
    try:
        return make()
    except Unrecognised as reason:
        return str(reason)
    except Exception as error:  # a module that cannot be tried must not stop those that can
        return f"trying it raised {place_of(error)}"
