"""The kinds of rows: each fills one tensor of a row with special numbers, or all of them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

# Fills a row, which holds normal numbers, in place.
Fill = Callable[[Tensor, torch.dtype, Generator], None]

LARGEST_DY = {torch.float16: 1e3, torch.bfloat16: 1e25, torch.float32: 1e25}
# Largest number whose squares, up to 2 to the 18th of them, have a sum in float32.
LARGEST = {torch.float16: 6e4, torch.bfloat16: 1e16, torch.float32: 1e16}


class Kind(NamedTuple):
    """fills: by tensor. A tensor that a spec does not have is left out.

    summed: whether dW and dB of a batch with such a row can be compared with float64. A product
    that overflows float32 cannot, nor can infinity times a number that rounds to zero.
    """

    fills: dict[str, Fill]
    summed: bool = True


def _scaled(row: Tensor, dtype, generator, sizes: dict[torch.dtype, float]) -> None:
    row.div_(row.abs().max()).mul_(sizes[dtype])


def _subnormal(row: Tensor, dtype, generator) -> None:
    """Numbers of which most are subnormal, and some are zero."""
    row.mul_(torch.finfo(dtype).tiny / 4)


def _small_dy(row: Tensor, dtype, generator) -> None:
    """Subnormal in float16. In the others no product is subnormal in float32, and loses digits."""
    row.mul_(torch.finfo(dtype).tiny / 4 if dtype == torch.float16 else 1e-30)


def _constant(row: Tensor, dtype, generator, value: float) -> None:
    row.fill_(value)


def _one(row: Tensor, dtype, generator, value: float | dict[torch.dtype, float]) -> None:
    at = torch.randint(row.numel(), (1,), generator=generator)
    row.view(-1)[at] = value[dtype] if isinstance(value, dict) else value


def _many_magnitudes(row: Tensor, dtype, generator) -> None:
    row.mul_(torch.exp2(torch.randint(-12, 8, row.shape, generator=generator).float()))


def _large_mean(row: Tensor, dtype, generator) -> None:
    row.add_(4)


_large, _large_dy = partial(_scaled, sizes=LARGEST), partial(_scaled, sizes=LARGEST_DY)
_zero, _nan = partial(_constant, value=0.0), partial(_one, value=torch.nan)
_inf, _minus_inf = partial(_one, value=torch.inf), partial(_one, value=-torch.inf)
_EVERY = ("x", "residual", "gate", "dy", "dsum", "addend", "skip")

KINDS = {
    "normal": Kind({}),
    "large": Kind({"x": _large, "residual": _large}),
    "subnormal": Kind({"x": _subnormal, "residual": _subnormal}),
    "many magnitudes": Kind(dict.fromkeys(_EVERY, _many_magnitudes)),
    "one huge": Kind({"x": partial(_one, value=LARGEST)}),
    "zeros": Kind({"x": _zero, "residual": _zero}),
    "all zeros": Kind(dict.fromkeys(_EVERY, _zero)),
    "zeros in dy": Kind({"dy": _zero}),
    "constant": Kind({"x": partial(_constant, value=3.0)}),
    "large mean": Kind({"x": _large_mean}),
    "large dy": Kind({"dy": _large_dy, "dsum": _large_dy}),
    "small dy": Kind({"dy": _small_dy, "dsum": _small_dy}),
    "large gate": Kind({"gate": partial(_scaled, sizes=dict.fromkeys(LARGEST, 100.0))}),
    "gate of zeros": Kind({"gate": _zero}),
    "NaN": Kind({"x": _nan}),
    "infinity": Kind({"x": _inf}, summed=False),
    "minus infinity": Kind({"x": _minus_inf}, summed=False),
    "NaN in the residual": Kind({"residual": _nan}),
    "NaN in the addend": Kind({"addend": _nan}),
    "infinity after the norm": Kind({"skip": _inf}),
    "infinity in the residual": Kind({"residual": _inf}, summed=False),
    "NaN in the gate": Kind({"gate": _nan}),
    "infinity in the gate": Kind({"gate": _inf}, summed=False),
    "NaN in dy": Kind({"dy": _nan}),
    "infinity in dy": Kind({"dy": _inf}, summed=False),
    "NaN in the sum's gradient": Kind({"dsum": _nan}),
    "the largest": Kind(
        {"x": partial(_scaled, sizes={d: torch.finfo(d).max for d in LARGEST})}, summed=False
    ),
}
