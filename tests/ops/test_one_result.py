"""One row, one result: whichever function normalises a row, it has the same bits.

Public functions, served by the interpreter, and on a GPU by the compiled kernels, where the
compiler could depart from the order that they prescribe. Which order each plan has:
tests/launch/test_order.py.
"""

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tilenorm
from tests.support.calls import NEEDS_GPU, slow
from tests.support.pretended import pretended_gpu
from tilenorm.launch.tuned.rules import MODULATED_ROW

B, F = torch.bfloat16, torch.float32
EPS = 1e-6
# Hidden sizes of models, sizes of their heads, and both ends of rows that blocks share.
SIZES = (64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 2048, 2560, 2880)
SIZES += (3072, 3584, 4096, 5120, 5376, 6144, 6656, 7168, 8192, 10240, 12288, 14336, 16384, 18432)
SIZES += (20480, 24576, 32768, 65536)
# Where tables or rules once cut the rows of two norms in two ways.
INTERPRETED = (96, 640, 1536, 4096, 256, 512, 1024, 2048, 3072, 5120, 6144, 7168, 12288)
TURNS = cycle(product(("sm_90", "sm_80"), ("rms", "layer")))
DRAWN = [(hidden, *turn) for hidden, turn in zip(INTERPRETED, TURNS, strict=False)]
# A float32 sum of bfloat16 rows has the orders of float32 rows, so that it runs at a third of them.
ON_A_GPU = [*product(SIZES, [(B, B), (F, F)]), *product(SIZES[::3], [(B, F)])]
KINDS = pytest.mark.parametrize("kind", ["rms", "layer"])


class Rows(NamedTuple):
    """What a test normalises: x, a residual, their sum, and the parameters of one kind of norm."""

    kind: str
    x: Tensor
    residual: Tensor
    total: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def random(cls, kind: str, rows: int, hidden: int, device: str, dtype=B, of_sum=None) -> "Rows":
        generator = torch.Generator(device).manual_seed(rows * 31 + hidden)
        random = partial(torch.randn, generator=generator, device=device)
        x, residual = random(rows, hidden).to(dtype), random(rows, hidden).to(of_sum or dtype)
        # weight − 1 is exact, so that an offset of 1 gives the same weight.
        weight = (1 + (random(hidden) * 8).round() / 64).to(dtype)
        bias = random(hidden).to(dtype) if kind == "layer" else None
        return cls(kind, x, residual, x + residual, weight, bias)

    @property
    def parameters(self) -> dict:
        given = {"weight": self.weight, "eps": EPS}
        return given if self.bias is None else given | {"bias": self.bias}

    def call(self, name: str, *tensors: Tensor, **options):
        """A function of this kind of norm, named with KIND in the place of rms_norm."""
        function = getattr(tilenorm, name.replace("KIND", f"{self.kind}_norm"))
        shape = self.x.shape[-1:]
        return function(*tensors, shape, **self.parameters | {"backend": "cutile"} | options)

    def plain(self, rows: Tensor, **options) -> Tensor:
        return self.call("KIND", rows, **options)

    def add(self, x: Tensor, residual, **options) -> Tensor:
        return self.call("add_KIND", x, residual, **options)[0]


def pieces(rows: Rows) -> list[slice]:
    """Batches of one row, of a few and of the rest."""
    count = len(rows.x)
    return [slice(0, 1), slice(1, min(count, 4)), slice(min(count, 4), count)]


def forms(rows: Rows) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, y, the bits that it has to have) of every form of the norm of a sum."""
    x, residual, total = rows.x, rows.residual, rows.total
    hidden, device = x.shape[-1], x.device
    y = rows.plain(total)
    yield "add", rows.add(x, residual), y.to(x.dtype)
    parts = pieces(rows)
    yield "in batches", torch.cat([rows.plain(total[part]) for part in parts]), y
    added = [rows.add(x[part], residual[part]) for part in parts]
    yield "add in batches", torch.cat(added), y.to(x.dtype)
    wide = torch.cat((total, total), -1)[:, :hidden]
    yield "strided", rows.plain(wide), y
    yield "float32 weight", rows.plain(total, weight=rows.weight.float()), y
    yield "offset", rows.plain(total, weight=rows.weight - 1, offset=1.0), y
    none = torch.zeros_like(x)
    if residual.dtype == x.dtype:
        yield "two residuals", rows.add(x, (none, residual)), y
        ones = torch.ones(hidden, dtype=x.dtype, device=device)
        yield "layer scale", rows.add(x, residual, layer_scale=ones), y
        yield "dropout", rows.add(x, residual, dropout_mask=torch.ones_like(x, dtype=torch.bool)), y
        after = rows.call("KIND_add", total, residual)
        yield "norm, add", after, residual + y
        for_next = {"next_weight": rows.weight}
        for_next |= {} if rows.bias is None else {"next_bias": rows.bias}
        chained, its_sum = rows.call("KIND_add_KIND", total, residual, **for_next)
        yield "sum of a chain", its_sum, after
        yield "chain", chained, rows.plain(after)
    if hidden <= MODULATED_ROW:
        zeros = torch.zeros(1, hidden, dtype=total.dtype, device=device)
        yield "modulated", rows.call("modulated_KIND", total, scale=zeros, shift=zeros), y
    if total.dtype == x.dtype:  # else they round to other dtypes
        early = rows.plain(total, rounding="early")
        yield "early", rows.add(x, residual, rounding="early"), early
    if total.dtype == x.dtype and hidden % 128 == 0:
        for name, given in (("quantized", (total,)), ("add quantized", (x, residual))):
            for scaling in ("row", "block"):
                function = "KIND_quantized" if len(given) == 1 else "add_KIND_quantized"
                made = rows.call(function, *given, scaling=scaling, return_output=True)
                yield f"{name} by {scaling}", made.output, y
    leaves = [total.clone().requires_grad_(), rows.weight.clone().requires_grad_()]
    with torch.enable_grad():
        yield "with grad", rows.plain(leaves[0], weight=leaves[1]).detach(), y


def differences(pairs: Iterator[tuple[str, Tensor, Tensor]]) -> dict[str, str]:
    found = {}
    for name, t, expected in pairs:
        assert t.shape == expected.shape and t.dtype == expected.dtype, name
        unequal = t != expected
        if unequal.any():
            found[name] = f"{int(unequal.sum())} of {t.numel()}"
    return found


@pytest.mark.parametrize("hidden, arch, kind", [*DRAWN[:4], *slow(*DRAWN[4:])])
def test_every_form_in_the_interpreter(kind, arch, hidden):
    with pretended_gpu(arch), torch.no_grad():
        assert not differences(forms(Rows.random(kind, 6, hidden, "cpu")))


@KINDS
@pytest.mark.parametrize("hidden", [256, *slow(1536)])
def test_a_float32_sum_in_the_interpreter(kind, hidden):
    with pretended_gpu(), torch.no_grad():
        assert not differences(forms(Rows.random(kind, 6, hidden, "cpu", of_sum=F)))


@NEEDS_GPU
@KINDS
@pytest.mark.parametrize("hidden, dtypes", ON_A_GPU, ids=str)
def test_every_form_on_a_gpu(kind, hidden, dtypes):
    rows = Rows.random(kind, max(64, (1 << 24) // hidden), hidden, "cuda", *dtypes)
    with torch.no_grad():
        assert not differences(forms(rows))


@NEEDS_GPU
@KINDS
def test_compiled_on_a_gpu(kind):
    for hidden in (128, 1536, 4096):
        rows = Rows.random(kind, 4096, hidden, "cuda")
        y = rows.plain(rows.total)
        compiled = torch.compile(rows.plain)(rows.total)
        assert torch.equal(compiled, y), hidden
