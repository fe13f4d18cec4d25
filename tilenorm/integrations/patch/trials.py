"""Trials: the inputs that recognition runs a module for, and the comparison of results."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .twin import Refused, Unrecognised, parameters_of, random, run, twin_of

# The rows' mean squares range from 1e6 to 1e-12. eps is much smaller than the largest, near some of
# them, and much larger than the smallest. The squares of the largest elements overflow in float16.
SCALES = (1e3, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MIN_ELEMENTS = 64  # elements per scale; enough to tell early rounding from late rounding
MAX_ELEMENTS = 2**20  # of a parameter: larger ones are embeddings, and take seconds
# Leading sizes of the inputs: a forward may compute another thing for another number of dimensions.
LEADING = ((-1, 8), (-1,), (-1, 2, 4), (-1, 2, 2, 2))
# Allowed float32 difference, in units in the last place of the row's largest element. Sums that are
# added up in another order differ by up to 3 units in PyTorch's LayerNorm of 5 to 262144 columns,
# and by up to 9 units with 3 columns.
FLOAT32_UNITS = 16
OUTPUT_UNITS = 2  # as FLOAT32_UNITS, for 16-bit outputs: one more or less in x̂, times the weight
# A 16-bit gradient is rounded up to four times in the chains that modules write out.
GRADIENT_UNITS = 8
# Share of 16-bit elements that must match exactly. Another order of the float32 sums changes the
# rounding of at most 2 elements in a thousand; early instead of late rounding changes one in four.
MATCHING_SHARE = 63 / 64


class Run(NamedTuple):
    """function(*inputs): what a twin computes, or what a form computes with a twin's parameters."""

    function: Callable[..., Tensor]
    twin: nn.Module
    inputs: list[Tensor]


class Taken(NamedTuple):
    """The inputs that a module's forward takes, and the outputs of its twins for them.

    tail: the sizes in which every input ends. ones, sizes: as in Form. outputs: by the number of
    tensors and the leading sizes; a list of the outputs in training and in evaluation.
    """

    tail: tuple[int, ...]
    ones: int
    sizes: tuple[int, ...] | None
    outputs: dict[int, dict[tuple[int, ...], list[Tensor]]]

    def inputs(self, dtypes: tuple, scales: int = len(SCALES)) -> list[Tensor]:
        """The input, whose mean is half its standard deviation, and the gate. None is left out."""
        # With one copy, a norm over the batch dimension would look like a norm over the row.
        copies = 2 * -(-MIN_ELEMENTS // (2 * math.prod(self.tail)))
        shape = copies, len(SCALES), *self.tail
        factors = torch.tensor(SCALES, device="cpu").reshape(-1, *(1,) * len(self.tail))
        x, gate = (random(shape, torch.float32, seed) for seed in (7, 8))
        pairs = zip(((x + 0.5) * factors, gate), dtypes, strict=True)
        return [t[:, :scales].to(dtype) for t, dtype in pairs if dtype is not None]

    def main(self, number: int) -> tuple[int, ...]:
        """Leading sizes that the forward takes."""
        return next(leading for leading in self.outputs[number] if leading)

    def call(self, twin: nn.Module, leading: tuple[int, ...], *inputs: Tensor) -> Tensor:
        y = run(twin, *(_shaped(t, leading) for t in inputs))
        return y.reshape(inputs[0].shape) if leading else y

    def run(self, number: int, twin: nn.Module, inputs: list[Tensor]) -> Run:
        return Run(partial(self.call, twin, self.main(number)), twin, inputs)


def taken_by(module: nn.Module, numbers: list[int]) -> Taken:
    twins, reasons = [twin_of(module, torch.float32, training) for training in (True, False)], []
    for tail, ones, sizes in _tails(module):
        taken = Taken(tail, ones, sizes, {})
        for number, leading in product(numbers, (*LEADING, ())):
            inputs = taken.inputs((torch.float32, torch.float32)[:number] + (None,) * (2 - number))
            try:
                outputs = [taken.call(twin, leading, *inputs) for twin in twins]
                if not parameters_of(module) and sizes is None:  # it may insist on this size
                    run(twins[0], *(_shaped(t, leading)[..., :3] for t in inputs))
            except Refused as reason:
                reasons.append(reason)
            else:
                taken.outputs.setdefault(number, {})[leading] = outputs
        for number in [n for n, outputs in taken.outputs.items() if not any(outputs)]:
            del taken.outputs[number]
        if taken.outputs:
            return taken
    raise reasons[0]


def _tails(module: nn.Module) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...] | None]]:
    """Candidates for the tail, the ones and the sizes of Taken: the most general one first."""
    parameters = parameters_of(module)
    if not parameters:
        yield (MIN_ELEMENTS,), 0, None
        for sizes in filter(None, map(sizes_of, vars(module).values())):
            if 1 < math.prod(sizes) <= MAX_ELEMENTS:
                yield sizes, 0, sizes
        return
    shape = tuple(next(iter(parameters.values())).shape)
    ones = next(i for i, size in enumerate(shape) if size != 1)
    if ones:
        yield shape[ones:], ones, None
    yield shape, 0, None


def sizes_of(value: object) -> tuple[int, ...]:
    """An attribute's value as sizes, or () if it is none."""
    value = (value,) if type(value) is int else value
    if not isinstance(value, (tuple, list)) or any(type(n) is not int or n < 1 for n in value):
        return ()
    return tuple(value)


def normalised_together(twin: nn.Module, taken: Taken) -> tuple[int, int]:
    """The dims and groups of a form: which columns of a row depend on its first."""
    number = next(iter(taken.outputs))
    x, *gates = taken.inputs(float32(number))
    x = torch.ones_like(x) * x[:, 1:2]
    before = taken.call(twin, taken.main(number), x, *gates)
    changed = torch.zeros(math.prod(taken.tail), dtype=torch.bool, device="cpu")
    for value in (1e4, -1e4):  # one of both changes a LayerNorm of two columns
        other = x.clone()
        other.flatten(2)[..., 0] = value
        y = taken.call(twin, taken.main(number), other, *gates)
        changed |= (y != before).flatten(2).any(0).any(0)
    count, last = int(changed.sum()), taken.tail[-1]
    if changed[:count].all():
        if count in (last, len(changed)):
            return 1 if count == last else len(taken.tail), 0
        has_size = bool(parameters_of(twin)) or taken.sizes is not None
        if len(taken.tail) == 1 and count > 1 and last % count == 0 and has_size:
            return 1, last // count
    raise Unrecognised("its outputs match no norm of tilenorm")


def other_gradient(got: Run, exact: Run) -> str:
    """The name of a gradient that is not the exact one, or ""."""
    tensors = *got.inputs, *parameters_of(got.twin).values()
    eps = max(torch.finfo(t.dtype).eps for t in tensors)
    expected, sizes = _gradients(exact), _gradients(exact, of_one_column=True)
    for name, gradient in _gradients(got).items():
        if gradient is None:
            return name
        units = FLOAT32_UNITS if eps <= torch.finfo(torch.float32).eps else GRADIENT_UNITS
        size = torch.maximum(expected[name].abs(), sizes[name].abs())
        if not _are_close(gradient, expected[name], units * eps, size).all():
            return name
    return ""


def _gradients(trial: Run, of_one_column: bool = False) -> dict[str, Tensor | None]:
    """The gradients by name; None where the output does not depend on it.

    of_one_column: for a dy that is not zero in the first column alone. The terms of a gradient
    cancel each other for some dy, as for each dy of a LayerNorm of few columns.
    """
    leaves = [t.detach().requires_grad_() for t in trial.inputs]
    names = dict(zip(("the input", "the gate"), leaves, strict=False)) | parameters_of(trial.twin)
    y = trial.function(*leaves)
    if not y.requires_grad:
        return dict.fromkeys(names)
    # Random numbers alone would have next to no mean of dy · x̂, which is a term of the gradient.
    dy = random(y.shape, y.dtype, seed=len(names)) + y.detach()
    if of_one_column:
        dy = torch.zeros_like(dy).index_fill_(-1, torch.tensor([0], device="cpu"), dy.abs().max())
    grads = torch.autograd.grad(y, list(names.values()), dy, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def matches(got: Tensor, expected: Tensor) -> bool:
    """Whether all elements are close, and most elements of a 16-bit output equal."""
    if not got.numel():
        return got.shape == expected.shape
    eps = torch.finfo(got.dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return bool(_are_close(got, expected, FLOAT32_UNITS * eps, expected).all())
    close, same = (_are_close(got, expected, n * eps, expected) for n in (OUTPUT_UNITS, 0))
    return bool(close.all()) and same.double().mean().item() >= MATCHING_SHARE


def _are_close(got: Tensor, expected: Tensor, difference: float, sizes: Tensor) -> Tensor:
    """Where the elements are equal, or differ by a part of the row's largest size at most."""
    got, expected = got.double(), expected.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    # The maximum includes dimension 0, the copies: all terms of one row's gradient may cancel.
    sizes = sizes.double().abs().nan_to_num(0.0, 0.0, 0.0)
    largest = sizes.amax((0, -1)[: got.dim()], keepdim=True)
    return same | ((got - expected).abs() <= difference * largest)


def float32(number: int) -> tuple:
    return torch.float32, torch.float32 if number == 2 else None


def small_sizes(number: int) -> Iterator[tuple[int, ...]]:
    if number < 3:
        yield from product((0, 1, 3), repeat=number)
    else:
        yield (1,) * number
        for place, size in product(range(number), (0, 1)):
            yield tuple(size if n == place else 2 for n in range(number))


def unusual(shape: tuple[int, ...], seed: int) -> Tensor:
    tensor = random(shape, torch.float32, seed)
    rows = tensor.view(-1, shape[-1]) if len(shape) > 1 else tensor.view(1, -1)
    rows[0] = 0
    if len(rows) > 2:
        rows[2, 0] = torch.nan
    return tensor


def sliced(shape: tuple[int, ...], seed: int) -> Tensor:
    return random((*shape, 2), torch.float32, seed)[..., 0]


def transposed(shape: tuple[int, ...], seed: int) -> Tensor:
    return random(shape[::-1], torch.float32, seed).permute(*reversed(range(len(shape))))


def _shaped(tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """A tensor of (copies, scales, ...) with other leading sizes; one row for none."""
    return tensor.reshape(*leading, *tensor.shape[2:]) if leading else tensor[0, 1]
