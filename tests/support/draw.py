"""Draws cases of any norm of rows: a spec, a number of rows and a seed decide all of a case."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import NORMS, QUANTIZED_NORMS
from tilenorm.tools.candidates import written

from . import drawing, layouts
from .cases import DTYPES, MAX_HIDDEN
from .layouts import Layout
from .quantized import HOWS

MOST_FEW = 40  # rows of a batch of a few rows


class Limits(NamedTuple):
    """The largest case: elements of a row, rows, and elements of the input."""

    hidden: int
    rows: int
    elements: int


GPU = Limits(MAX_HIDDEN, 20000, 1 << 25)
INTERPRETER = Limits(520, 24, 1 << 12)


@dataclass(frozen=True)
class Case:
    """rows: the extent of the first dimension, so with heads the number of tokens."""

    spec: NormSpec
    rows: int
    seed: int

    def __str__(self) -> str:
        return written(self)

    @property
    def row_shape(self) -> tuple[int, ...]:
        spec = self.spec
        return (spec.heads, spec.hidden) if spec.heads else (spec.hidden,)

    @property
    def how(self) -> Quantization | None:
        """How the output is quantised too, where a function quantises the norm."""
        spec = self.spec
        others = spec.dropout_mask, spec.layer_scale, spec.out_dtype  # those take none
        if f"{spec.op}_quantized" not in QUANTIZED_NORMS or any(others):
            return None
        hows = [how for how in HOWS if not (how.group and spec.hidden % how.group)]
        return hows[self.seed % len(hows)]

    def picks(self) -> dict[str, Tensor]:
        """By name, the rows of another batch, each by its number in this one."""
        rows, rng = self.rows, Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(rows, generator=generator)
        few, many = rng.randint(1, min(rows, MOST_FEW)), rng.randint(1, rows)
        return {
            "permuted": order,
            "moved by one": torch.arange(rows).roll(1),
            "one row": order[:1],
            "the last rows": torch.arange(rows - few, rows),
            "a subset": order[:many].sort().values,
            "repeated": torch.randint(rows, (rows,), generator=generator),
        }

    def layout(self, name: str) -> Layout:
        """The drawn layout of one of the tensors that have rows."""
        halves = self.rows % 2 == 0 and self.seed % 4 < 2
        return layouts.draw(Random(f"{self.seed} {name}"), (self.rows, *self.row_shape), halves)


@contextmanager
def naming(case: object) -> Iterator[None]:
    """A block whose errors name the case that it checks."""
    try:
        yield
    except Exception as error:
        raise AssertionError(str(case)) from error


def drawn(count: int, seed: int, limits: Limits) -> list[Case]:
    """Every op comes with every dtype before one of the pairs comes again."""
    rng, pairs, cases = Random(seed), [], []
    for number in range(count):
        if not pairs:
            pairs = list(product(NORMS, DTYPES))
            rng.shuffle(pairs)
        hidden = drawing.hidden(rng, limits.hidden)
        spec = drawing.spec(rng, *pairs.pop(), hidden)
        rows = min(limits.rows, max(1, limits.elements // (hidden * (spec.heads or 1))))
        # Mostly as many rows as there may be, and some batches that do not fill the GPU.
        rows = rng.choice((rng.randint(1, rows), drawing.size(rng, rows)))
        cases.append(Case(spec, rows, seed * 1_000_000 + number))
    return cases
