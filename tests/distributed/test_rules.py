"""The ops on DTensors: each row of the table in ops/sharding.py, and what fits none."""

from itertools import combinations, product
from math import prod

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilenorm
from tilenorm.ops.library import Backward
from tilenorm.spec import Options

from ..ops.helpers import ADD, EACH_FORM, EPS, FAMILY, GATED, LAYER, RMS, call, random
from .placing import (
    P,
    R,
    Shard,
    alike,
    case,
    compare_second_derivatives,
    counted,
    device,
    mesh,
    placed,
)
from .world import NAMES, slow_but_first

# Whole vectors: the CPU computes silu and sigmoid of what fills none by other code, to other bits.
N = 32
EACH_MESH = pytest.mark.parametrize("name", slow_but_first(reversed(NAMES)))
ONE_FORM_QUICK = pytest.mark.parametrize("form", slow_but_first(reversed(FAMILY.values())))
ONE = NAMES[0]
ROWS = ("output", "sum", "input", "residual", "gate")


def dims_of(name: str) -> int:
    return 2 if "x" in name else 1


def outputs_of(form) -> int:
    return 2 if form.other == "residual" else 1


def rows_alike(name, form):
    given = case(form, 5, 6, N)
    expected = given.alone()
    for rows in product((R, Shard(0), Shard(1)), repeat=dims_of(name)):
        found, collectives = given.on(name, alike(given, rows), [rows] * outputs_of(form))
        assert not collectives, (collectives, rows)
        assert all(found[n].placements == rows for n in ROWS if n in found)
        given.compare(found, expected)
        for weight in ("weight", "bias"):
            _, collectives = counted(found[weight].full_tensor)
            reductions = sum(p.is_shard() and mesh(name).size(i) > 1 for i, p in enumerate(rows))
            assert collectives == ({"all_reduce": reductions} if reductions else {})


@EACH_MESH
@EACH_FORM
def test_rows_alike(world, name, form):
    """Rows cut in a leading dimension, uneven parts among them: no collective, the same bits; then
    one reduction of each parameter's gradient over each mesh dimension that cuts.
    """
    world.run(rows_alike, name, form)


def heads(name, form, number):
    given = case(form, 4, 5, number, N, parameter_shape=(number, N))
    expected = given.alone()
    for rows in product((R, Shard(0), Shard(1), Shard(2)), repeat=dims_of(name)):
        parameters = [Shard(0) if p == Shard(2) else R for p in rows]
        placements = alike(given, rows, parameters)
        found, collectives = given.on(name, placements, [rows] * outputs_of(form))
        assert not collectives, (collectives, rows)
        # A rank with one head has a norm without heads. On the CPU other operators compute it.
        parts = prod(mesh(name).size(i) for i, p in enumerate(rows) if p == Shard(2))
        given.compare(found, expected, exact=number // parts > 1 or parts == 1)
        for i, parameter in enumerate(parameters):
            if parameter.is_shard():
                assert all(found[n].placements[i] == parameter for n in ("weight", "bias"))


@EACH_MESH
@pytest.mark.parametrize("number", slow_but_first([5, 4]))
@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=lambda form: form.op)
def test_weights_by_head(world, name, form, number):
    """Of five heads, one of four ranks has none."""
    world.run(heads, name, form, number)


def incoming_elsewhere(name, form):
    given = case(form, 4, 6, N)
    expected = given.alone()
    dims = dims_of(name)
    for rows, dy in product((R, Shard(0), Shard(1)), (R, Shard(0), Shard(1), Shard(2), P)):
        incoming = [[dy] * dims] * outputs_of(form)
        found, _ = given.on(name, alike(given, [rows] * dims), incoming)
        given.compare(found, expected)


@EACH_MESH
@ONE_FORM_QUICK
def test_gradients_that_come_with_another_placement(world, name, form):
    """mean and rstd follow their rows, wherever the incoming gradient's rows are."""
    world.run(incoming_elsewhere, name, form)


def calls_alike(name):
    shape, rows = (7, 6, N), [Shard(1)] * dims_of(name)
    forms = [RMS, LAYER, ADD, GATED, FAMILY["add_layer_norm"], FAMILY["gated_layer_norm"]]
    cases = [case(form, *shape) for form in (*forms, *reversed(forms))]
    for given, drop in product(cases, ((), ("weight",), ("bias",), ("weight", "bias"))):
        some = given._replace(tensors={n: t for n, t in given.tensors.items() if n not in drop})
        for options in ({}, {"offset": 0.5}):
            these = some._replace(options=options)
            found, collectives = these.on(name, alike(these, rows), [rows] * outputs_of(these.form))
            assert not collectives
            these.compare(found, these.alone())


@EACH_MESH
def test_calls_that_differ_in_one_argument(world, name):
    """DTensor's cache of rules tells norms, options and absent tensors apart."""
    world.run(calls_alike, name)


def only_what_is_asked_for(name):
    class Masks(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            if function is torch.ops.tilenorm.norm_backward.default:
                masks.append(Backward.of(arguments).mask)
            return function(*arguments, **(named or {}))

    rows = [Shard(0)] * dims_of(name)
    for form in (FAMILY["add_layer_norm"], GATED):
        given = case(form, 4, 3, N)
        for size in range(1, len(given.tensors) + 1):
            for asked in combinations(given.tensors, size):
                masks = []
                with Masks():
                    incoming = [rows] * outputs_of(form)
                    found, _ = given.on(name, alike(given, rows), incoming, asked=asked)
                given.compare(found, given.alone(asked))
                names = ("input", "residual", "gate", "weight", "bias")
                # DTensor's call, and its call on the local tensors.
                assert {tuple(m) for m in masks} == {tuple(n in asked for n in names)}


def test_only_what_is_asked_for(world):
    world.run(only_what_is_asked_for, ONE)


def reduces(name, form):
    given = case(form, 4, 6, N)
    expected = given.alone()
    rows = [P] * dims_of(name)
    found, collectives = given.on(name, alike(given, rows), [rows] * outputs_of(form))
    assert collectives or mesh(name).size() == 1
    given.compare(found, expected)


@EACH_MESH
@EACH_FORM
def test_a_partial_row_is_reduced(world, name, form):
    world.run(reduces, name, form)


def reduce_scattered():
    given = case(ADD, 4, 6, N)
    placements = alike(given, [Shard(1)]) | {"input": [P]}
    tensors = {n: placed(t, ONE, placements[n]) for n, t in given.tensors.items()}
    (y, total), collectives = counted(call, ADD, tensors)
    assert y.placements == total.placements == (Shard(1),)
    assert collectives == ({"reduce_scatter_tensor": 1} if mesh(ONE).size() > 1 else {})
    for result, expected in zip((y, total), call(ADD, given.tensors), strict=True):
        assert torch.equal(result.full_tensor(), expected)


def test_a_partial_input_and_a_cut_residual_take_one_reduce_scatter(world):
    world.run(reduce_scattered)


def without_gradients(name, form):
    given, rows = case(form, 4, 6, N), [Shard(1)] * dims_of(name)
    expected = call(form, given.tensors)
    call(form, given.tensors)  # a call like this one is remembered now
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            tensors = {n: placed(t, name, alike(given, rows)[n]) for n, t in given.tensors.items()}
            for _ in range(2):
                found, collectives = counted(call, form, tensors)
                assert not collectives
                for result, other in zip(found, expected, strict=True):
                    assert type(result) is DTensor and result.placements == tuple(rows)
                    assert not result.requires_grad and torch.equal(result.full_tensor(), other)


@EACH_MESH
@EACH_FORM
def test_without_gradients(world, name, form):
    """What goes past PyTorch's dispatcher never sees a DTensor, not even of a remembered shape."""
    world.run(without_gradients, name, form)


def mixed():
    x, w = random(4, N, device=device()), random(N, device=device())
    tilenorm.rms_norm(x, (N,), w)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            cut, whole = placed(x, ONE, [Shard(0)]), placed(w, ONE, [R])
            for given in ((cut, (N,), w), (x, (N,), whole)):
                with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                    tilenorm.rms_norm(*given)


def test_plain_tensors_beside_dtensors_raise_pytorchs_error(world):
    world.run(mixed)


def second_derivatives(name, form):
    given = case(form, 4, 6, N, dtype=torch.float64)

    cuts = ([cut] * dims_of(name) for cut in (R, Shard(0), Shard(1)))
    compare_second_derivatives(given, name, [alike(given, cut) for cut in cuts])


@EACH_MESH
@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=lambda form: form.op)
def test_second_derivatives(world, name, form):
    world.run(second_derivatives, name, form)


def several_terms(name, form):
    """grad_output in several terms, and y written once more, of rows cut anywhere."""
    given = case(form, 4, 6, N, dtype=torch.bfloat16, parameter=torch.float32)
    x, weight = given.tensors["input"], given.tensors["weight"]
    bias, how = given.tensors["bias"], (*Options(N, form.op[:-5]), EPS)
    terms = [random(4, 6, N, dtype=x.dtype, device=device(), seed=20 + i) for i in range(4)]
    op, backward = torch.ops.tilenorm.norm, torch.ops.tilenorm.norm_backward

    def results(x, weight, bias, *terms):
        y, _, mean, rstd = op(x, None, None, weight, bias, *how, True)
        saved = (x, None, weight, bias, mean if "layer" in form.op else None, rstd)
        mask = [True, False, False, True, True]
        return backward(terms[0], None, *saved, *how, False, mask, None, *terms[1:], True), y

    expected, _ = results(x, weight, bias, *terms)
    cuts = [(p, p) for p in (R, Shard(0), Shard(1))] + [(Shard(0), Shard(1)), (R, Shard(0))]
    for rows, other in cuts:
        on = [placed(t, name, [rows] * dims_of(name)) for t in (x, *terms[:-1])]
        last = placed(terms[-1], name, [other] * dims_of(name))
        whole = [placed(t, name, [R] * dims_of(name)) for t in (weight, bias)]
        (found, y), collectives = counted(results, on[0], *whole, *on[1:], last)
        if rows == other:
            assert not collectives and found[0].placements == found[5].placements == y.placements
        assert torch.equal(found[0].full_tensor(), expected[0])
        assert torch.equal(found[5].full_tensor(), expected[5])
        torch.testing.assert_close(found[3].full_tensor(), expected[3])


@EACH_MESH
@pytest.mark.parametrize("form", slow_but_first([RMS, LAYER]), ids=lambda form: form.op)
def test_several_terms_and_the_output(world, name, form):
    world.run(several_terms, name, form)


def called_by_name(name):
    """The op itself, without its default argument, with it, and under autocast."""
    x, w = random(4, 6, N, device=device()), random(N, device=device())
    how = (*Options(N, "layer"), EPS, True)
    given = (placed(x, name, [Shard(1)] * dims_of(name)), placed(w, name, [R] * dims_of(name)))
    alone = torch.ops.tilenorm.norm(x, None, None, w, None, *how)
    for last in ((), (None,), ("reference",)):
        found = torch.ops.tilenorm.norm(given[0], None, None, given[1], None, *how, *last)
        assert [t.placements[0] for t in found] == [Shard(1), R, Shard(1), Shard(1)]
        assert all(map(torch.equal, [t.full_tensor() for t in found[:1]], alone[:1]))
        assert all(a.shape == b.shape for a, b in zip(found, alone, strict=True))
    with torch.autocast(device(), dtype=torch.bfloat16):
        expected = tilenorm.layer_norm(x.bfloat16(), (N,), w)
        found = tilenorm.layer_norm(given[0].bfloat16(), (N,), given[1])
        assert found.dtype == expected.dtype and torch.equal(found.full_tensor(), expected)


@EACH_MESH
def test_the_op_itself_and_autocast(world, name):
    world.run(called_by_name, name)
