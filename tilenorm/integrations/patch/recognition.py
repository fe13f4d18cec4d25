"""recognise: find the tilenorm function and options that compute what a norm module computes.

The name of a module does not say what it computes. recognise therefore runs twins of the module and
compares the results with all forms of tilenorm. The module itself does not run or change.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...table import OPTIONS
from .form import Form
from .trials import (
    FAR_LEADING,
    MAX_ELEMENTS,
    MORE_LEADING,
    SCALES,
    Rows,
    Trial,
    edges,
    is_half,
    sizes_of,
    trials_of,
)
from .twin import (
    NeedsGPU,
    Refused,
    Unrecognised,
    check_branches,
    on_device,
    parameters_of,
    random,
    run,
    twin_of,
    with_forward,
)
from .wide import FEW_ELEMENTS, MANY_ELEMENTS, narrowed, shape_of, widened

HARD_CODED_EPS = (None, 1e-5, 1e-6, 1e-8, 1e-12)
NO_EPS = 1e-26  # no row of a trial shows it
WITHOUT_EPS = (
    "it is a norm without an eps that patch can see, as F.normalize(x) times the root of the size"
    " is: tilenorm.compile(inexact=True) replaces that"
)
ROUNDINGS = {"rounding": "late"}, {"rounding": "early"}, {"rounding": "early", "promotes": True}
PYTORCH_NORMS = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether the class name contains "norm", or the module has an eps and no submodules."""
    if "norm" in type(module).__name__.lower():
        return True
    return bool(_eps_names(module)) and not any(True for _ in module.children())


def recognise(module: nn.Module) -> Form:
    """The form that describes a module's forward. Raises Unrecognised if there is none."""
    # A new thread has gradients, no autocast and no default device. Anomaly mode belongs to the
    # process. In it, PyTorch calls functions of traceback for each operation. They would count as
    # the forward's, and patch would take minutes.
    with ThreadPoolExecutor(1) as thread, torch.autograd.set_detect_anomaly(False):
        return thread.submit(_untraced, module).result()


def _untraced(module: nn.Module) -> Form:
    sys.settrace(None)  # a debugger's function would be called for each line
    return _recognised(module)


def _recognised(module: nn.Module) -> Form:
    arguments, numbers = _arguments(module)
    _check_attributes(module)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PyTorch warns about mixed dtypes
        try:
            return _form_of_any_size(module, arguments, numbers)
        except NeedsGPU:
            if not torch.cuda.is_available():
                raise
            return _form_of_any_size(on_device(module, "cuda"), arguments, numbers)


def _form_of_any_size(module: nn.Module, arguments: tuple[str, ...], numbers: list[int]) -> Form:
    shape = shape_of(module)
    if math.prod(shape) > FEW_ELEMENTS:
        try:
            form = _form_of_any_layout(narrowed(module, shape), arguments, numbers)
            return widened(form, _turned(module) if form.channels else module, shape)
        except Unrecognised:
            if math.prod(shape) > MANY_ELEMENTS:
                raise
    return _form_of_any_layout(module, arguments, numbers)


def _form_of_any_layout(module: nn.Module, arguments: tuple[str, ...], numbers: list[int]) -> Form:
    """The form of a norm of rows, or of the channels of images, which are dimension 1."""
    try:
        return _tried(module, arguments, numbers)
    except Refused as reason:
        if 1 not in numbers or isinstance(reason, NeedsGPU):
            raise
        try:
            form = _tried(_turned(module), arguments[:1], [1], needs_16_bits=False)
        except Refused:
            raise reason from None
    x = random((2, *(form.sizes or shape_of(module)), 3, 5), torch.float32, 0)
    y = run(twin_of(module, torch.float32), x)
    return replace(form, channels="input" if y.is_contiguous() else "last")


def _turned(module: nn.Module) -> nn.Module:
    """A module of the same state that takes and gives the channels last."""
    cls: Any = type(module)

    def forward(self, x):
        return cls.forward(self, x.movedim(-1, 1)).movedim(1, -1)

    return with_forward(module, forward)


def _tried(
    module: nn.Module, arguments: tuple[str, ...], numbers: list[int], needs_16_bits: bool = True
) -> Form:
    """The form of a module with all trials. needs_16_bits: as in _rounded_form."""
    rows, trials = trials_of(module, numbers)
    form = _exact_form(module, rows, trials, arguments)
    _check_channels(module, form, rows)
    for trial in (trial for call in form.calls for trial in edges(module, rows, *call)):
        if not trial.fits(form):
            raise Unrecognised(f"it matches {form.describe(module)}, but not for {trial.kind}")
    form = _rounded_form(module, form, trials, needs_16_bits)
    for number, dims in form.calls:
        fixed = () if rows.is_free else rows.tail
        check_branches(twin_of(module, torch.float32), fixed, dims, number)
    form = replace(form, autocasts=_follows_autocast(module, trials[0].inputs))
    return _form_of_more_dims(module, form, rows, trials[0].inputs)


def _arguments(module: nn.Module) -> tuple[tuple[str, ...], list[int]]:
    """The names of the arguments that may be the input and a gate, and how many to try to pass."""
    signature = inspect.signature(type(module).forward)
    _, *parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][
        :2
    ]
    numbers = []
    for number in range(1, len(positional) + 1):
        with suppress(TypeError):
            signature.bind(None, *[None] * number)
            numbers.append(number)
    if not numbers:
        takes = ", ".join(map(str, parameters))
        raise Unrecognised(f"its forward takes ({takes}), not an input and perhaps a gate")
    return tuple(p.name if p.kind is p.POSITIONAL_OR_KEYWORD else "" for p in positional), numbers


def _check_attributes(module: nn.Module) -> None:
    """Raise Unrecognised if forward may use more than parameters of one shape and plain values."""
    parameters = parameters_of(module)
    listed = ", ".join(f"{name} {list(p.shape)}" for name, p in parameters.items())
    its = f"its parameters are {listed}"
    shapes = {tuple(p.shape) for p in parameters.values()}
    elements, columns = ({math.prod(s[start:]) for s in shapes} for start in (0, -1))
    rows = math.prod(sizes_of(getattr(module, "normalized_shape", ())) or (0,))
    values = [*module.named_buffers(recurse=False), *vars(module).items()]
    others = [name for name, value in values if isinstance(value, Tensor)]
    emptied = f"its parameters are empty ({listed}), perhaps gathered later"
    if any(hasattr(p, "ds_id") for p in parameters.values()):
        gathered = "deepspeed.zero.GatheredParameters(model.parameters())"
        emptied = f"DeepSpeed ZeRO 3 holds its parameters: patch the model within {gathered}"
    floating = all(p.is_floating_point() for p in parameters.values())
    reasons = {
        "it has submodules": [*module.children()],
        f"it has other tensors than parameters: {', '.join(others)}": others,
        "its parameters do not have a floating-point dtype": not floating,
        emptied: 0 in elements,
        f"{its}, not a weight and a bias of one shape": len(parameters) > 2 or len(shapes) > 1,
        f"{its}, of more than {MAX_ELEMENTS} elements": max(elements, default=0) > MAX_ELEMENTS,
        "its rows have one element": rows == 1,
        f"{its}, not a number for each column": 1 in columns,
    }
    for reason, applies in reasons.items():
        if applies:
            raise Unrecognised(reason)


def _exact_form(
    module: nn.Module, rows: Rows, trials: list[Trial], arguments: tuple[str, ...]
) -> Form:
    """The form that matches a module's float32 outputs and gradients; rounding stays "late"."""
    count, width = trials[0].columns(rows.tail), rows.tail[-1]
    options = {"arguments": arguments, "sizes": rows.sizes}
    options["dims"] = len(rows.tail) if count == math.prod(rows.tail) else 1
    if len(rows.tail) > 2 and options["dims"] == 1 and parameters_of(module):
        sizes = list(rows.tail)
        raise Unrecognised(f"its parameters have shape {sizes}, more than a row for each head")
    if 1 < count < width and width % count == 0 and not rows.is_free:
        options["groups"] = width // count
    form, calls = None, []
    for number in (1, 2):
        exact = [t for t in trials if len(t.inputs) == number and not is_half(t.dtypes)]
        forms = _forms(module, number, options) if form is None else _gated(form)
        match = next((f for f in forms if all(t.fits(f) for t in exact)), None) if exact else None
        if match:
            form = match
            name = exact[0].other_gradient(form)
            if name:
                text = f"its outputs match {form.describe(module)}; the gradient of {name} does not"
                raise Unrecognised(text)
            calls += dict.fromkeys((number, trial.inputs[0].dim()) for trial in exact)
    if form is None:
        exact = [t for t in trials if len(t.inputs) == 1 and not is_half(t.dtypes)]
        matches = (all(t.fits(f) for t in exact) for f in _forms(module, 1, options, (NO_EPS,)))
        if exact and any(matches):
            raise Unrecognised(WITHOUT_EPS)
        raise Unrecognised("its outputs match no norm of tilenorm")
    return replace(form, calls=tuple(calls))


def _forms(
    module: nn.Module, number: int, options: dict, hard_coded: tuple = HARD_CODED_EPS
) -> Iterator[Form]:
    """All forms that are possible with a module's parameters."""
    names = tuple(parameters_of(module))
    for norm, eps, (weight, bias), offset in product(
        ("rms", "layer"),
        dict.fromkeys((*_eps_names(module), *hard_coded)),
        dict.fromkeys(permutations((*names, None, None)[:2])),
        (0.0, 1.0) if names else (0.0,),
    ):
        form = Form(norm, eps, weight=weight, bias=bias, offset=offset, **options)
        if norm == "rms" or form.epsilon(module) is not None:
            yield from (form,) if number == 1 else _gated(form)


def _gated(form: Form) -> Iterator[Form]:
    for gate, activation in product(("after", "before"), OPTIONS["activation"].words):
        yield replace(form, gate=gate, activation=activation)


def _check_channels(module: nn.Module, form: Form, rows: Rows) -> None:
    """Raise Unrecognised if forward takes rows of channels, but normalises images in dimension 1,
    as GroupNorm does: images are what such a module is for.
    """
    if not parameters_of(module) or len(rows.tail) > 1:
        return
    for number, dims in product(dict(form.calls), (3, 4)):
        shape = (2, *rows.tail, 3, 5)[:dims]
        if (number, dims) not in form.calls:
            with suppress(Refused):
                run(twin_of(module, torch.float32), *[random(shape, torch.float32, 0)] * number)
                text = f"its forward takes shape {list(shape)}, with channels before others"
                raise Unrecognised(text)


def _rounded_form(module: nn.Module, form: Form, trials: list[Trial], needs_16_bits: bool) -> Form:
    """The form, completed by how the module rounds 16-bit dtypes and promotes mixed dtypes.
    needs_16_bits: whether a module that rounds 16 bits in another way is left for float32 too.
    """
    text = f"it matches {form.describe(module)}"
    by_dtypes = {}
    for trial in trials:
        if len(trial.inputs) in dict(form.calls):
            by_dtypes.setdefault(trial.dtypes, []).append(trial)
    needed = {dtypes for dtypes in by_dtypes if len({*dtypes} - {None}) == 1}
    needed = {dtypes for dtypes in needed if needs_16_bits or not is_half(dtypes)}
    forms = {}
    offsets = (False, True) if form.offset else (False,)
    for rounds_offset, chosen in product(offsets, ROUNDINGS):
        rounded = replace(form, rounds_offset=rounds_offset, **chosen)
        fitting = [d for d, tried in by_dtypes.items() if all(t.fits(rounded) for t in tried)]
        if needed <= {*fitting}:
            forms[rounded] = fitting
    if not forms:
        raise Unrecognised(f"{text} in float32, but rounds or casts 16 bits differently")
    form = max(forms, key=lambda rounded: len(forms[rounded]))
    served = []
    for dtypes in forms[form]:
        name = by_dtypes[dtypes][0].other_gradient(form)
        if not name:
            served.append(dtypes)
        elif dtypes in needed:
            text = f"it matches {form.describe(module)}; its gradient of {name} does not"
            raise Unrecognised(f"{text} in {dtypes[0]}")
    return replace(form, dtypes=tuple(served), mixed=len(served) < len(by_dtypes))


def _form_of_more_dims(module: nn.Module, form: Form, rows: Rows, inputs: list[Tensor]) -> Form:
    """The form, completed by the inputs of more dimensions than those of other trials.

    One run decides for each number of leading sizes up to 8, and then for two far larger ones. If
    the form matches all of them, it serves every number.
    """
    twin, refused = twin_of(module, torch.float32), []
    x = inputs[0].reshape(-1, len(SCALES), *rows.tail)
    for number in dict(form.calls):
        tensors = [x, random(x.shape, torch.float32, 1)][:number]
        for leading in (*MORE_LEADING, *FAR_LEADING):
            shape, dims = (len(x), *(1,) * (leading - 2), len(SCALES)), leading + len(rows.tail)
            shaped = [t.reshape(*shape, *rows.tail) for t in tensors]
            try:
                fits = Trial("", (), twin, shaped, run(twin, *shaped)).fits(form)
            except Refused:
                break
            if not fits:
                refused.append(max(form.dims_of(number)) + 1)
                break
            if leading in MORE_LEADING:
                form = replace(form, calls=(*form.calls, (number, dims)))
        else:
            form = replace(form, beyond=(*form.beyond, number))
    return replace(form, own_from=min(refused, default=None))


def _follows_autocast(module: nn.Module, inputs: list[Tensor]) -> bool:
    """Whether torch.autocast changes the module's output dtype, as it does for PyTorch's norms."""
    twin = twin_of(module, torch.bfloat16)
    with suppress(Refused), torch.autocast("cpu", torch.bfloat16), _CudaAutocastOnCpu():
        return run(twin, *(t.bfloat16() for t in inputs)).dtype != torch.bfloat16
    return False


class _CudaAutocastOnCpu(TorchFunctionMode):
    """Under CPU autocast, casts the inputs of PyTorch's norms to float32, as CUDA autocast does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in PYTORCH_NORMS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return function(*args, **kwargs)


def _eps_names(module: nn.Module) -> list[str]:
    """The names of the module's attributes that hold an eps. PyTorch's RMSNorm may hold None."""
    return [
        name
        for name, value in vars(module).items()
        if "eps" in name.lower() and (value is None or type(value) in (int, float))
    ]
