"""Sizes that the data alone tell: each function exports, compiles, and gives the values of eager.

A mask selects some of a dimension, whose size is then a symbol without a value. A graph has to be
the same for every value of it, 0 and 1 among them.
"""

from collections.abc import Callable
from itertools import chain, combinations
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilenorm
from tests.support.calls import random, slow
from tests.support.quantized import HOWS, arguments
from tilenorm.integrations.fx import replace_norms
from tilenorm.table import MODULATED_NORMS, NORMS, OPS, QUANTIZED_NORMS, ROTATED_NORMS

SIZES = {"b": 4, "s": 6, "h": 3, "k": 2, "p": 9, "f": 2, "n": 128, "d": 16, "1": 1}
BY_DATA = "bsh"  # the data may tell these
CAPTURES = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
SEED = 7
# Where the groups of a modulated norm lie, and the tables and positions of a rotation.
GROUPS = ("n", "b n", "b 1 n", "b s n", "1 1 n")
TABLES = (("d", None), ("s d", None), ("b 1 d", None), ("b s d", None))
TABLES += (("p d", "b s"), ("p d", "s"), ("p d", "b 1"))


class Case(NamedTuple):
    """A call. tensors: the sizes of each, by its argument's name. selected: the dimensions that a
    mask selects. apart: whether each tensor is selected by a mask of its own, so that the graph
    does not know that their sizes are equal.
    """

    op: str
    tensors: dict[str, str]
    selected: str
    apart: bool
    options: dict

    @property
    def rotated(self) -> bool:
        return self.op in ROTATED_NORMS


class Selected(nn.Module):
    """A call of tensors that masks have selected some of."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case

    def forward(self, masks: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        case, given = self.case, {}
        indices = {size: indices_of(mask) for size, mask in zip(case.selected, masks, strict=True)}
        for (name, sizes), tensor in zip(case.tensors.items(), tensors, strict=True):
            for dim, size in enumerate(sizes.split()):
                if size in case.selected:
                    mask = masks[case.selected.index(size)]
                    index = indices_of(mask.clone()) if case.apart else indices[size]
                    tensor = tensor.index_select(dim, index)
            given[name] = tensor
        shape = (SIZES["d" if case.rotated else "n"],)
        made = getattr(tilenorm, case.op)(**given, normalized_shape=shape, **case.options)
        made = made if isinstance(made, tuple) else (made,)
        return tuple([t for t in made if t is not None])


def indices_of(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def drawn(op: str, seed: int, by_data: str = BY_DATA) -> Case:
    """A call of an op. by_data: the dimensions of which the data may tell the size."""
    rng, row = Random(f"{op} {seed} {SEED}"), OPS[op]
    heads = rng.random() < 0.3 and op in NORMS
    x = "b s h n" if heads else "b s n"
    tensors, options = {"input": x}, {}
    if op in ROTATED_NORMS:
        cos, positions = rng.choice(TABLES)
        tensors = {"input": "b s h d", "cos": cos, "sin": cos, "key": "b s k d"}
        tensors |= {"positions": positions} if positions else {}
    elif op in MODULATED_NORMS:
        group = rng.choice(GROUPS)
        tensors |= {"scale": group, "shift": group}
        tensors |= {"residual": x, "gate": group} if rng.random() < 0.5 else {}
    elif op in QUANTIZED_NORMS:
        options = arguments(rng.choice(HOWS))
    names = [port.name for port in row.takes]
    for name in ("residual", "gate", "layer_scale", "weight", "bias", "next_weight"):
        port = row.takes[names.index(name)] if name in names else None
        if port and name not in tensors and op not in ROTATED_NORMS:
            if port.needed:
                tensors[name] = x
            elif port.parameter and rng.random() < 0.7:
                tensors[name] = "h n" if heads and port.dims == "[h] n" else "n"
    if "weight" in tensors and "bias" in tensors:
        tensors["bias"] = tensors["weight"]
    sizes = [size for size in by_data if size in tensors["input"]]
    each = chain.from_iterable(combinations(sizes, n) for n in (1, 2))
    return Case(op, tensors, "".join(rng.choice(list(each))), rng.random() < 0.3, options)


def tensors_of(case: Case) -> list[Tensor]:
    made = []
    for seed, (name, sizes) in enumerate(case.tensors.items()):
        shape = [SIZES[size] for size in sizes.split()]
        t = random(*shape, seed=seed)
        made.append((t.abs() * 4).long().clamp(0, SIZES["p"] - 1) if name == "positions" else t)
    return made


def masks_of(case: Case, count: int | None = None) -> list[Tensor]:
    """Masks that take so many of each dimension, or some."""
    numbers = [torch.arange(SIZES[size]) for size in case.selected]
    return [n % 3 != 1 if count is None else n < count for n in numbers]


def assert_same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(*[t.view(torch.uint8) if t.itemsize == 1 else t for t in (a, b)])


def assert_near(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-3, atol=1e-4)


def assert_right(run: Callable, case: Case, same: Callable = assert_same) -> None:
    """What was made for one number of rows gives eager's values for it, for 0 and for 1."""
    module, tensors = Selected(case), tensors_of(case)
    for count in (None, 0, 1):
        masks = masks_of(case, count)
        same(run(masks, tensors), module(masks, tensors))


def exported(case: Case, **how) -> torch.export.ExportedProgram:
    return torch.export.export(Selected(case), (masks_of(case), tensors_of(case)), **how)


def compiled(function: Callable, compile: Callable = torch.compile, **how) -> Callable:
    torch._dynamo.reset()
    run = compile(function, fullgraph=True, **how)

    def call(*given):
        with torch._dynamo.config.patch(CAPTURES):
            return run(*given)

    call.report = getattr(run, "tilenorm_report", None)
    return call


QUICK = ("modulated_layer_norm", "rms_norm_rope", "add_rms_norm")
EACH_OP = pytest.mark.parametrize("op", [*QUICK, *slow(*(op for op in OPS if op not in QUICK))])


@EACH_OP
def test_it_exports_and_compiles(op):
    case = drawn(op, 0)
    assert_right(exported(case, strict=False).module(), case)
    case = drawn(op, 1)
    assert_right(compiled(Selected(case), backend="aot_eager"), case)


# Of each kind of norm one.
SOME = ("layer_norm", "gated_rms_norm", "modulated_rms_norm", "rms_norm_rope")
SOME += ("rms_norm_add_rms_norm", "add_rms_norm_quantized")


@pytest.mark.parametrize("op", slow(*SOME))
def test_what_it_exports_decomposes(op):
    # A weight by heads whose number the data tell does not decompose, and has no gradient.
    case = drawn(op, 0, "bs")
    program = exported(case, strict=False).run_decompositions(tilenorm.decompositions())
    assert "tilenorm" not in str(program.graph)
    assert_right(program.module(), case, assert_near)


@pytest.mark.parametrize("op", slow(*SOME[:-1]))
def test_its_gradients(op):
    case = drawn(op, 1, "bs")
    names, tensors, masks = [*case.tensors], tensors_of(case), masks_of(case)
    leaves = [
        t.requires_grad_() if t.is_floating_point() and n not in ("cos", "sin") else t
        for n, t in zip(names, tensors, strict=True)
    ]
    asked = [t for t in leaves if t.requires_grad]

    def gradients(function: Callable) -> tuple[Tensor, ...]:
        made = function(masks, leaves)
        return torch.autograd.grad(sum((y * y).sum() for y in made), asked)

    wanted = gradients(Selected(case))
    for a, b in zip(gradients(compiled(Selected(case), backend="aot_eager")), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Frames(nn.Module):
    """A modulation by frame of tokens, of which the data tell the number."""

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return tilenorm.modulated_rms_norm(x[:, mask], (8,), scale, scale)


def test_groups_have_to_divide_what_the_data_tell():
    x, scale = random(2, 6, 8), random(2, 2, 8, seed=1)
    mask, odd = torch.arange(6) < 4, torch.arange(6) < 3
    run = torch.export.export(Frames(), (x, mask, scale)).module()
    assert torch.equal(run(x, mask, scale), Frames()(x, mask, scale))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        run(x, odd, scale)


class Taken(nn.Module):
    """Rows that two masks take."""

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return tilenorm.add_rms_norm(x[mask], x[other], (8,))[0]


def test_two_numbers_that_the_data_tell_have_to_be_equal():
    x, mask = random(6, 8), torch.arange(6) < 4
    run = torch.export.export(Taken(), (x, mask, mask.flip(0))).module()
    assert torch.equal(run(x, mask, mask.flip(0)), Taken()(x, mask, mask.flip(0)))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        run(x, mask, torch.arange(6) < 2)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(Exception, match=r"argument 'scale' takes leading sizes of the input's"):
        torch.export.export(Frames(), (random(2, 6, 8), torch.arange(6) < 4, random(3, 8)))


class Model(nn.Module):
    """PyTorch's norms of rows whose number the data tell, one of them modulated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(8), nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        rows, shift, scale = x[mask], shift[mask], scale[mask]
        return self.second(self.first(rows)) * (1 + scale[:, None]) + shift[:, None]


class Rotated(nn.Module):
    """RMSNorm of heads, and the rotary embedding behind it, as models spell them."""

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = F.rms_norm(x[mask], (8,)).transpose(1, 2)
        first, second = q.chunk(2, -1)
        return q * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


MASK = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
MODELS = {
    "modulated": (Model, (random(6, 5, 8), MASK, random(6, 8, seed=1), random(6, 8, seed=2)), 2),
    "rotated": (Rotated, (random(6, 5, 3, 8), MASK, random(1, 5, 8), random(1, 5, 8, seed=1)), 1),
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


@EACH_MODEL
def test_norms_of_a_graph_are_replaced(name):
    make, given, norms = MODELS[name]
    model = make()
    graph = torch.export.export(model, given, strict=False).module()
    report = replace_norms(graph, rotation=True)
    assert (len(report.replaced), report.left) == (norms, ())
    torch.testing.assert_close(graph(*given), model(*given))


@EACH_MODEL
def test_norms_of_a_compiled_model_are_replaced(name):
    make, given, norms = MODELS[name]
    model = make()
    how = {"where": lambda node: True, "rotation": True, "backend": "aot_eager"}
    run = compiled(model, tilenorm.compile, **how)
    torch.testing.assert_close(run(*given), model(*given))
    report = run.report
    assert (len(report.replaced), report.left) == (norms, ())


def test_a_patched_model_exports_and_compiles():
    make, given, _ = MODELS["modulated"]
    model = make()
    report = tilenorm.patch(model, modulation=True)
    assert len(report.patched) == 3, report  # two norms, and the model that modulates one
    wanted = model(*given)
    program = torch.export.export(model, given, strict=False)
    assert torch.equal(program.module()(*given), wanted)
    assert torch.equal(compiled(model, backend="aot_eager")(*given), wanted)
