"""Sums of products that gradients of norms read are added up inside the multiplications."""

import random as draw

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx.fold import fold_sums
from tilenorm.integrations.fx.gemms import MM, MM_SUM, accumulate_sums

from ..ops.helpers import EPS, random
from .graphs import ATEN, NORM_BACKWARD, calls
from .malformed import calls_of, mutations

BATCH, ROWS, N = 2, 5, 16
BF16 = torch.bfloat16


def gradient(dy, x, w, rstd):
    """dx and dw of an RMSNorm."""
    how = (N, "rms", 0.0, False, "late", "silu", 1.0, EPS, False, [True, False, False, True, False])
    dx, _, _, dw, *_ = torch.ops.tilenorm.norm_backward(
        dy, None, x, None, w, None, None, rstd, *how
    )
    return dx, dw


def rows(matrix):
    return matrix.view(-1, ROWS, N)


def shared(p, q, r, e, *s):
    """A product with another reader."""
    return *gradient(rows(p()) + rows(q()) + rows(middle := r()), *s), middle.sin()


def shared_view(p, q, r, e, *s):
    return *gradient(rows(p()) + (view := rows(q())) + rows(r()), *s), view.sin()


def shared_sum(p, q, r, e, *s):
    """A sum with another reader, which reads the same sum."""
    return *gradient(total := rows(p()) + rows(q()), *s), total.sin()


def shared_part(p, q, r, e, *s):
    """A partial sum with another reader is a term of its own."""
    part = rows(p()) + rows(q())
    return *gradient(part + rows(r()), *s), part.sin()


def twice(p, q, r, e, *s):
    return gradient((t := rows(p())) + t + rows(q()) + rows(r()), *s)


def written_between(p, q, r, e, *s):
    first = rows(p())
    e.mul_(2)
    return gradient(first + rows(q()), *s)


USED = "other nodes use the product mm"
# What is computed of products and a tensor e: how many products one multiplication adds up, how
# many multiplications and additions stay, and why products stay.
SUMS = {
    "two": (lambda p, q, r, e, *s: gradient(rows(p()) + rows(q()), *s), 2, 0, 0, []),
    "three": (
        lambda p, q, r, e, *s: gradient((rows(p()) + rows(q())) + rows(r()), *s),
        *(3, 0, 0, []),
    ),
    "matrices": (
        lambda p, q, r, e, x, *s: gradient(p() + (q() + r()), x.flatten(0, 1), *s),
        *(3, 0, 0, []),
    ),
    "reshaped": (
        lambda p, q, r, e, *s: gradient(
            p().reshape(BATCH, ROWS * N).view(BATCH, ROWS, N)
            + torch.ops.aten._unsafe_view(q(), [BATCH, ROWS, N]),
            *s,
        ),
        *(2, 0, 0, []),
    ),
    "with another first": (
        lambda p, q, r, e, *s: gradient((e + rows(p())) + rows(q()), *s),
        *(2, 0, 1, []),
    ),
    "with another between": (
        lambda p, q, r, e, *s: gradient((rows(p()) + e) + rows(q()), *s),
        *(2, 0, 1, []),
    ),
    "with another last": (
        lambda p, q, r, e, *s: gradient(rows(p()) + (rows(q()) + e.sin()), *s),
        *(2, 0, 1, []),
    ),
    "of two sums": (
        lambda p, q, r, e, *s: gradient((rows(p()) + e) + (rows(q()) + rows(r())), *s),
        *(3, 0, 1, []),
    ),
    "one": (lambda p, q, r, e, *s: gradient(rows(p()) + e, *s), 0, 1, 1, []),
    "none": (lambda p, q, r, e, *s: gradient(rows(p()).sin() + rows(q()).sin(), *s), 0, 2, 1, []),
    "transposed": (
        lambda p, q, r, e, *s: gradient(
            rows(p().t().contiguous().view(-1, N)) + rows(q().t().contiguous().view(-1, N)), *s
        ),
        *(0, 2, 1, []),
    ),
    "scaled": (
        lambda p, q, r, e, *s: gradient(torch.add(rows(p()), rows(q()), alpha=2), *s),
        *(0, 2, 1, []),
    ),
    "a product is used": (shared, 2, 1, 1, [USED + "_2"]),
    "a view is used": (shared_view, 2, 1, 1, [USED + "_1"]),
    "the sum is used": (shared_sum, 2, 0, 0, []),
    "a part is used": (shared_part, 0, 3, 2, []),
    "a product twice": (twice, 2, 1, 2, []),
    "written": (written_between, 0, 2, 1, ["a node in between may write to a tensor"]),
}


def traced(function, dtype=torch.float64, **how):
    """The graph of a function of SUMS with its products, what it computes, and its arguments."""
    inner = (8, 12, 4)
    left = [random(BATCH * ROWS, k, dtype=dtype, seed=i) for i, k in enumerate(inner)]
    right = [random(N, k, dtype=dtype, seed=5 + i) for i, k in enumerate(inner)]
    x = random(BATCH, ROWS, N, dtype=dtype, seed=7)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS).to(torch.promote_types(dtype, x.dtype))
    rstd = rstd if dtype == torch.float64 else rstd.float()
    e, w = random(BATCH, ROWS, N, dtype=dtype, seed=8), random(N, dtype=dtype, seed=9)

    def run(left, right, e, x, w, rstd):
        products = [lambda a=a, b=b: a @ b.t() for a, b in zip(left, right, strict=True)]
        return function(*products, e, x, w, rstd)

    tensors = left, right, e, x, w, rstd
    return make_fx(run, **how)(*tensors), run, tensors


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_products(name):
    function, count, products, additions, reasons = SUMS[name]
    graph_module, run, tensors = traced(function)
    expected = run(*torch.utils._pytree.tree_map(torch.clone, tensors))
    folds = accumulate_sums(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    kinds = [(f"{count} multiplications", "norm_backward")] if count else []
    assert list(folds.folded) == kinds
    assert list(folds.left) == [("norm_backward", reason) for reason in reasons]
    assert len(calls(graph_module, MM_SUM)) == len(kinds)
    assert len(calls(graph_module, MM)) == products
    assert len(calls(graph_module, ATEN.add.Tensor)) == additions
    got = graph_module(*torch.utils._pytree.tree_map(torch.clone, tensors))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not accumulate_sums(graph_module.graph).folded


def test_products_are_added_in_the_order_of_the_sum():
    """Also where they are computed in another order."""

    def function(p, q, r, e, *s):
        last, first, middle = rows(p()), rows(q()), rows(r())
        return gradient((first + middle) + last, *s)

    graph_module, *_ = traced(function)
    accumulate_sums(graph_module.graph)
    (call,) = calls(graph_module, MM_SUM)
    a0, a1, a2, b0, b1, b2, *_ = graph_module.graph.find_nodes(op="placeholder")
    left, right = call.args
    assert list(left) == [a1, a2, a0]
    assert [node.args[0] for node in right] == [b1, b2, b0]


def test_the_gradient_then_takes_over_what_is_left():
    graph_module, run, tensors = traced(SUMS["of two sums"][0], BF16)
    folds = accumulate_sums(graph_module.graph) + fold_sums(graph_module.graph)
    graph_module.recompile()
    assert [kind for kind, _ in folds.folded] == ["3 multiplications", "2 terms"]
    assert folds.lines[0] == "  norm_backward: 3 multiplications folded"
    assert not calls(graph_module, ATEN.add.Tensor)
    for got, expected in zip(graph_module(*tensors), run(*tensors), strict=True):
        assert (got - expected).norm() <= 2**-6 * expected.norm()


def test_a_symbolic_number_of_rows_gets_no_guard():
    graph_module, *_ = traced(SUMS["three"][0], tracing_mode="symbolic")
    guards = graph_module.shape_env.guards
    before = len(guards)
    assert accumulate_sums(graph_module.graph).folded
    (call,) = calls(graph_module, MM_SUM)
    assert len(guards) == before and isinstance(call.meta["val"].shape[0], torch.SymInt)


def test_products_of_a_recomputed_forward_pass_stay():
    graph_module, *_ = traced(SUMS["two"][0])
    calls(graph_module, MM)[0].meta["recompute"] = True
    ((_, reason),) = accumulate_sums(graph_module.graph).left
    assert reason == "mm is part of a forward pass that is computed again"
    graph_module, *_ = traced(SUMS["two"][0])
    del calls(graph_module, MM)[1].args[0].meta["val"]
    ((_, reason),) = accumulate_sums(graph_module.graph).left
    assert reason == "mm_1 or one of its factors has no shape in its metadata"


@pytest.mark.parametrize("examples", [8, pytest.param(600, marks=pytest.mark.slow)])
def test_malformed_calls_are_left(examples):
    """Drawn changes of drawn calls, as in test_fx_malformed, never raise."""
    choose = draw.Random(examples)
    for _ in range(examples):
        graph_module, *_ = traced(SUMS["of two sums"][0], BF16)
        node = choose.choice(calls_of(graph_module))
        mutation = choose.choice(list(mutations(node)))
        first = next(iter(graph_module.graph.nodes))
        mutation.apply(node, dict.fromkeys(("odd", "number", "bare", "symbol", "many"), first))
        folds = accumulate_sums(graph_module.graph)
        graph_module.graph.lint()
        spoiled = mutation.name.startswith("bogus=")
        if spoiled and node.target in (MM, NORM_BACKWARD):
            assert folds.left, f"{mutation.name}: {folds}"
