"""Draws the cases of the sweep: a spec, a number of rows and a seed decide all of a case."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain, islice, product
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tilenorm.launch.tuned import TABLES
from tilenorm.spec import GROUPS, ITEM_BYTES, NormSpec, Quantization
from tilenorm.table import NORMS, QUANTIZED_NORMS

from .. import drawing, layouts
from ..cases import DTYPES, MAX_HIDDEN
from ..layouts import Layout
from ..quantized import HOWS

REGIMES = (64, 256, 1000, 1001, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288)
REGIMES += (16384, 20480, 32768, 65536, 131072)
COMPILED = 40  # one case in so many runs under torch.compile
GROUP = max(GROUPS.values())  # elements that share a scale
MOST_FEW = 40  # rows of a batch of a few rows


class Limits(NamedTuple):
    """The largest case: elements of a row, rows, and elements of the input."""

    hidden: int
    rows: int
    elements: int


GPU = Limits(MAX_HIDDEN, 20000, 1 << 25)
INTERPRETER = Limits(520, 24, 1 << 12)


B, F = "bfloat16", "float32"
# Their rows once had other bits where they were apart: in whole vectors, or in none.
VARIED = [NormSpec("layer", 1024, F, F, F), NormSpec("rms", 1024, F, F), NormSpec("rms", 4, B, B)]
VARIED += [NormSpec("rms", 4, F, F, gate=B, gate_first=True)]
VARIED_SEEDS = 8  # each draws a layout for every tensor


def _known() -> list[NormSpec]:
    """Specs whose rows once had other bits in another place, and both ends of many regimes."""

    def weighted(op: str, hidden: int, dtype: str, **fields) -> NormSpec:
        return NormSpec.of(op, hidden, dtype, weight=dtype, **fields)

    found = [weighted("add_rms_norm", n, "bfloat16") for n in (160, 256, 512)]
    found += [weighted("gated_rms_norm", 160, "bfloat16", gate_first=True)]
    found += [weighted("gated_rms_norm", 160, "float32"), weighted("add_rms_norm", 64, "float32")]
    found += [weighted("rms_norm", n, "bfloat16") for n in REGIMES]
    found += [weighted("rms_norm", n, "float32") for n in REGIMES[::2]]
    found += [
        weighted(op, n, "bfloat16", bias="bfloat16") for op in NORMS[1:] for n in REGIMES[::6]
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Case:
    """rows: the extent of the first dimension, so with heads the number of tokens."""

    spec: NormSpec
    rows: int
    seed: int

    def __str__(self) -> str:
        spec = self.spec
        plain = NormSpec(spec.norm, 0, "")
        told = {f.name: getattr(spec, f.name) for f in fields(spec)[1:]}
        words = [f"{name}={v}" for name, v in told.items() if v != getattr(plain, name)]
        return " ".join([spec.norm, *words, f"rows={self.rows}", f"seed={self.seed}"])

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that str() gave this text. Raises ValueError for any other text."""
        norm, *words = text.split()
        given = dict(word.split("=") for word in words)
        kinds = {f.name: f.type for f in fields(NormSpec)}
        try:
            rows, seed = int(given.pop("rows")), int(given.pop("seed"))
            spec = NormSpec(norm, **{n: _value(kinds[n], v) for n, v in given.items()})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a case: {text!r} ({error})") from error
        return cls(spec, rows, seed)

    @property
    def compiles(self) -> bool:
        return self.seed % COMPILED == COMPILED - 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        spec = self.spec
        return (spec.heads, spec.hidden) if spec.heads else (spec.hidden,)

    @property
    def how(self) -> Quantization | None:
        """How the output is quantised too, where a function quantises the norm."""
        spec = self.spec
        if f"{spec.op}_quantized" not in QUANTIZED_NORMS or spec.dropout_mask or spec.layer_scale:
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


def drawn(seed: int, limits: Limits) -> Iterator[Case]:
    """Cases without end. Every op comes with every dtype before one of the pairs comes again."""
    rng, number = Random(seed), 0
    while True:
        pairs = list(product(NORMS, DTYPES))
        rng.shuffle(pairs)
        for op, dtype in pairs:
            hidden = drawing.hidden(rng, limits.hidden)
            spec = drawing.spec(rng, op, dtype, hidden)
            rows = min(limits.rows, max(1, limits.elements // (hidden * (spec.heads or 1))))
            # Mostly as many rows as there may be, and some batches that do not fill the GPU.
            rows = rng.choice((rng.randint(1, rows), drawing.size(rng, rows)))
            yield Case(spec, rows, seed * 1_000_000 + number)
            number += 1


def known(limits: Limits) -> list[Case]:
    specs = [spec for spec in VARIED for _ in range(VARIED_SEEDS)] + _known()
    return [
        Case(spec, min(4096, limits.elements // spec.hidden), number)
        for number, spec in enumerate(specs, 1)
    ]


def quantized(op: str, arch: str) -> list[Case]:
    """A case of each size of the tables, and one of a size between it and the size before."""
    rng, cases = Random(op), []
    for dtype in ("bfloat16", "float32"):
        table, before = TABLES[arch].forward[op, ITEM_BYTES[dtype]], 0
        for last, _ in table:
            between = GROUP * rng.randint(before // GROUP + 1, max(1, last // GROUP))
            for hidden in dict.fromkeys((last, between)):
                bias = dtype if "layer" in op else None
                spec = NormSpec.of(op, hidden, dtype, weight=dtype, bias=bias)
                cases.append(Case(spec, 4, len(cases)))
            before = last
    return cases


def some(count: int, seed: int, limits: Limits) -> list[Case]:
    """Cases for a GPU begin with the known ones."""
    first = known(limits) if limits == GPU else []
    return list(islice(chain(first, drawn(seed, limits)), count))


def _value(kind: type, text: str):
    if kind is bool:
        return {"True": True, "False": False}[text]
    return kind(text) if kind in (int, float) else text
