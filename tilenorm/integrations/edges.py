"""Edges: inputs that a forward may treat in another way than those that show what it computes."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from .form import Form
from .trials import Taken, matches, sliced, small_sizes, transposed, unusual
from .twin import Refused, Unrecognised, parameters_of, random, run, twin_of


def exactly(form: Form, float64_twin: nn.Module, *inputs: Tensor) -> Tensor:
    """The outputs of a form for float64 inputs, as an eps of float32 makes them."""
    if form.epsilon(float64_twin) is None:  # None would mean the epsilon of float64
        form = replace(form, eps=torch.finfo(torch.float32).eps)
    return form.compute(float64_twin, *inputs, backend="reference")


def edges(module: nn.Module, form: Form, taken: Taken) -> Form:
    """The form, after a comparison for inputs that a forward may treat in another way: empty ones,
    one row or column, rows of zeros or with a NaN, strided inputs, and a run without gradients.
    """
    twin, float64_twin = twin_of(module, torch.float32), twin_of(module, torch.float64)
    strided = empty = True

    def compare(kind: str, number: int, make: Callable[[int], Tensor]) -> bool:
        """Whether the output also depends on all inputs and parameters."""
        inputs = [make(seed).requires_grad_() for seed in range(number)]
        y = run(twin, *inputs)
        if not matches(y, exactly(form, float64_twin, *(t.double() for t in inputs))):
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


def check_channels(module: nn.Module, form: Form, taken: Taken) -> None:
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
