"""recognise: find the tilenorm function and options that compute what a norm module computes.

The name of a module does not say what it computes. recognise therefore runs twins of the module and
compares the results with all forms of tilenorm. The module itself does not run or change.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...table import OPTIONS
from .form import Form
from .replaced import calls_of_class
from .trials import (
    MAX_ELEMENTS,
    Run,
    Taken,
    float32,
    matches,
    normalised_together,
    other_gradient,
    sizes_of,
    sliced,
    small_sizes,
    taken_by,
    transposed,
    unusual,
)
from .twin import (
    TRACED_SIZES,
    Refused,
    Unrecognised,
    check_branches,
    parameters_of,
    random,
    run,
    twin_of,
)

HARD_CODED_EPS = (None, 1e-5, 1e-6, 1e-8, 1e-12)
HALF = (torch.bfloat16, torch.float16)
PYTORCH_NORMS = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether the class name contains "norm", or the module has an eps and no submodules."""
    if "norm" in type(module).__name__.lower():
        return True
    return bool(_eps_names(module)) and not any(True for _ in module.children())


def recognise(module: nn.Module) -> Form:
    """The form that describes a module's forward. Raises Unrecognised if there is none."""
    if sys.getprofile() is None:
        return _recognised(module)
    # The runs are watched by a profile function. A thread has one of its own: that of cProfile
    # cannot be set again.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_recognised, module).result()


def _recognised(module: nn.Module) -> Form:
    arguments, numbers = _arguments(module)
    _check_attributes(module)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")  # PyTorch warns about mixed dtypes
        taken = taken_by(module, numbers)
        form = _exact_form(module, taken, arguments)
        form = _form_at_edges(module, form, taken)
        form = _rounded_form(module, form, taken)
        _check_channels(module, form, taken)
        for number, dims in form.calls:
            leading = dims - len(taken.tail)
            dynamic = leading + (not parameters_of(module) and form.sizes is None)
            shape = TRACED_SIZES[:leading] + taken.tail
            check_branches(twin_of(module, torch.float32), shape, dynamic, number)
        return replace(form, autocasts=_follows_autocast(module, taken))


def _arguments(module: nn.Module) -> tuple[tuple[str, ...], list[int]]:
    """The names of the arguments that may be the input and a gate, and how many to try to pass."""
    if "forward" in vars(module) and not calls_of_class(module):
        raise Unrecognised("its forward was replaced on this instance, and calls no other")
    signature = inspect.signature(type(module).forward)
    _, *parameters = signature.parameters.values()
    takes = ", ".join(map(str, parameters))
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    names = tuple(p.name if p.kind is p.POSITIONAL_OR_KEYWORD else "" for p in given)
    if len(given) == 2 and given[1].default not in (None, inspect.Parameter.empty):
        names = names[:1]
    numbers = []
    for number in range(1, len(names) + 1):
        with suppress(TypeError):
            signature.bind(None, *[None] * number)
            numbers.append(number)
    if not numbers:
        raise Unrecognised(f"its forward takes ({takes}), not an input and perhaps a gate")
    return names, numbers


def _check_attributes(module: nn.Module) -> None:
    """Raise Unrecognised if forward may use more than parameters of one shape and plain values."""
    if any(True for _ in module.children()):
        raise Unrecognised("it has submodules")
    if any(isinstance(t, Tensor) for t in (*module.buffers(recurse=False), *vars(module).values())):
        raise Unrecognised("it has tensors that are not parameters")
    parameters = parameters_of(module)
    shapes = {tuple(p.shape) for p in parameters.values()}
    listed = ", ".join(f"{name} {list(p.shape)}" for name, p in parameters.items())
    if any(not p.is_floating_point() for p in parameters.values()):
        raise Unrecognised("its parameters do not have a floating-point dtype")
    if any(math.prod(shape) == 0 for shape in shapes):
        raise Unrecognised(f"its parameters are empty ({listed}), perhaps gathered later")
    if len(parameters) > 2 or len(shapes) > 1:
        raise Unrecognised(f"its parameters are {listed}, not a weight and a bias of one shape")
    if any(math.prod(shape) > MAX_ELEMENTS for shape in shapes):
        raise Unrecognised(f"its parameters are {listed}, of more than {MAX_ELEMENTS} elements")
    sizes = sizes_of(getattr(module, "normalized_shape", ()))
    if sizes and math.prod(sizes) == 1:
        raise Unrecognised("its rows have one element")
    if any(math.prod(shape[-1:]) == 1 for shape in shapes):
        raise Unrecognised(f"its parameters are {listed}, not a number for each column")


def _exact_form(module: nn.Module, taken: Taken, arguments: tuple[str, ...]) -> Form:
    """The form that matches a module's float32 outputs and gradients; rounding stays "late"."""
    twins = [twin_of(module, torch.float32, training) for training in (True, False)]
    float64_twin = twin_of(module, torch.float64)
    dims, groups = normalised_together(twins[0], taken)
    sizes = taken.tail if groups else taken.sizes
    options = {"dims": dims, "groups": groups, "sizes": sizes, "ones": taken.ones}
    options["arguments"] = arguments
    form, calls = None, []
    for number, outputs in taken.outputs.items():
        inputs = [t.double() for t in taken.inputs(float32(number))]
        forms = _forms(module, number, options) if form is None else _gated(form)
        for candidate in forms:
            expected = _exactly(candidate, float64_twin, *inputs)
            if all(
                matches(y, expected if leading else expected[0, 1])
                for leading, pair in outputs.items()
                for y in pair
            ):
                form = candidate
                calls += [(number, len(leading) + len(taken.tail)) for leading in outputs]
                break
    if form is None:
        raise Unrecognised("its outputs match no norm of tilenorm")
    for number, twin in product(dict(calls), twins):
        inputs = taken.inputs(float32(number))
        function = partial(_exactly, form, float64_twin)
        exact = Run(function, float64_twin, [t.double() for t in inputs])
        name = other_gradient(taken.run(number, twin, inputs), exact)
        if name:
            text = form.describe(module)
            raise Unrecognised(f"its outputs match {text}; the gradient of {name} does not")
    return replace(form, calls=tuple(calls))


def _forms(module: nn.Module, number: int, options: dict) -> Iterator[Form]:
    """All forms that are possible with a module's parameters."""
    names = tuple(parameters_of(module))
    for norm, eps, (weight, bias), offset in product(
        ("rms", "layer"),
        dict.fromkeys((*_eps_names(module), *HARD_CODED_EPS)),
        dict.fromkeys(permutations((*names, None, None)[:2])),
        (0.0, 1.0) if names else (0.0,),
    ):
        form = Form(norm, eps, weight=weight, bias=bias, offset=offset, **options)
        if norm == "rms" or form.epsilon(module) is not None:
            yield from (form,) if number == 1 else _gated(form)


def _gated(form: Form) -> Iterator[Form]:
    for gate, activation in product(("after", "before"), OPTIONS["activation"].words):
        yield replace(form, gate=gate, activation=activation)


def _exactly(form: Form, float64_twin: nn.Module, *inputs: Tensor) -> Tensor:
    """The outputs of a form for float64 inputs, as an eps of float32 makes them."""
    if form.epsilon(float64_twin) is None:  # None would mean the epsilon of float64
        form = replace(form, eps=torch.finfo(torch.float32).eps)
    return form.compute(float64_twin, *inputs, backend="reference")


def _form_at_edges(module: nn.Module, form: Form, taken: Taken) -> Form:
    """The form, after a comparison for inputs that a forward may treat in another way: empty ones,
    one row or column, rows of zeros or with a NaN, strided inputs, and a run without gradients.
    """
    twin, float64_twin = twin_of(module, torch.float32), twin_of(module, torch.float64)
    strided = empty = True

    def compare(kind: str, number: int, make: Callable[[int], Tensor]) -> bool:
        """Whether the output also depends on all inputs and parameters."""
        inputs = [make(seed).requires_grad_() for seed in range(number)]
        y = run(twin, *inputs)
        if not matches(y, _exactly(form, float64_twin, *(t.double() for t in inputs))):
            raise Unrecognised(f"it matches {form.describe(module)}, but not for {kind}")
        if not y.requires_grad:
            return False
        leaves = *inputs, *parameters_of(twin).values()
        return all(g is not None for g in torch.autograd.grad(y.sum(), leaves, allow_unused=True))

    for number, dims in form.calls:
        leading = dims - len(taken.tail)
        tails = [taken.tail]
        if not parameters_of(module) and form.sizes is None:
            tails += [(1,), (0,), (3,)]
        for first, tail in product(small_sizes(leading), tails):
            shape = first + tail
            try:
                kind = f"shape {list(shape)}"
                depends = compare(kind, number, partial(random, shape, torch.float32))
            except Refused as reason:
                if math.prod(shape):
                    raise Unrecognised(f"{reason}, for shape {list(shape)}") from reason
                depends = False
            empty = empty and (depends or math.prod(shape) > 0)
        shape = (3,) * leading + taken.tail
        compare("zeros and NaN", number, partial(unusual, shape))
        with torch.no_grad():
            compare("a run without gradients", number, partial(random, shape, torch.float32))
        for make in (sliced, transposed):
            try:
                compare("strided inputs", number, partial(make, shape))
            except Refused:
                strided = False
    return replace(form, strided=strided, empty=empty)


def _check_channels(module: nn.Module, form: Form, taken: Taken) -> None:
    """Raise Unrecognised if forward takes rows of channels, but normalises images in dimension 1,
    as GroupNorm does: images are what such a module is for.
    """
    if not parameters_of(module) or len(taken.tail) > 1:
        return
    for number, dims in product(dict(form.calls), (3, 4)):
        if (number, dims) in form.calls:
            continue
        shape = (2, *taken.tail, 3, 5)[:dims]
        with suppress(Refused):
            run(twin_of(module, torch.float32), *[random(shape, torch.float32, 0)] * number)
            raise Unrecognised(
                f"its forward takes shape {list(shape)}, with channels before others"
            )


def _rounded_form(module: nn.Module, form: Form, taken: Taken) -> Form:
    """The form, completed by how the module rounds 16-bit dtypes and promotes mixed dtypes."""
    calls: list[Any] = []  # dtypes, whether they are equal, twin, inputs, output
    for number in dict(form.calls):
        for dtypes in _dtypes(number, bool(parameters_of(module))):
            equal = len({*dtypes} - {None}) == 1
            twin, inputs = twin_of(module, dtypes[2] or dtypes[0]), taken.inputs(dtypes[:2])
            leading = [sizes for sizes in taken.outputs[number] if sizes]
            with suppress(Refused):
                for sizes in leading if equal else leading[:1]:
                    y = taken.call(twin, sizes, *inputs)
                    calls.append((dtypes, equal, twin, inputs, y))

    def served(form: Form) -> dict:
        """Whether all outputs match, by dtypes."""
        found = {}
        for dtypes, _, twin, inputs, y in calls:
            expected = form.compute(twin, *inputs, backend="reference")
            fits = expected.dtype == y.dtype and matches(y, expected)
            found[dtypes] = fits and found.get(dtypes, True)
        return found

    options = {"rounding": "late"}, {"rounding": "early"}, {"rounding": "early", "promotes": True}
    forms = {f: served(f) for f in (replace(form, **chosen) for chosen in options)}
    needed = {dtypes for dtypes, equal, *_ in calls if equal}
    forms = {f: fits for f, fits in forms.items() if all(fits[dtypes] for dtypes in needed)}
    if not forms:
        text = form.describe(module)
        raise Unrecognised(f"it matches {text} in float32, but rounds or casts 16 bits differently")
    form = max(forms, key=lambda f: sum(forms[f].values()))
    fits = forms[form]
    for dtypes in [dtypes for dtypes, fit in fits.items() if fit]:
        number, twin = 1 + (dtypes[1] is not None), twin_of(module, dtypes[2] or dtypes[0])
        inputs = taken.inputs(dtypes[:2], 4)  # the other rows' gradients overflow in float16
        exact = Run(partial(form.compute, twin, backend="reference"), twin, inputs)
        name = other_gradient(taken.run(number, twin, inputs), exact)
        if name and dtypes in needed:
            text = f"it matches {form.describe(module)}; its gradient of {name} does not"
            raise Unrecognised(f"{text} in {dtypes[0]}")
        fits[dtypes] = not name
    last = torch.float32 if parameters_of(module) else None
    singles = [(*float32(n), last) for n in dict(form.calls)]
    dtypes = (*singles, *(dtypes for dtypes, fit in fits.items() if fit))
    return replace(form, dtypes=dtypes, mixed=not all(fits.values()))


def _dtypes(number: int, has_parameters: bool) -> list[tuple]:
    """The dtypes of an input, a gate and parameters: some in 16 bits, the others in float32."""
    found = {}
    for half in HALF:
        some = half, torch.float32
        gates, parameters = some if number == 2 else (None,), some if has_parameters else (None,)
        found |= {dtypes: half in dtypes for dtypes in product(some, gates, parameters)}
    return [dtypes for dtypes, chosen in found.items() if chosen]


def _follows_autocast(module: nn.Module, taken: Taken) -> bool:
    """Whether torch.autocast changes the module's output dtype, as it does for PyTorch's norms."""
    number = next(iter(taken.outputs))
    inputs = taken.inputs((torch.bfloat16, torch.bfloat16 if number == 2 else None))
    for parameter in (torch.bfloat16, torch.float32):
        call = partial(taken.call, twin_of(module, parameter), taken.main(number), *inputs)
        with suppress(Refused):
            dtype = call().dtype
            with torch.autocast("cpu", torch.bfloat16), _CudaAutocastOnCpu():
                if call().dtype != dtype:
                    return True
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
