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
from tests.support.calls import NEEDS_GPU, SLOW, differing, slow
from tests.support.one_result import one_result
from tests.support.pretended import pretended_gpu
from tilenorm.launch.calls import Needs
from tilenorm.launch.plan import plan_backward
from tilenorm.launch.target import Target
from tilenorm.launch.tuned.rules import MODULATED_ROW
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import calls_of, compile_call

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
# Where configurations have several orders unless TILENORM_ONE_RESULT is set.
OF_GRADIENTS = ((1536, "sm_80", "layer"), (2560, "sm_80", "rms"), (4096, "sm_90", "rms"))
OF_GRADIENTS += ((4096, "sm_90", "layer"), (3072, "sm_80", "layer"), (8192, "sm_90", "rms"))
# Where float32 weights are read in parts (kernels/outputs.part_of_weights): in two, and in four.
IN_PARTS = ((896, "sm_90", "rms"), (640, "sm_80", "layer"), (2048, "sm_80", "rms"))
# (hidden size, heads with a weight of their own, kind, architecture) of those that are compiled.
COMPILED = [*product((896, 640, 1024), (0,), ("rms", "layer"), ("sm_90", "sm_80", "sm_100"))]
COMPILED += product((128, 64, 512), (24,), ("rms", "layer"), ("sm_90", "sm_120"))
OF_GATES = ((640, "sm_90", "rms"), (384, "sm_80", "layer"), (192, "sm_90", "layer"))
OF_GATES += ((1536, "sm_80", "rms"), (4096, "sm_90", "layer"), (7168, "sm_90", "rms"))
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


def without_effect(rows: Rows) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, y, the bits that it has to have) of norms that are modulated by zeros, and whose gate
    multiplies by 1. Behind a gate y is float32, so that no rounding hides a bit.
    """
    total = rows.total
    hidden = total.shape[-1]
    if hidden <= MODULATED_ROW:
        zeros = torch.zeros(1, hidden, dtype=total.dtype, device=total.device)
        modulated = rows.call("modulated_KIND", total, scale=zeros, shift=zeros)
        yield "modulated", modulated, rows.plain(total)
    y = rows.plain(total, out_dtype=F)
    gates = {"": torch.full_like(total, torch.inf), "float32 ": torch.full(total.shape, torch.inf)}
    for (name, gate), before in product(gates.items(), (True, False)):
        if not before and gate.dtype.itemsize != total.dtype.itemsize:
            continue  # has an order of its own
        how = {"norm_before_gate": before, "activation": "sigmoid", "out_dtype": F}
        norm = partial(rows.call, "gated_KIND", **how)
        place = f"{name}gate {'behind' if before else 'before'} the norm"
        gate = gate.to(total.device)
        yield place, norm(total, gate), y
        parts = [norm(total[part], gate[part]) for part in pieces(rows)]
        yield f"{place} in batches", torch.cat(parts), y
        wide = torch.cat((gate, gate), -1)[:, : gate.shape[-1]]
        yield f"{place}, strided", norm(total, wide), y
        yield f"{place}, float32 weight", norm(total, gate, weight=rows.weight.float()), y
        with torch.enable_grad():
            leaf = total.clone().requires_grad_()
            yield f"{place} with grad", norm(leaf, gate).detach(), y


def gradients(rows: Rows) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, dx, the bits that it has to have) for one dy."""
    x, residual, total, dy = rows.x, rows.residual, rows.total, rows.x.flip(0)
    zero = torch.zeros_like(total)

    def dx(function, *tensors, outputs=(dy,), of: int = 0, alone=False, **options) -> Tensor:
        """The gradient of a tensor, the first by default. alone: no other gradient is asked for."""
        leaves = [t.detach().requires_grad_(not alone or i == of) for i, t in enumerate(tensors)]
        named = {name: t.detach().requires_grad_() for name, t in options.items()}
        with torch.enable_grad():
            results = function(*leaves, **named)
        results = results if isinstance(results, tuple) else (results,)
        asked = [leaves[of]] if alone else [*leaves, *named.values()]
        grads = torch.autograd.grad(results[: len(outputs)], asked, outputs)
        return grads[0 if alone else of]

    plain, weight = rows.plain, {"weight": rows.weight}
    bias = {"bias": torch.zeros_like(rows.weight) if rows.bias is None else rows.bias}
    expected = dx(plain, total, **weight)
    yield "frozen weight", dx(plain, total), expected
    yield "dx alone", dx(plain, total, alone=True, **weight, **bias), expected
    parts = [dx(plain, total[p], outputs=(dy[p],), **weight) for p in pieces(rows)]
    yield "in batches", torch.cat(parts), expected
    wide = torch.cat((total, total), -1)[:, : total.shape[-1]]
    yield "strided", dx(plain, wide, alone=True, **weight), expected
    yield "with a bias", dx(plain, total, **weight, **bias), expected
    yield "bias alone", dx(plain, total, **bias), expected
    yield "float32 weight", dx(plain, total, weight=rows.weight.float()), expected
    yield "offset", dx(partial(plain, offset=1.0), total, weight=rows.weight - 1), expected
    add = partial(rows.call, "add_KIND")
    yield "add", dx(add, x, residual, **weight), expected
    yield "add, gradient of the residual", dx(add, x, residual, of=1, **weight), expected
    yield "add, dx alone", dx(add, x, residual, alone=True, **weight), expected
    both = {"outputs": (dy, zero)}
    yield "add, both gradients", dx(add, x, residual, **both, **weight), expected
    yield "add, both gradients, frozen weight", dx(add, x, residual, **both), expected
    yield "add, both gradients, bias", dx(add, x, residual, **both, **weight, **bias), expected
    ones = torch.ones_like(rows.weight)
    yield "layer scale", dx(add, x, residual, layer_scale=ones, **weight), expected
    masked = partial(add, dropout_mask=torch.ones_like(x, dtype=torch.bool))
    yield "dropout", dx(masked, x, residual, **weight), expected
    yield "two residuals", dx(lambda t, r, **how: add(t, (zero, r), **how), x, residual), expected
    yield "norm, add", dx(partial(rows.call, "KIND_add"), total, residual, **weight), expected


def differences(pairs: Iterator[tuple[str, Tensor, Tensor]]) -> dict[str, str]:
    found = {}
    for name, t, expected in pairs:
        assert t.shape == expected.shape and t.dtype == expected.dtype, name
        found |= differing({name: t}, {name: expected})
    return found


@pytest.mark.parametrize("hidden, arch, kind", [*DRAWN[:4], *slow(*DRAWN[4:])])
def test_every_form_in_the_interpreter(kind, arch, hidden):
    with pretended_gpu(arch), torch.no_grad():
        assert not differences(forms(Rows.random(kind, 6, hidden, "cpu")))


@pytest.mark.parametrize("hidden, arch, kind", [OF_GRADIENTS[0], *slow(*OF_GRADIENTS[1:])])
def test_every_gradient_in_the_interpreter(kind, arch, hidden):
    with one_result(), pretended_gpu(arch), torch.no_grad():
        assert not differences(gradients(Rows.random(kind, 4, hidden, "cpu", F)))


@pytest.mark.parametrize("hidden, arch, kind", [IN_PARTS[0], *slow(*IN_PARTS[1:])])
def test_float32_weights_in_the_interpreter(kind, arch, hidden):
    with one_result(), pretended_gpu(arch), torch.no_grad():
        pairs = gradients(Rows.random(kind, 4, hidden, "cpu"))
        assert not differences(pair for pair in pairs if pair[0] in ("float32 weight", "offset"))


@pytest.mark.parametrize("hidden, kind", [(128, "rms"), *slow((80, "rms"), (1024, "layer"))])
def test_float32_weights_of_heads_in_the_interpreter(hidden, kind):
    x, dy = torch.randn(2, 5, 24, hidden).to(B)
    weight = torch.randn(24, hidden).to(B)
    norm = getattr(tilenorm, f"{kind}_norm")
    grads = []
    with one_result(), pretended_gpu("sm_90"):
        for w in (weight, weight.float()):
            leaf = x.clone().requires_grad_()
            y = norm(leaf, (hidden,), weight=w, eps=EPS, backend="cutile")
            grads.append(torch.autograd.grad(y, leaf, dy)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("hidden, heads, kind, arch", [COMPILED[0], *slow(*COMPILED[1:])])
def test_float32_weights_leave_rows_where_they_are(hidden, heads, kind, arch):
    """Compiled sums have one order only if the threads have the same elements of a row with weights
    of either dtype. Once rows passed through shared memory into the layout of float32 weights,
    which took three to six times the bytes of a tile in float32.
    """
    bias = "float32" if kind == "layer" else None
    spec = NormSpec(kind, hidden, "bfloat16", "float32", bias, heads=heads)
    with one_result():
        plan = plan_backward(spec, Target.of(arch), Needs(dx=True))
        (launch,) = calls_of(plan, (heads or 16) << 12)
    tile = plan.config.rows * sum(plan.config.segments(hidden)) * 4
    assert compile_call(launch, arch).shared_bytes < 2 * tile


@pytest.mark.parametrize("hidden, arch, kind", [OF_GATES[0], *slow(*OF_GATES[1:])])
def test_every_gate_in_the_interpreter(kind, arch, hidden):
    with one_result(), pretended_gpu(arch), torch.no_grad():
        assert not differences(without_effect(Rows.random(kind, 6, hidden, "cpu")))


@SLOW
def test_without_the_setting_there_are_several_orders():
    """What the tests with the setting compare would differ without it."""
    (hidden, arch, kind), (its_hidden, its_arch, its_kind) = OF_GRADIENTS[0], OF_GATES[0]
    with one_result(False), torch.no_grad():
        with pretended_gpu(arch):
            assert differences(gradients(Rows.random(kind, 4, hidden, "cpu", F)))
        with pretended_gpu(its_arch):
            assert differences(without_effect(Rows.random(its_kind, 6, its_hidden, "cpu")))


@KINDS
@pytest.mark.parametrize("hidden", [256, *slow(1536)])
def test_a_float32_sum_in_the_interpreter(kind, hidden):
    with pretended_gpu(), torch.no_grad():
        assert not differences(forms(Rows.random(kind, 6, hidden, "cpu", of_sum=F)))


@pytest.mark.long
@NEEDS_GPU
@KINDS
@pytest.mark.parametrize("hidden, dtypes", ON_A_GPU, ids=str)
def test_every_form_on_a_gpu(kind, hidden, dtypes):
    rows = Rows.random(kind, max(64, (1 << 24) // hidden), hidden, "cuda", *dtypes)
    with torch.no_grad():
        assert not differences(forms(rows))


@pytest.mark.long
@NEEDS_GPU
@KINDS
@pytest.mark.parametrize("hidden, dtype", [*product(SIZES[::3], [B]), *product(SIZES[1::3], [F])])
@pytest.mark.parametrize("compared", [gradients, without_effect])
def test_every_gradient_and_gate_on_a_gpu(compared, kind, hidden, dtype):
    rows = Rows.random(kind, max(64, (1 << 24) // hidden), hidden, "cuda", dtype)
    with one_result(), torch.no_grad():
        assert not differences(compared(rows))


@NEEDS_GPU
@KINDS
def test_compiled_on_a_gpu(kind):
    for hidden in (128, 1536, 4096):
        rows = Rows.random(kind, 4096, hidden, "cuda")
        y = rows.plain(rows.total)
        compiled = torch.compile(rows.plain)(rows.total)
        assert torch.equal(compiled, y), hidden
