"""Gradients in a graph take over the additions around them, and no others."""

import copy
from random import Random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.calls import EPS, random
from tilenorm.integrations.fx import replace_norms
from tilenorm.integrations.fx.gradients import fold_sums

from .graphs import ATEN, NORM_BACKWARD, calls, malform

BF16 = torch.bfloat16
N, ROWS = 16, 5


HOW = (N, "rms", 0.0, False, "late", "silu", 1.0, EPS)


def gradient(dy, x, w, rstd, dsum=None, added=False):
    """dx and dw of an RMSNorm. added: whether there was a residual."""
    given, mask = (dy, dsum, x, None, w, None, None, rstd), [True, False, False, True, False]
    dx, _, _, dw, *_ = torch.ops.tilenorm.norm_backward(*given, *HOW, added, mask)
    return dx, dw


def two_gradients(a, b, *saved):
    (dx, dw), (other, _) = gradient(a, *saved), gradient(b, *saved)
    return other + dx, dw


def used_by_two(a, b, *saved):
    dx, dw = gradient(a, *saved)
    return dx + b, dx.sin(), dw


def written_between(a, b, *saved):
    total = a + b
    a.mul_(2)
    return gradient(total, *saved)


def later(a, b, *saved):
    dx, dw = gradient(a, *saved)
    return dx + b.sin(), dw


# What is computed of a, b and so on, what is folded, how many additions stay, and why if it is told
SUMS = {
    "two": (lambda a, b, *s: gradient(a + b, *s), ["2 terms"], 0),
    "three": (lambda a, b, c, *s: gradient((a + b) + c, *s), ["3 terms"], 0),
    "to the right": (lambda a, b, c, *s: gradient(a + (b + c), *s), ["3 terms"], 0),
    "five": (lambda a, b, c, d, e, *s: gradient(a + b + c + d + e, *s), ["4 terms"], 1),
    "twice": (lambda a, *s: gradient(a + a, *s), ["2 terms"], 0),
    "twice, of a sum": (lambda a, b, *s: gradient((a + b) + (a + b), *s), ["3 terms"], 1),
    "scaled": (lambda a, b, *s: gradient(torch.add(a, b, alpha=2), *s), [], 1),
    "of a row": (lambda a, b, *s: gradient(a + b[0], *s), [], 1),
    "transposed": (lambda a, b, *s: gradient(a + b.t().contiguous().t(), *s), [], 1),
    "both": (lambda a, b, c, *s: c + gradient(a + b, *s)[0], ["2 terms", "sum"], 0),
    "of two gradients": (two_gradients, ["sum"], 0),
    "dx is used twice": (used_by_two, [], 1),
    "dx twice": (lambda a, *s: (dx := gradient(a, *s)[0]) + dx, [], 1),
    "the sum is used": (
        lambda a, b, *s: ((t := a + b), *gradient(t, *s)),
        *([], 1, "other nodes use the sum add"),
    ),
    "the sum is grad_sum too": (
        lambda a, b, *s: gradient(t := a + b, *s, t),
        *([], 1, "other nodes use the sum add"),
    ),
    "a second sum": (
        lambda a, b, c, *s: gradient(a, *s, c)[0] + b,
        *([], 1, "it has the gradient of its sum already, and add adds another"),
    ),
    # The sum that was normalised has its own gradient, if it is a residual.
    "of another dtype": (
        lambda a, b, x, *s: gradient(a, x.float(), *s, added=True)[0] + b,
        *([], 1, "add is the gradient of the input, but not of the residual"),
    ),
    "a later tensor": (later, *([], 1, "sin, which add adds to its result, is computed after it")),
    "written": (written_between, [], 1, "a node in between may write to a tensor"),
}


def tensors_for(function):
    """a, b and so on, and x, w and rstd, which every gradient reads."""
    count = sum(
        name in "abcde" for name in function.__code__.co_varnames[: function.__code__.co_argcount]
    )
    terms = [random(ROWS, N, dtype=BF16, seed=i) for i in range(count)]
    x = random(ROWS, N, dtype=BF16, seed=7)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    return *terms, x, random(N, dtype=BF16, seed=8), rstd


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    function, kinds, stay, *reasons = SUMS[name]
    tensors = tensors_for(function)
    graph_module = make_fx(function)(*(t.clone() for t in tensors))
    assert not replace_norms(graph_module).folds.folded  # unless it is asked for
    report = replace_norms(graph_module, fold=True)
    graph_module.graph.lint()
    assert [kind for kind, _ in report.folds.folded] == kinds
    assert report.folds.left == tuple(("norm_backward", reason) for reason in reasons)
    assert all(f"norm_backward does not fold: {reason}" in str(report) for reason in reasons)
    assert len(calls(graph_module, ATEN.add.Tensor)) == stay
    got = graph_module(*(t.clone() for t in tensors))
    tolerance = 2**-7 if "sum" in kinds else 0  # dx + other is rounded once
    torch.testing.assert_close(got, function(*tensors), rtol=tolerance, atol=tolerance)
    assert not replace_norms(graph_module, fold=True).folds.folded


def both_passes(x, w, up, tangents):
    """A norm, a product, and their gradients: a graph in the form of AOTAutograd's joint graphs."""
    h, rstd = torch.ops.tilenorm.rms_norm(x, w, None, N, 0.0, "late", EPS, True)
    y = h.view(-1, N) @ up
    dh = (tangents @ up.t()).view(x.shape) + (tangents @ up.t()).view(x.shape).sin()
    dup = h.view(-1, N).t() @ tangents
    dx, dw = gradient(dh, x, w, rstd)
    return y, dx + x, dw, dup.sin()


@pytest.mark.parametrize("examples", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_malformed_calls_are_left(examples):
    """A malformed gradient has a reason."""
    shapes = (2, ROWS, N), (N,), (N, N), (2 * ROWS, N)
    tensors = [random(*shape, dtype=BF16, seed=i) for i, shape in enumerate(shapes)]
    choose, whole = Random(examples), make_fx(both_passes)(*tensors)
    kinds = [kind for kind, _ in fold_sums(copy.deepcopy(whole).graph, output=True).folded]
    assert kinds == ["2 terms", "sum", "output"]
    for _ in range(examples):
        graph_module = copy.deepcopy(whole)
        node = malform(graph_module.graph, choose)
        folds = fold_sums(graph_module.graph, output=True)
        graph_module.graph.lint()
        spoiled = "bogus" in node.kwargs and node.target is NORM_BACKWARD
        assert folds.left or not spoiled, f"{node.format_node()}: {folds}"
