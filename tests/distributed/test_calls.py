"""The functions on DTensors: each row of the table of sharding.py, cut rows, and the rest."""

from itertools import combinations_with_replacement, cycle
from math import prod

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import tilenorm
from tests.support.calls import (
    ADD,
    EPS,
    FAMILY,
    FEW,
    GATED,
    JOINED,
    LAYER,
    MASKED,
    RMS,
    Form,
    call,
    incoming_of,
    leaves_of,
    op_arguments,
    random,
    slow,
    step,
)
from tilenorm.spec import Options

from .placing import PARAMETERS, P, R, alike, case, counted, placed
from .world import NAMES, device, mesh, on_every_rank, slow_but_first

# Whole vectors: the CPU computes silu and sigmoid of what fills none by other code, to other bits.
N = 32
LAST = NAMES[-1]
MESH_OF_ALL = NAMES[-2]  # in one dimension, where there are four ranks
# (mesh, form, heads that have weights of their own, dimensions of a row)
LAYOUTS = [
    *(pytest.param(LAST, (FAMILY | JOINED)[n], 0, 1, id=n) for n in FEW),
    (LAST, LAYER, 5, 1),
    *slow((MESH_OF_ALL, ADD, 5, 1), (LAST, GATED, 4, 1), (LAST, GATED, 0, 2)),
    *slow(*((MESH_OF_ALL, f, 0, 1) for n, f in (FAMILY | JOINED).items() if n not in FEW[1:])),
]
ONE = NAMES[0]
ADDS = ("add_rms_norm", "add_layer_norm")
# Of three dimensions the last is a row, which these placements of rows and of parameters cut.
CUTS = {
    1: [([Shard(2)], [Shard(0)])],
    2: [
        ([Shard(0), Shard(2)], [R, Shard(0)]),
        ([Shard(2), Shard(1)], [Shard(0), R]),
        ([Shard(2), R], [Shard(0), R]),
        ([Shard(2), Shard(2)], [Shard(0), Shard(0)]),
    ],
}


def each(*forms):
    return pytest.mark.parametrize("form", forms, ids=lambda form: f"{form.op} {form.options}")


def all_reduces(number: int, name: str) -> dict:
    """So many all-reduces, where there is more than one rank."""
    return {"all_reduce": number} if number and mesh(name).size() > 1 else {}


@pytest.mark.parametrize("name, form, heads, dims", LAYOUTS)
@on_every_rank
def test_rows_alike(name, form, heads, dims):
    """No collective, and the same bits, where rows are cut in a leading dimension, or by heads, of
    which one of four ranks has none. One all-reduce each way for RMSNorm, two and one for
    LayerNorm, for each mesh dimension that cuts rows, of whose 29 columns the ranks have different
    numbers. The outputs have the same bits with and without gradients.
    """
    row, first = (heads,) if heads else (6,) if dims == 2 else (), 3 if heads else 2
    sizes = [(*row, N), (*row, 29)]
    each = [case(form, 4, 5, *size, dims=dims, parameter_shape=size) for size in sizes]
    alone = [given.alone() for given in each]
    every = [R, *map(Shard, range(each[0].tensors["input"].dim()))]
    without = cycle((torch.no_grad, torch.inference_mode))
    for rows in combinations_with_replacement(every, mesh(name).ndim):
        cut = [p.is_shard() and p.dim >= first for p in rows]
        cuts = sum(is_cut and mesh(name).size(i) > 1 for i, is_cut in enumerate(cut))
        given, expected = each[any(cut)], alone[any(cut)]
        parameters = [Shard(p.dim - 2) if p.is_shard() and p.dim >= 2 else R for p in rows]
        placements = alike(given, rows, parameters)
        found, collectives = given.on(name, placements, [rows] * given.outputs)
        forward = cuts * (2 if "layer" in form.op else 1)
        assert collectives == all_reduces(forward + cuts, name), rows
        # A rank with one head has a norm without heads. On the CPU other operators compute it.
        parts = prod(mesh(name).size(i) for i, p in enumerate(rows) if p == Shard(2))
        one = heads and heads // parts <= 1 < parts
        given.compare(found, expected, exact=not (any(cut) or one))
        both = zip(parameters, rows, strict=True)
        of_sums = tuple(p if p.is_shard() or q == R else P for p, q in both)
        for n, result in found.items():
            assert result.placements == (of_sums if n in PARAMETERS else rows), n
        with next(without)():
            # What goes past PyTorch's dispatcher never sees a DTensor, not even of this shape.
            call(form, given.tensors, dims=dims)
            on = given.placed(name, placements)
            outputs, collectives = counted(call, form, on, dims=dims)
        assert collectives == all_reduces(forward, name)
        for n, result in zip(("output", "sum"), outputs, strict=False):
            assert type(result) is DTensor and not result.requires_grad
            assert torch.equal(result.full_tensor(), found[n].full_tensor())


class Sizes(TorchDispatchMode):
    """The name of each collective, and how many bytes a rank puts into it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = function.__name__.split(".")[0]
        if function.namespace == "_c10d_functional" and name[0] != "_" and "wait" not in name:
            self.seen.append((name, arguments[0].numel() * arguments[0].itemsize))
        return function(*arguments, **(named or {}))


@each(RMS, LAYER, ADD, GATED)
@on_every_rank
def test_bytes_of_the_all_reduces(form):
    given = case(form, 4, 3, 29, dtype=torch.bfloat16)
    tensors = given.placed(ONE, alike(given, [Shard(2)], [Shard(0)]))
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    with Sizes() as forward:
        outputs = call(form, leaves)
    dys = [placed(dy, ONE, [Shard(2)]) for dy in incoming_of(given.tensors)]
    with Sizes() as backward:
        torch.autograd.grad(outputs, [*leaves.values()], dys)
    if mesh(ONE).size() > 1:
        layer = "layer" in form.op
        wanted = [("all_reduce", 4 * 12), ("all_reduce", 8 * 12)][: 1 + layer]
        assert forward.seen == wanted, forward.seen
        assert backward.seen == [("all_reduce", (8 if layer else 4) * 12)], backward.seen


@each(RMS, FAMILY["add_layer_norm"], GATED, FAMILY["gated_layer_norm, gate first"])
@on_every_rank
def test_only_what_is_asked_for_of_cut_rows(form):
    """The gradient of a weight, or of a gate after the norm, needs no sum over a row."""
    given = case(form, 4, 3, N)
    placements, rows = alike(given, [Shard(2)], [Shard(0)]), [Shard(2)]
    for asked in ([n] for n in given.tensors):
        found, collectives = given.on(ONE, placements, [rows] * given.outputs, asked=asked)
        given.compare(found, given.alone(asked), exact=False)
        gate_alone = asked == ["gate"] and form.options.get("norm_before_gate", True)
        through = asked[0] not in PARAMETERS and not gate_alone
        wanted = (2 if "layer" in form.op else 1) + through
        assert collectives == all_reduces(wanted, ONE), asked
    if "residual" in given.tensors:  # the sum alone has a gradient
        replicated = placements | {n: [R] for n in PARAMETERS if n in given.tensors}
        asked = ["input", "residual", "weight"]
        found, _ = given.on(ONE, replicated, [None, rows], asked=asked)
        assert not found["weight"].full_tensor().any()
        dy = [None, incoming_of(given.tensors)[1]]
        assert torch.equal(found["input"].full_tensor(), given.alone(None, dy)["input"])


@on_every_rank
def test_a_partial_input_and_a_cut_residual_take_one_reduce_scatter():
    given = case(ADD, 4, 6, N)
    tensors = given.placed(ONE, alike(given, [Shard(1)]) | {"input": [P]})
    (y, total), collectives = counted(call, ADD, tensors)
    assert y.placements == total.placements == (Shard(1),)
    assert collectives == ({"reduce_scatter_tensor": 1} if mesh(ONE).size() > 1 else {})
    for result, expected in zip((y, total), call(ADD, given.tensors), strict=True):
        assert torch.equal(result.full_tensor(), expected)


@pytest.mark.parametrize("form", slow(GATED, LAYER, *JOINED.values()), ids=str)
@on_every_rank
def test_second_derivatives(form):
    """Of rows that are whole, or of whose 29 columns the ranks have different numbers."""
    given, name = case(form, 4, 6, 29, dtype=torch.float64), NAMES[-1]

    def twice(tensors):
        leaves = leaves_of(tensors)
        loss = sum(y.square().sum() for y in call(given.form, leaves))
        first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*leaves.values()])

    expected, dims = twice(given.tensors), mesh(name).ndim
    for cut in (([Shard(1)] * dims, [R]), *CUTS[dims]):
        found = twice(given.placed(name, alike(given, *cut)))
        for result, other in zip(found, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), other)


@pytest.mark.parametrize("form", slow_but_first([LAYER, RMS]), ids=lambda form: form.op)
@on_every_rank
def test_several_terms_and_the_output(form):
    """grad_output in several terms, and y written once more, of rows cut anywhere."""
    given = case(form, 4, 6, N, dtype=torch.bfloat16, parameter=torch.float32)
    x, weight = given.tensors["input"], given.tensors["weight"]
    bias, how = given.tensors["bias"], (*Options(N, form.op[:-5]), EPS)
    row = op_arguments(form.op, {}, N)[3:]
    terms = [random(4, 6, N, dtype=x.dtype, device=device(), seed=20 + i) for i in range(4)]
    op, backward = getattr(torch.ops.tilenorm, form.op), torch.ops.tilenorm.norm_backward

    def results(x, weight, bias, *terms):
        y, *mean, rstd = op(x, weight, bias, *row)
        saved = (x, None, weight, bias, *(mean or [None]), rstd)
        mask = [True, False, False, True, True]
        return backward(terms[0], None, *saved, *how, False, mask, None, *terms[1:], True), y

    expected, _ = results(x, weight, bias, *terms)
    cuts = [(p, p) for p in (R, Shard(0), Shard(1))] + [(Shard(0), Shard(1)), (R, Shard(0))]
    name, dims = NAMES[-1], mesh(NAMES[-1]).ndim
    for rows, other in cuts:
        on = [placed(t, name, [rows] * dims) for t in (x, *terms[:-1])]
        last = placed(terms[-1], name, [other] * dims)
        whole = [placed(t, name, [R] * dims) for t in (weight, bias)]
        (found, y), collectives = counted(results, on[0], *whole, *on[1:], last)
        if rows == other:
            assert not collectives and found[0].placements == found[5].placements == y.placements
        assert torch.equal(found[0].full_tensor(), expected[0])
        assert torch.equal(found[5].full_tensor(), expected[5])
        torch.testing.assert_close(found[3].full_tensor(), expected[3])


@pytest.mark.parametrize("cut", [Shard(1), Shard(2)], ids=str)
@on_every_rank
def test_autocast(cut):
    x, w = random(4, 6, N, device=device()).bfloat16(), random(N, device=device())
    with torch.autocast(device(), dtype=torch.bfloat16):
        expected = tilenorm.layer_norm(x, (N,), w)
        found = tilenorm.layer_norm(placed(x, ONE, [cut]), (N,), placed(w, ONE, [R]))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("rows, kind", [(R, "all_reduce"), (Shard(1), "reduce_scatter_tensor")])
@each(*JOINED.values(), *(Form(op, MASKED, branch=("dropout_mask",)) for op in ADDS))
@on_every_rank
def test_a_partial_gradient_of_the_sum_alone(form, rows, kind):
    """Ranks add up their parts before these are masked and rounded: the bits of one process."""
    given = case(form, 4, 6, N, dtype=torch.bfloat16, other=torch.float32)
    part = random(4, 6, N, device=device(), seed=30 + mesh(ONE).get_local_rank())
    dsum = DTensor.from_local(part, mesh(ONE), [P], run_check=False)
    tensors, asked = given.placed(ONE, alike(given, [rows])), ["input", "residual"]
    found, collectives = counted(step, form, tensors, [None, dsum], asked)
    expected = given.alone(asked, [None, dsum.full_tensor()])
    assert collectives == ({kind: 1} if mesh(ONE).size() > 1 else {})
    for name in asked:
        assert found[name].placements == (rows,)
        assert torch.equal(found[name].full_tensor(), expected[name]), name


@on_every_rank
def test_what_is_refused():
    x, w = random(4, N, device=device()), random(N, device=device())
    rows, cut, whole = (placed(x, ONE, [Shard(0)]), placed(x, ONE, [Shard(1)]), placed(w, ONE, [R]))
    narrow = placed(x.bfloat16(), ONE, [Shard(1)])
    heads = placed(random(4, 6, 4, 16, device=device()), ONE, [Shard(2)])
    table = placed(random(6, 16, device=device()), ONE, [R])
    tilenorm.rms_norm(x, (N,), w)
    plain = r"got mixed torch\.Tensor and DTensor"
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for text, function, *given in (
            (plain, tilenorm.rms_norm, rows, (N,), w),
            (plain, tilenorm.rms_norm, x, (N,), whole),
            ("'weight' takes a DTensor", tilenorm.rms_norm, cut, (N,), w),
            ("'input' takes no DTensor that is", tilenorm.modulated_rms_norm, cut, (N,), whole),
            ("'input' takes no DTensor that is", tilenorm.rms_norm_rope, heads, (4, 16))
            + (table, table),
            ("'residual' takes a DTensor", tilenorm.add_rms_norm, cut, x, (N,)),
            (r"'residual\[0\]' takes a DTensor", tilenorm.add_rms_norm, cut, (x, cut), (N,)),
            (r"'residual\[0\]' takes the input's dtype .* are cut",)
            + (tilenorm.add_rms_norm, narrow, (cut, cut), (N,)),
        ):
            with context(), pytest.raises(RuntimeError, match=text):
                function(*given)
