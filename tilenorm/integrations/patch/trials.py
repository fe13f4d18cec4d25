"""Trials: the inputs that recognition runs a module for, and the comparison of results."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .form import Dtypes, Form
from .twin import Refused, Unrecognised, parameters_of, random, run, twin_of

# The rows' mean squares range from 1e6 to 1e-12. eps is much smaller than the largest, near some of
# them, and much larger than the smallest. The squares of the largest elements overflow in float16.
SCALES = (1e3, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MAX_HALF_SCALES = 4  # the gradients of smaller rows overflow in float16
MIN_ELEMENTS = 64  # elements per scale; enough to tell early rounding from late rounding
FREE_COLUMNS = 67  # of the rows of a module that has no size: no module's own size
MAX_ELEMENTS = 2**20  # of a parameter: larger ones are embeddings, and take seconds
# Leading sizes of the inputs: a forward may compute another thing for another number of dimensions.
LEADING = ((-1, 8), (-1,), (-1, 2, 4), (-1, 2, 2, 2), ())
MORE_LEADING, FAR_LEADING = (5, 6, 7, 8), (16, 32)  # how many leading sizes are tried once besides
HALF = (torch.bfloat16, torch.float16)
# Allowed float32 difference, in units in the last place of the row's largest element. Sums that are
# added up in another order differ from exact ones by up to 3 units in PyTorch's LayerNorm of 5 to
# 262144 columns, and by up to 9 units with 3 columns. So may those of the form.
FLOAT32_UNITS = 32
OUTPUT_UNITS = 2  # as FLOAT32_UNITS, for 16-bit outputs: one more or less in x̂, times the weight
# A 16-bit gradient is rounded up to four times in the chains that modules write out.
GRADIENT_UNITS = 8
# Share of 16-bit elements that must match exactly. Another order of the float32 sums changes the
# rounding of at most 2 elements in a thousand; early instead of late rounding changes one in four.
MATCHING_SHARE = 63 / 64


class Rows(NamedTuple):
    """The inputs of a module. tail: the sizes in which every input of a trial ends. sizes: as in
    Form. is_free: whether the forward takes rows of every size.
    """

    tail: tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    is_free: bool = False


class Trial(NamedTuple):
    """A run of a twin of a module. kind: what the inputs are, the input and perhaps a gate. dtypes:
    of the input, the gate and the parameters.
    """

    kind: str
    dtypes: Dtypes
    twin: nn.Module
    inputs: list[Tensor]
    output: Tensor

    def fits(self, form: Form) -> bool:
        y = form.compute(self.twin, *self.inputs, backend="reference")
        return y.dtype == self.output.dtype and matches(self.output, y)

    def columns(self, tail: tuple[int, ...]) -> int:
        """How many elements of a row the first element of the output depends on."""
        x, *gates = self.inputs
        x = x.detach().requires_grad_()
        y = run(self.twin, x, *gates).reshape(-1, math.prod(tail))
        (dx,) = torch.autograd.grad(y[:, 0].sum(), x)
        return int((dx.reshape(y.shape) != 0).any(0).sum())

    def other_gradient(self, form: Form) -> str:
        """The name of a gradient that is not the form's, or ""."""
        units, eps = FLOAT32_UNITS, torch.finfo(torch.float32).eps
        if is_half(self.dtypes):
            units, eps = GRADIENT_UNITS, max(torch.finfo(d).eps for d in self.dtypes if d)
        exact = partial(form.compute, self.twin, backend="reference")
        dy = self._dy()
        # The terms of a gradient cancel each other for some dy, as for each dy of a LayerNorm of
        # few columns. They do not for one that is not zero in the first column alone.
        first = torch.zeros_like(dy).index_fill_(-1, torch.tensor([0]), dy.abs().max())
        expected, sizes = self._gradients(exact, dy, first)
        (gradients,) = self._gradients(partial(run, self.twin), dy)
        for name, got in gradients.items():
            size = torch.maximum(expected[name].abs(), sizes[name].abs())
            if got is None or not _are_close(got, expected[name], units * eps, size):
                return name
        return ""

    def _dy(self) -> Tensor:
        """Random numbers alone would have next to no mean of dy · x̂, a term of the gradient."""
        number = len(self.inputs) + len(parameters_of(self.twin))
        return random(self.output.shape, self.output.dtype, seed=number) + self.output.detach()

    def _gradients(self, function: Callable[..., Tensor], *dys: Tensor) -> list[dict]:
        """The gradients by name for each dy; None where the output does not depend on it."""
        leaves = [t.detach().requires_grad_() for t in self.inputs]
        names = dict(zip(("the input", "the gate"), leaves, strict=False))
        names |= parameters_of(self.twin)
        y = function(*leaves)
        if not y.requires_grad:
            return [dict.fromkeys(names) for _ in dys]
        grad = partial(torch.autograd.grad, y, [*names.values()], allow_unused=True)
        grads = [grad(dy.to(y.dtype), retain_graph=dy is not dys[-1]) for dy in dys]
        return [dict(zip(names, of_dy, strict=True)) for of_dy in grads]


def trials_of(module: nn.Module, numbers: list[int]) -> tuple[Rows, list[Trial]]:
    """Trials for each number of dimensions and combination of dtypes that the forward takes.
    numbers: of tensors to try to pass. Raises Refused if the forward takes no float32 rows.
    """
    reasons = []
    for rows in _rows(module):
        trials = []
        for dtypes in _dtypes(numbers, bool(parameters_of(module))):
            inputs, parameter = _inputs(rows.tail, dtypes), dtypes[2] or dtypes[0]
            twins = [twin_of(module, parameter, training) for training in (True, False)]
            for leading, twin in product(LEADING[: -1 if is_half(dtypes) else None], twins):
                shaped = [t.reshape(*leading, *rows.tail) if leading else t[0, 1] for t in inputs]
                try:
                    trials.append(Trial("", dtypes, twin, shaped, run(twin, *shaped)))
                except Refused as reason:
                    reasons.append(reason)
        if any(trial.inputs[0].dim() > len(rows.tail) for trial in trials):
            return rows, trials
    raise reasons[0]


def edges(module: nn.Module, rows: Rows, number: int, dims: int) -> Iterator[Trial]:
    """Trials of inputs, and gates, that a forward may treat in another way. A forward may refuse
    empty and strided inputs: tilenorm serves them all the same.
    """

    def pair(shape: tuple[int, ...]) -> list[Tensor]:
        return [random(shape, torch.float32, seed) for seed in (0, 1)]

    leading = dims - len(rows.tail)
    firsts = [(1,) * leading]
    for place, size in product(range(leading), (0, 1)):
        firsts.append(tuple(size if n == place else 2 for n in range(leading)))
    tails = [rows.tail, (1,), (0,), (3,)][: 4 if rows.is_free else 1]
    cases = [(f"shape {[*a, *b]}", pair(a + b)) for a, b in product(firsts, tails)]
    shape = (3,) * leading + rows.tail
    x, gate = pair(shape)
    x.view(-1, shape[-1])[0], x.view(-1)[-1] = 0, torch.nan
    cases += [
        ("zeros and NaN", [x, gate]),
        ("strided inputs", [t[..., 0] for t in pair((*shape, 2))]),
        ("strided inputs", [t.permute(*reversed(range(dims))) for t in pair(shape[::-1])]),
        ("a run without gradients", pair(shape)),
    ]
    twin = twin_of(module, torch.float32)
    for kind, tensors in cases:
        inputs = tensors[:number]
        try:
            with torch.set_grad_enabled(kind != "a run without gradients"):
                yield Trial(kind, (), twin, inputs, run(twin, *inputs))
        except Refused as reason:
            if inputs[0].numel() and kind != "strided inputs":
                raise Unrecognised(f"{reason}, for {kind}") from reason


def _rows(module: nn.Module) -> Iterator[Rows]:
    """Candidates: the most general one first."""
    for parameter in parameters_of(module).values():
        yield Rows(tuple(parameter.shape))
        return
    yield Rows((FREE_COLUMNS,), is_free=True)
    for sizes in filter(None, map(sizes_of, vars(module).values())):
        if 1 < math.prod(sizes) <= MAX_ELEMENTS:
            yield Rows(sizes, sizes)


def _dtypes(numbers: list[int], has_parameters: bool) -> list[Dtypes]:
    """The dtypes of an input, a gate and parameters, those in float32 first. Others are one of 16
    bits for some, and float32 for the rest.
    """
    dtypes = []
    for number, half in product(numbers, HALF):
        some = torch.float32, half
        gates, parameters = some if number == 2 else (None,), some if has_parameters else (None,)
        dtypes += product(some, gates, parameters)
    return sorted(dict.fromkeys(dtypes), key=is_half)


def is_half(dtypes: Dtypes) -> bool:
    return any(dtype in HALF for dtype in dtypes)


def _inputs(tail: tuple[int, ...], dtypes: Dtypes) -> list[Tensor]:
    """An input, whose mean is half its standard deviation, and a gate if it has a dtype, of the
    shape (copies, scales, *tail).
    """
    scales = torch.tensor(SCALES[: MAX_HALF_SCALES if is_half(dtypes) else None])
    # With one copy, a norm over the batch dimension would look like a norm over the row.
    copies = 2 * -(-MIN_ELEMENTS // (2 * math.prod(tail)))
    x, gate = (random((copies, len(scales), *tail), torch.float32, seed) for seed in (7, 8))
    pairs = zip(((x + 0.5) * scales.reshape(-1, *(1,) * len(tail)), gate), dtypes, strict=False)
    return [t.to(dtype) for t, dtype in pairs if dtype]


def sizes_of(value: object) -> tuple[int, ...]:
    """An attribute's value as sizes, or () if it is none."""
    value = (value,) if type(value) is int else value
    if not isinstance(value, (tuple, list)) or any(type(n) is not int or n < 1 for n in value):
        return ()
    return tuple(value)


def matches(got: Tensor, expected: Tensor) -> bool:
    """Whether all elements are close, and most elements of a 16-bit output equal."""
    if not got.numel():
        return got.shape == expected.shape
    eps = torch.finfo(got.dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return _are_close(got, expected, FLOAT32_UNITS * eps, expected)
    same = int((got == expected).sum()) / got.numel()
    return same >= MATCHING_SHARE and _are_close(got, expected, OUTPUT_UNITS * eps, expected)


@torch.no_grad()
def _are_close(got: Tensor, expected: Tensor, difference: float, sizes: Tensor) -> bool:
    """Whether all elements are equal, or differ by a part of the row's largest size at most."""
    if torch.equal(got, expected):
        return True
    # Differences of close float32 numbers are exact in float32.
    dtype = torch.promote_types(expected.dtype, torch.float32)
    # The maximum includes dimension 0, the copies: all terms of one row's gradient may cancel.
    largest = sizes.abs().nan_to_num_(0, 0, 0).amax((0, -1)[: got.dim()], keepdim=True).to(dtype)
    got, expected = got.to(dtype), expected.to(dtype)
    same = (got == expected).logical_or_(got.isnan().logical_and_(expected.isnan()))
    return bool(same.logical_or_((got - expected).abs_() <= difference * largest).all())
