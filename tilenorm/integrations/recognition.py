"""What a module computes, found from its numbers: a name promises nothing.

A twin with random parameters is asked on the CPU, in several dtypes, and compared with the forms
that tilenorm's functions can take. The module itself, its parameters, hooks and buffers are not
touched, and may be on any device.
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

from .form import Form

# Mean squares from 1e6 to 1e-12: where eps is much smaller, as large, and much larger. The largest
# overflow where float16 is squared.
SCALES = (1e3, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MIN_ELEMENTS = 64  # of a scale: enough to tell one rounding from another
# float32 sums in another order, in units in the last place of the row's largest element: 3 at the
# most for PyTorch's LayerNorm of 5 to 262144 columns, 9 for 3.
FLOAT32_UNITS = 16
# Where float32 lies next to a tie another order rounds the other way, 2 elements in a thousand at
# the most. Rounding early instead of late moves one in four.
ROUNDED_ALIKE = 63 / 64
HARD_CODED_EPS = (None, 1e-5, 1e-6, 1e-8, 1e-12)
# Of input and parameters. What the module refuses need not be as it was.
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
OWN_NORMS = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)


class Unrecognised(Exception):
    """Why a module is none of the forms."""


def looks_like_a_norm(module: nn.Module) -> bool:
    """By its class's name, or by an eps where there is nothing else that it would be for."""
    if "norm" in type(module).__name__.lower():
        return True
    return bool(_eps_names(module)) and not any(True for _ in module.children())


def recognise(module: nn.Module) -> Form:
    """The form of a module's forward. Raises Unrecognised with the reason."""
    arguments, required = _arguments(module)
    _check_is_alone(module)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")  # PyTorch warns of mixed dtypes
        form = _rounded_form(module, _exact_form(module, arguments, required))
        return replace(form, autocasts=_follows_autocast(module, len(arguments)))


def _arguments(module: nn.Module) -> tuple[tuple[str, ...], int]:
    """The names of forward's arguments, and how many it needs."""
    if "forward" in vars(module):
        raise Unrecognised("its forward was replaced on this instance")
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


def _check_is_alone(module: nn.Module) -> None:
    """All that it computes with is seen: parameters of one shape, and plain attributes."""
    if any(True for _ in module.children()):
        raise Unrecognised("it has submodules")
    if any(isinstance(t, Tensor) for t in (*module.buffers(recurse=False), *vars(module).values())):
        raise Unrecognised("it has tensors that are not parameters")
    parameters = _parameters(module)
    shapes = {tuple(p.shape) for p in parameters.values()}
    if len(parameters) > 2 or len(shapes) > 1:
        found = ", ".join(f"{n} {list(p.shape)}" for n, p in parameters.items())
        raise Unrecognised(f"its parameters are {found}; a norm's are weight and bias of one shape")
    if any(not p.is_floating_point() for p in parameters.values()):
        raise Unrecognised("its parameters are not of a floating-point dtype")
    if math.prod(_shape(module)[-1:]) < 2:
        raise Unrecognised("its rows have one element")


def _exact_form(module: nn.Module, arguments: tuple[str, ...], required: int) -> Form:
    """The form of a module's float32 outputs and gradients, whatever it rounds 16 bits to."""
    twins = [_twin(module, torch.float32, training) for training in (True, False)]
    exact = _twin(module, torch.float64)
    inputs = _inputs(module, torch.float32, len(arguments))
    doubles = [t.double() for t in inputs]
    shape, rows = _shape(module), len(SCALES)
    outputs = [  # of any number of dimensions: what is last in three may be another in four
        _call(twin, *(t.reshape(*lead, *shape) for t in inputs)).reshape(inputs[0].shape)
        for twin, lead in product(twins, ((-1, rows), (-1,), (-1, 2, rows // 2)))
    ]

    def compute(form: Form, *tensors: Tensor) -> Tensor:
        if form.epsilon(exact) is None:  # of float64 it would be another
            form = replace(form, eps=torch.finfo(torch.float32).eps)
        return form.compute(exact, *tensors, backend="reference")

    def fits(form: Form) -> bool:
        expected = compute(form, *doubles)
        return all(_alike(output, expected) for output in outputs)

    form = next(filter(fits, _forms(module, arguments, required)), None)
    if form is None:
        raise Unrecognised("its outputs are those of no norm of tilenorm's")
    for number, twin in product(range(required, len(arguments) + 1), twins):
        expected = _gradients(partial(compute, form), exact, doubles[:number])
        for name, gradient in _gradients(partial(_call, twin), twin, inputs[:number]).items():
            if gradient is None or not _alike(gradient, expected[name]):
                known = form.describe(module)
                raise Unrecognised(f"its outputs are those of {known}, the gradient of {name} not")
    return form


def _forms(module: nn.Module, arguments: tuple[str, ...], required: int) -> Iterator[Form]:
    """All that there are for a module's parameters and arguments."""
    shape, names = _shape(module), tuple(_parameters(module))
    shapes = dict.fromkeys((shape[-1:], shape)) if _has_shape(module) else (None,)
    affine = dict.fromkeys(permutations((*names, None, None)[:2]))
    for norm, eps, sizes, (weight, bias), offset, gate in product(
        ("rms", "layer") if len(arguments) == 1 else ("rms",),
        _eps_names(module) or HARD_CODED_EPS,
        shapes,
        affine,
        (0.0, 1.0) if names else (0.0,),
        (None,) if len(arguments) == 1 else ("after", "before"),
    ):
        how = {"gate": gate, "arguments": arguments, "required": required}
        form = Form(norm, eps, sizes, weight, bias, offset, **how)
        if norm == "rms" or form.epsilon(module) is not None:
            yield form


def _rounded_form(module: nn.Module, form: Form) -> Form:
    """The form with how 16 bits are rounded, and what mixed dtypes give."""
    outputs, calls = [], range(form.required, len(form.arguments) + 1)
    for (dtype, parameter), number in product(DTYPES, calls):
        inputs, twin = _inputs(module, dtype, number), _twin(module, parameter)
        with suppress(Unrecognised):
            outputs.append((twin, inputs, _call(twin, *inputs)))

    def fits(form: Form) -> bool:
        computed = ((form.compute(t, *i, backend="reference"), y) for t, i, y in outputs)
        return all(e.dtype == y.dtype and _alike(y, e, ROUNDED_ALIKE) for e, y in computed)

    ways = {"rounding": "late"}, {"rounding": "early"}, {"rounding": "early", "promotes": True}
    found = next(filter(fits, (replace(form, **way) for way in ways)), None)
    if found is None:
        known = form.describe(module)
        raise Unrecognised(f"in float32 it is {known}; 16 bits it rounds or casts in its own way")
    return found


def _follows_autocast(module: nn.Module, number: int) -> bool:
    """Whether its output is float32 because torch.autocast makes PyTorch's own norms be that."""
    inputs = _inputs(module, torch.bfloat16, number)
    for parameter in (torch.bfloat16, torch.float32):
        twin = _twin(module, parameter)
        with suppress(Unrecognised):
            plain = _call(twin, *inputs)
            with torch.autocast("cpu", torch.bfloat16), _AutocastOfCuda():
                if _call(twin, *inputs).dtype != plain.dtype:
                    return True
    return False


class _AutocastOfCuda(TorchFunctionMode):
    """PyTorch's own norms on the CPU as under torch.autocast("cuda"), where it is enabled."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in OWN_NORMS and torch.is_autocast_enabled("cpu"):
            args = [_to_float32(a) for a in args]
            kwargs = {name: _to_float32(a) for name, a in kwargs.items()}
        return function(*args, **kwargs)


def _to_float32(argument: object) -> object:
    return argument.float() if isinstance(argument, Tensor) else argument


def _alike(got: Tensor, expected: Tensor, share: float = 1.0) -> bool:
    """At least a share of the elements is as expected: the same in 16 bits, or close in float32."""
    error, allowed = (got.double() - expected.double()).abs(), 0.0
    if got.dtype == torch.float32:
        # Over the copies too: in a row of few elements a gradient may cancel.
        largest = expected.double().abs().amax((0, -1)[: got.dim()], keepdim=True)
        allowed = FLOAT32_UNITS * torch.finfo(torch.float32).eps * largest
    return (error <= allowed).double().mean().item() >= share


def _gradients(
    function: Callable[..., Tensor], twin: nn.Module, inputs: list[Tensor]
) -> dict[str, Tensor | None]:
    """Gradients by name of function(*inputs); None of what it does not depend on."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    names = dict(zip(("the input", "the gate"), leaves, strict=False)) | _parameters(twin)
    y = function(*leaves)
    if not y.requires_grad:
        return dict.fromkeys(names)
    dy = _random(y.shape, y.dtype, seed=len(names))
    grads = torch.autograd.grad(y, list(names.values()), dy, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def _call(twin: nn.Module, *inputs: Tensor) -> Tensor:
    """What its class's own forward gives, without hooks."""
    try:
        y = type(twin).forward(twin, *inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unrecognised(f"its forward raised {reason}") from error
    if not isinstance(y, Tensor):
        raise Unrecognised(f"its forward gives a {type(y).__name__}, not a tensor")
    if y.shape != inputs[0].shape:
        raise Unrecognised(f"its forward gives {list(y.shape)} for {list(inputs[0].shape)}")
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
    """The input, with a mean of half its deviation, and the gate, if there are two."""
    shape = _shape(module)
    copies = max(2, -(-MIN_ELEMENTS // math.prod(shape)))  # two, or batches may mix unseen
    x, gate = (_random((copies, len(SCALES), *shape), torch.float32, seed) for seed in (7, 8))
    scales = torch.tensor(SCALES, device="cpu").reshape(-1, *(1,) * len(shape))
    return [t.to(dtype) for t in ((x + 0.5) * scales, gate)[:number]]


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers of float32, rounded to the dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _has_shape(module: nn.Module) -> bool:
    return bool(_parameters(module)) or hasattr(module, "normalized_shape")


def _shape(module: nn.Module) -> tuple[int, ...]:
    """That of its parameters or, without any, of what it says that it normalises."""
    for parameter in _parameters(module).values():
        return tuple(parameter.shape)
    shape = getattr(module, "normalized_shape", MIN_ELEMENTS)
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _eps_names(module: nn.Module) -> list[str]:
    """Its attributes that hold an eps, or PyTorch's None."""
    return [
        name
        for name, value in vars(module).items()
        if "eps" in name.lower() and (value is None or type(value) in (int, float))
    ]
