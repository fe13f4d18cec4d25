"""Wide rows: a module of many columns is tried as a module of its class with few.

All trials with the columns of nn.LayerNorm((64, 64, 64)) took 31 s and 5.7 GB. A narrow module has
parameters of fewer columns, and attributes that say so. It has all trials. Then the outputs and
gradients of two wide rows have to match the form too. A module whose attributes do not say all of
its size has all trials itself, up to a number of elements.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .form import Dtypes, Form
from .trials import Trial, sizes_of
from .twin import Unrecognised, instance_of, parameters_of, random, run, twin_of

FEW_ELEMENTS = 1024  # a module of no more has all trials itself
MANY_ELEMENTS = 2**16  # a module of more has never all trials itself: they would take 0.3 GB
KEPT = 8  # a size of no more stays in a narrow module
NARROW = (6, 10, 14, 22, 26)  # the sizes of a narrow module, for several different ones
ONE_NARROW = 48  # if only one size is narrowed
SCALES = (1.0, 1e-3)  # of the wide rows: for the second, each eps gives another output


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """The shape of a module's parameters, or the first sizes that it has as an attribute."""
    for parameter in parameters_of(module).values():
        return tuple(parameter.shape)
    return next(filter(None, map(sizes_of, vars(module).values())), ())


def narrowed(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A module of the same class with fewer columns, whose parameters have no memory."""
    wide = sorted({size for size in shape if size > KEPT})
    alone = sum(size > KEPT for size in shape) == 1
    sizes = dict(zip(wide, (ONE_NARROW,) if alone else NARROW, strict=False))
    narrow = tuple(sizes.get(size, size) for size in shape)
    numbers = sizes | {math.prod(shape): math.prod(narrow)}

    def smaller(value: Any) -> Any:
        if type(value) in (tuple, list, torch.Size) and sizes_of(value):
            return type(value)([numbers.get(size, size) for size in value])
        return numbers.get(value, value) if type(value) is int else value

    parameters = {
        name: nn.Parameter(torch.empty(narrow, dtype=p.dtype, device="meta"))
        for name, p in parameters_of(module).items()
    }
    attributes = {name: smaller(value) for name, value in vars(module).items()}
    return instance_of(type(module), attributes | {"_parameters": module._parameters | parameters})


def widened(form: Form, module: nn.Module, shape: tuple[int, ...]) -> Form:
    """The form of a module, from that of its narrow one. Raises Unrecognised unless it matches."""
    form = form if form.sizes is None else replace(form, sizes=shape)
    for number in dict(form.calls):
        for dtype in (torch.float32, torch.bfloat16):
            dtypes = dtype, dtype if number == 2 else None, dtype if parameters_of(module) else None
            if dtypes not in form.dtypes:
                continue
            trial = _trial(module, shape, (*dtypes[:2], dtype), max(form.dims_of(number)))
            name = trial.other_gradient(form) if dtype == torch.float32 else ""
            if name or not trial.fits(form):
                what = f"the gradient of {name}" if name else "its output"
                text = f"it matches {form.describe(module)} with fewer columns"
                raise Unrecognised(f"{text}, but {what} does not with {list(shape)}")
    return form


def _trial(module: nn.Module, shape: tuple[int, ...], dtypes: Dtypes, dims: int) -> Trial:
    """A run of inputs of so many dimensions, with a wide row for each of SCALES."""
    size = len(SCALES), *(1,) * (dims - len(shape) - 1), *shape
    scales = torch.tensor(SCALES).reshape(-1, *(1,) * (len(size) - 1))
    x = random(size, torch.float32, 0).add_(0.5).mul_(scales).to(dtypes[0])
    inputs = [x, *(random(size, dtype, 1) for dtype in dtypes[1:2] if dtype)]
    twin = twin_of(module, dtypes[0])
    return Trial("", dtypes, twin, inputs, run(twin, *inputs))
