"""recognise: find the tilenorm function and options that compute what a norm module computes.

The name of a module does not say what it computes. recognise therefore makes a twin: a module of
the same class and attributes, with random parameters on the CPU. It runs the twin in several dtypes
and compares the results with all forms of tilenorm. The module itself does not run or change.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..spec import WORDS
from .form import Form
from .replaced import calls_of_class

# The rows' mean squares range from 1e6 to 1e-12. eps is much smaller than the largest, near some of
# them, and much larger than the smallest. The squares of the largest elements overflow in float16.
SCALES = (1e3, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MIN_ELEMENTS = 64  # elements per scale; enough to tell early rounding from late rounding
# Allowed float32 difference, in units in the last place of the row's largest element. Sums that are
# added up in another order differ by up to 3 units in PyTorch's LayerNorm of 5 to 262144 columns,
# and by up to 9 units with 3 columns.
FLOAT32_UNITS = 16
# Share of 16-bit elements that must match exactly. Another order of the float32 sums changes the
# rounding of at most 2 elements in a thousand; early instead of late rounding changes one in four.
MATCHING_SHARE = 63 / 64
HARD_CODED_EPS = (None, 1e-5, 1e-6, 1e-8, 1e-12)
# Dtypes of the input and of the parameters. Pairs that the module's forward rejects are skipped.
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
PYTORCH_NORMS = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)


class Unrecognised(Exception):
    """The module computes none of the forms; the message gives the reason."""


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether the class name contains "norm", or the module has an eps and no submodules."""
    if "norm" in type(module).__name__.lower():
        return True
    return bool(_eps_names(module)) and not any(True for _ in module.children())


def recognise(module: nn.Module) -> Form:
    """The form that describes a module's forward. Raises Unrecognised if there is none."""
    arguments, required = _arguments(module)
    _check_attributes(module)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")  # PyTorch warns about mixed dtypes
        form = _rounded_form(module, _exact_form(module, arguments, required))
        return replace(form, autocasts=_follows_autocast(module, len(arguments)))


def _arguments(module: nn.Module) -> tuple[tuple[str, ...], int]:
    """The names of forward's arguments, and how many of them have no default."""
    if "forward" in vars(module) and not calls_of_class(module):
        raise Unrecognised("its forward was replaced on this instance, and calls no other")
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    takes = ", ".join(map(str, parameters))
    by_position = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    defaults = [p.default for p in parameters]
    if (
        not by_position
        or len(defaults) not in (1, 2)
        or defaults[-1] not in (None, inspect.Parameter.empty)
    ):
        raise Unrecognised(f"its forward takes ({takes}), not an input and perhaps a gate")
    required = 1 if defaults[-1] is None else len(defaults)
    return tuple(p.name for p in parameters), required


def _check_attributes(module: nn.Module) -> None:
    """Raise Unrecognised if forward may use more than parameters of one shape and plain values."""
    if any(True for _ in module.children()):
        raise Unrecognised("it has submodules")
    if any(isinstance(t, Tensor) for t in (*module.buffers(recurse=False), *vars(module).values())):
        raise Unrecognised("it has tensors that are not parameters")
    parameters = _parameters(module)
    shapes = {tuple(p.shape) for p in parameters.values()}
    if len(parameters) > 2 or len(shapes) > 1:
        listed = ", ".join(f"{n} {list(p.shape)}" for n, p in parameters.items())
        raise Unrecognised(f"its parameters are {listed}, not a weight and a bias of one shape")
    if any(not p.is_floating_point() for p in parameters.values()):
        raise Unrecognised("its parameters do not have a floating-point dtype")
    if math.prod(_shape(module)[-1:]) < 2:
        raise Unrecognised("its rows have one element")


def _exact_form(module: nn.Module, arguments: tuple[str, ...], required: int) -> Form:
    """The form that matches a module's float32 outputs and gradients; rounding stays "late"."""
    twins = [_twin(module, torch.float32, training) for training in (True, False)]
    float64_twin = _twin(module, torch.float64)
    inputs = _inputs(module, torch.float32, len(arguments))
    float64_inputs = [t.double() for t in inputs]
    shape, rows = _shape(module), len(SCALES)
    # A module may normalise another dimension of a 4-D input than of a 3-D input: run several.
    leading_sizes = (-1, rows), (-1,), (-1, 2, rows // 2)
    outputs = [
        _call_forward(twin, *(t.reshape(*sizes, *shape) for t in inputs)).reshape(inputs[0].shape)
        for twin, sizes in product(twins, leading_sizes)
    ]

    def compute(form: Form, *tensors: Tensor) -> Tensor:
        if form.epsilon(float64_twin) is None:  # None would mean the epsilon of float64
            form = replace(form, eps=torch.finfo(torch.float32).eps)
        return form.compute(float64_twin, *tensors, backend="reference")

    def fits(form: Form) -> bool:
        expected = compute(form, *float64_inputs)
        return all(_matches(output, expected) for output in outputs)

    form = next(filter(fits, _forms(module, arguments, required)), None)
    if form is None:
        raise Unrecognised("its outputs match no norm of tilenorm")
    for number, twin in product(range(required, len(arguments) + 1), twins):
        expected = _gradients(partial(compute, form), float64_twin, float64_inputs[:number])
        forward = partial(_call_forward, twin)
        for name, gradient in _gradients(forward, twin, inputs[:number]).items():
            if gradient is None or not _matches(gradient, expected[name]):
                text = form.describe(module)
                raise Unrecognised(f"its outputs match {text}; the gradient of {name} does not")
    return form


def _forms(module: nn.Module, arguments: tuple[str, ...], required: int) -> Iterator[Form]:
    """All forms that are possible with a module's parameters and forward arguments."""
    shape, names = _shape(module), tuple(_parameters(module))
    shapes = dict.fromkeys((shape[-1:], shape)) if _has_shape(module) else (None,)
    affine = dict.fromkeys(permutations((*names, None, None)[:2]))
    places = (None,) if len(arguments) == 1 else ("after", "before")
    for norm, eps, sizes, (weight, bias), offset, gate, activation in product(
        WORDS["norm"],
        _eps_names(module) or HARD_CODED_EPS,
        shapes,
        affine,
        (0.0, 1.0) if names else (0.0,),
        places,
        WORDS["activation"] if len(arguments) == 2 else ("silu",),
    ):
        options = {"activation": activation, "arguments": arguments, "required": required}
        form = Form(norm, eps, sizes, weight, bias, offset, gate=gate, **options)
        if norm == "rms" or form.epsilon(module) is not None:
            yield form


def _rounded_form(module: nn.Module, form: Form) -> Form:
    """The form, completed by how the module rounds 16-bit dtypes and promotes mixed dtypes."""
    calls, argument_counts = [], range(form.required, len(form.arguments) + 1)
    for (dtype, parameter), number in product(DTYPES, argument_counts):
        inputs, twin = _inputs(module, dtype, number), _twin(module, parameter)
        with suppress(Unrecognised):
            calls.append((twin, inputs, _call_forward(twin, *inputs)))

    def fits(form: Form) -> bool:
        pairs = ((form.compute(t, *i, backend="reference"), y) for t, i, y in calls)
        return all(e.dtype == y.dtype and _matches(y, e, MATCHING_SHARE) for e, y in pairs)

    options = {"rounding": "late"}, {"rounding": "early"}, {"rounding": "early", "promotes": True}
    rounded_form = next(filter(fits, (replace(form, **chosen) for chosen in options)), None)
    if rounded_form is None:
        text = form.describe(module)
        raise Unrecognised(f"it matches {text} in float32, but rounds or casts 16 bits differently")
    return rounded_form


def _follows_autocast(module: nn.Module, number: int) -> bool:
    """Whether torch.autocast changes the module's output dtype, as it does for PyTorch's norms."""
    inputs = _inputs(module, torch.bfloat16, number)
    for parameter in (torch.bfloat16, torch.float32):
        twin = _twin(module, parameter)
        with suppress(Unrecognised):
            dtype = _call_forward(twin, *inputs).dtype
            with torch.autocast("cpu", torch.bfloat16), _CudaAutocastOnCpu():
                if _call_forward(twin, *inputs).dtype != dtype:
                    return True
    return False


class _CudaAutocastOnCpu(TorchFunctionMode):
    """Under CPU autocast, casts the inputs of PyTorch's norms to float32, as CUDA autocast does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in PYTORCH_NORMS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return function(*args, **kwargs)


def _matches(got: Tensor, expected: Tensor, share: float = 1.0) -> bool:
    """Whether at least a share of the elements match: equal in 16 bits, close in float32."""
    error, allowed = (got.double() - expected.double()).abs(), 0.0
    if got.dtype == torch.float32:
        # The maximum includes dimension 0, the copies: all terms of one row's gradient may cancel.
        largest = expected.double().abs().amax((0, -1)[: got.dim()], keepdim=True)
        allowed = FLOAT32_UNITS * torch.finfo(torch.float32).eps * largest
    return (error <= allowed).double().mean().item() >= share


def _gradients(
    function: Callable[..., Tensor], twin: nn.Module, inputs: list[Tensor]
) -> dict[str, Tensor | None]:
    """The gradients of function(*inputs) by name; None where the output does not depend on it."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    names = dict(zip(("the input", "the gate"), leaves, strict=False)) | _parameters(twin)
    y = function(*leaves)
    if not y.requires_grad:
        return dict.fromkeys(names)
    dy = _random(y.shape, y.dtype, seed=len(names))
    grads = torch.autograd.grad(y, list(names.values()), dy, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def _call_forward(twin: nn.Module, *inputs: Tensor) -> Tensor:
    """The result of the class's forward, without hooks. Raises Unrecognised for a bad result."""
    try:
        y = type(twin).forward(twin, *inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unrecognised(f"its forward raised {reason}") from error
    if not isinstance(y, Tensor):
        raise Unrecognised(f"its forward returns a {type(y).__name__}, not a tensor")
    if y.shape != inputs[0].shape:
        raise Unrecognised(f"its forward maps shape {list(inputs[0].shape)} to {list(y.shape)}")
    return y


def _twin(module: nn.Module, dtype: torch.dtype, training: bool = True) -> nn.Module:
    """A module of the same class and attributes, with random parameters on the CPU."""
    parameters = {
        name: nn.Parameter(_random(p.shape, dtype, seed))
        for seed, (name, p) in enumerate(_parameters(module).items())
    }
    twin = object.__new__(type(module))
    twin.__dict__ = vars(module) | {
        "training": training,
        "_parameters": module._parameters | parameters,
    }
    return twin


def _inputs(module: nn.Module, dtype: torch.dtype, number: int) -> list[Tensor]:
    """The input, whose mean is half its standard deviation, and the gate if number is 2."""
    shape = _shape(module)
    # With one copy, a norm over the batch dimension would look like a norm over the row.
    copies = max(2, -(-MIN_ELEMENTS // math.prod(shape)))
    x, gate = (_random((copies, len(SCALES), *shape), torch.float32, seed) for seed in (7, 8))
    scales = torch.tensor(SCALES, device="cpu").reshape(-1, *(1,) * len(shape))
    return [t.to(dtype) for t in ((x + 0.5) * scales, gate)[:number]]


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normally distributed float32 numbers, rounded to the dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _has_shape(module: nn.Module) -> bool:
    return bool(_parameters(module)) or hasattr(module, "normalized_shape")


def _shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of the module's parameters, or its normalized_shape if it has no parameters."""
    parameters = [*_parameters(module).values()]
    shape = parameters[0].shape if parameters else getattr(module, "normalized_shape", MIN_ELEMENTS)
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _eps_names(module: nn.Module) -> list[str]:
    """The names of the module's attributes that hold an eps. PyTorch's RMSNorm may hold None."""
    return [
        name
        for name, value in vars(module).items()
        if "eps" in name.lower() and (value is None or type(value) in (int, float))
    ]
