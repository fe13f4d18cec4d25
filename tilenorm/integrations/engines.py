"""What the plugins of inference engines share: rounding by model, the report, and warming up.

An engine has one class of RMSNorm for all models. Hugging Face has one for each model, and their
roundings differ. So a norm of an engine runs tilenorm with the rounding of Hugging Face's class for
this model. `recognise` finds it by running that class, as tilenorm.patch does for a trainer. Where
no class tells it, or two classes differ, the engine's own norm runs, and the report says why.
"""

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.functional import add_rms_norm, rms_norm
from ..settings import settings
from ..table import OPTIONS
from ..tools.fingerprint import fingerprint
from .patch.form import Form
from .patch.recognition import looks_like_a_norm, recognise

NAME = "tilenorm"  # of the entry points
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZE = 64  # of the norms of Hugging Face that are tried
# What a class of torch.nn looks like in the code of a model that uses it.
IN_SOURCE = {"nn.RMSNorm(": nn.RMSNorm, "nn.LayerNorm(": nn.LayerNorm}
# Batches that compile both variants of a kernel: few rows, and as many as fill these bytes.
FEW_ROWS, MANY_BYTES = 8, 1 << 25
ATTRIBUTE = "tilenorm_rounding"  # of a norm that runs tilenorm


class Kind(NamedTuple):
    """What tells the norms of one model apart. norm: "rms" or "layer". gate: where a gate
    multiplies, "after" the norm or "before" it; None without one.
    """

    norm: str
    offset: float = 0.0
    gate: str | None = None


class Layer(NamedTuple):
    """A norm of an engine. weighted: whether it has a weight; a norm without one has no rounding to
    choose. rounding: where the engine's layer decides it itself.
    """

    kind: Kind
    weighted: bool = True
    rounding: str | None = None


class Entry(NamedTuple):
    """A norm in a report: its name in the model, its class, and what runs it, or why not."""

    name: str
    cls: str
    how: str


class Report(NamedTuple):
    """What runs the norms of a loaded model. model: its class. ran: those that run tilenorm. left:
    those that run the engine's own code. read: those of `ran` whose weights another class reads,
    which may then normalise past them.
    """

    model: str
    ran: tuple[Entry, ...]
    left: tuple[Entry, ...]
    read: tuple[Entry, ...]

    def __str__(self) -> str:
        count = len(self.ran)
        left = "" if self.left else "; left: none"
        lines = [f"{count} of {count + len(self.left)} norms of {self.model} run tilenorm{left}"]
        lines += _lines("", self.ran) + _lines("left: ", self.left) + _lines("", self.read)
        return "\n  ".join(lines)


def asked_for(variable: str) -> bool:
    """Whether TILENORM_ENGINES, or the variable that lists an engine's plugins, names tilenorm.

    Raises ValueError for a TILENORM_ROUNDING that is no rounding.
    """
    names = os.environ.get(variable, "").split(",")
    if not settings().engines and NAME not in map(str.strip, names):
        return False
    rounding, words = settings().rounding, OPTIONS["rounding"].words
    if rounding not in (None, *words):
        raise ValueError(f"TILENORM_ROUNDING takes {' or '.join(words)}, got {rounding!r}")
    return True


def prepare(model: nn.Module, config: Any, layer_of: Callable[[nn.Module], Layer | str]) -> Report:
    """Decide for each norm of an engine's model whether it runs tilenorm, and with which rounding.

    The rounding is set as an attribute of the norm; None has the engine's own code run.

    Args:
        config: the model's configuration of Hugging Face.
        layer_of: describes a norm of the engine, or says why tilenorm does not serve it.
    """
    roundings = roundings_of(config)
    ran, left = [], []
    for name, module in model.named_modules():
        if not looks_like_a_norm(module):
            continue
        layer, rounding = layer_of(module), None
        if isinstance(layer, str):
            how = layer
        else:
            rounding, how = _chosen(layer, roundings, config)
        if rounding or hasattr(module, ATTRIBUTE):
            setattr(module, ATTRIBUTE, rounding)
        entries = ran if rounding else left
        entries.append(Entry(name, type(module).__name__, how))
    prepared = Report(type(model).__name__, tuple(ran), tuple(left), tuple(_readers(model)))
    model.tilenorm_report = prepared
    return prepared


def take_over(
    model: nn.Module,
    config: Any,
    layer_of: Callable[[nn.Module], Layer | str],
    run: Callable[[nn.Module, Tensor, Tensor | None], object],
    logger: logging.Logger,
) -> None:
    """Prepare a model that an engine has loaded, warm up its norms on a GPU, and log the report.

    Args:
        config: the engine's configuration of the model, with `hf_config` and `dtype`.
        layer_of: see prepare.
        run: see warm.
    """
    prepared = prepare(model, config.hf_config, layer_of)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        warm(model, config.dtype, device, run)
        torch.cuda.empty_cache()  # the engine measures what is left
    tell(prepared, logger)


def report(model: nn.Module) -> str:
    """The report of a loaded model, as a text. Raises RuntimeError where no plugin prepared it."""
    prepared = getattr(model, "tilenorm_report", None)
    if prepared is None:
        raise RuntimeError(
            f"report: tilenorm's plugin was not asked for when {type(model).__name__} was loaded:"
            " set TILENORM_ENGINES=1"
        )
    return str(prepared)


def tell(prepared: Report, logger: logging.Logger) -> None:
    """Log a report and the fingerprint, in one of the processes that share a model."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    log = logger.warning if prepared.left or prepared.read else logger.info
    log("tilenorm: %s\n  fingerprint %s", prepared, fingerprint())


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """y, or (y, x + residual) in the residual's dtype: the norm of the rounded sum."""
    shape = (x.shape[-1],)
    if residual is None:
        return rms_norm(x, shape, weight, eps, **options)
    return add_rms_norm(x, residual, shape, weight, eps, **options)


def warm(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    run: Callable[[nn.Module, Tensor, Tensor | None], object],
) -> None:
    """Run each kind of prepared norm for a small and for a large batch.

    A CUDA graph then captures no compilation, and the first requests wait for none.

    Args:
        dtype: of the model's activations.
        run: calls a norm for x and a residual, or None.
    """
    variants = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, ATTRIBUTE, None) and isinstance(weight, Tensor):
            key = type(module), weight.shape, weight.dtype, getattr(module, ATTRIBUTE)
            variants[key] = module, weight.shape[-1]
    with torch.inference_mode():
        for module, width in variants.values():
            for rows in (FEW_ROWS, max(FEW_ROWS, MANY_BYTES // (width * dtype.itemsize))):
                x = torch.zeros(rows, width, dtype=dtype, device=device)
                run(module, x, None)
                run(module, x, x.clone())


def roundings_of(config: Any) -> dict[Kind, dict[str, str]]:
    """The roundings of each kind of norm in Hugging Face's code of a model, and for each rounding
    the name of a class.
    """
    roundings: dict[Kind, dict[str, str]] = {}
    for code in _modeling(config):
        for cls in _norms_of(code):
            form = form_of_class(cls)
            if form and form.weight and not (form.rounds_offset or form.groups):
                known = roundings.setdefault(Kind(form.norm, form.offset, form.gate), {})
                known.setdefault(form.rounding, cls.__name__)
    return roundings


@cache
def form_of_class(cls: type[nn.Module]) -> Form | None:
    """What the norms of a class of Hugging Face compute, or None for what is no norm."""
    try:
        return recognise(cls(SIZE))
    except Exception:  # a class may take other arguments, and raise what it likes
        return None


def _modeling(config: Any) -> Iterator[ModuleType]:
    """Hugging Face's modules for the type of a model, and for those of its parts."""
    from transformers import CONFIG_MAPPING

    try:
        path = CONFIG_MAPPING[config.model_type].__module__
        if "transformers.models." in path:
            yield import_module(path.replace(".configuration_", ".modeling_"))
    except (KeyError, ImportError):
        pass
    for part in vars(config).values():
        if hasattr(part, "model_type"):
            yield from _modeling(part)


def _norms_of(code: ModuleType) -> list[type[nn.Module]]:
    """The norm classes that a module of a model defines or uses."""
    classes = [v for v in vars(code).values() if isinstance(v, type) and issubclass(v, nn.Module)]
    source = inspect.getsource(code)
    used = [cls for text, cls in IN_SOURCE.items() if text in source]
    return [cls for cls in classes if "norm" in cls.__name__.lower()] + used


def _chosen(layer: Layer, roundings: dict, config: Any) -> tuple[str | None, str]:
    """The rounding of a norm and where it is from, or None and why the engine's own runs."""
    if not layer.weighted:
        return "late", "without a weight"
    if layer.rounding:
        return layer.rounding, f"rounding={layer.rounding}, as the engine's layer has it"
    asked = settings().rounding
    if asked:
        return asked, f"rounding={asked}, as TILENORM_ROUNDING says"
    known = roundings.get(layer.kind, {})
    if len(known) == 1:
        [(rounding, cls)] = known.items()
        return rounding, f"rounding={rounding}, as {cls} of Hugging Face"
    remedy = "TILENORM_ROUNDING=early or late decides"
    if known:
        differ = " and ".join(f"{cls} ({rounding})" for rounding, cls in known.items())
        return None, f"Hugging Face's norms of {config.model_type} differ: {differ}; {remedy}"
    return None, f"Hugging Face's code of {config.model_type} has no such norm; {remedy}"


def _readers(model: nn.Module) -> Iterator[Entry]:
    """The prepared norms whose numbers the class of a parent reads."""
    for path, parent in model.named_modules(remove_duplicate=False):
        for name, child in parent.named_children():
            if getattr(child, ATTRIBUTE, None) and name in _read_by(type(parent)):
                full = f"{path}.{name}" if path else name
                how = f"may be passed by in {type(parent).__name__}, which reads its weight"
                yield Entry(full, type(child).__name__, how)


@cache
def _read_by(cls: type[nn.Module]) -> frozenset[str]:
    """The attributes of a module whose weights the methods of its class read."""
    names: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith(("torch.", "builtins", "abc")):
            try:
                names.update(re.findall(r"\bself\.(\w+)\.weight\b", inspect.getsource(base)))
            except (OSError, TypeError):  # a class that was made without a file
                continue
    return frozenset(names)


def _lines(start: str, entries: Iterable[Entry]) -> list[str]:
    """A line for each combination of class and result."""
    groups: dict[str, list[str]] = {}
    for name, cls, how in entries:
        groups.setdefault(f"{start}{cls} {how}", []).append(name)
    lines = []
    for text, names in groups.items():
        others = f", {len(names) - 2} others" if len(names) > 2 else ""
        end = f" and {names[-1]}" if len(names) > 1 else ""
        lines.append(f"{text}: {names[0]}{others}{end}")
    return lines
