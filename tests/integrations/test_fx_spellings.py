"""The FX pass on norms as people spell them: one op, with the numbers of the formula."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EPS, GATED, assert_step, expected_of, random, tensors_of
from .graphs import TRACERS, argument, by_dynamo, by_make_fx, calls, targets
from .spellings import SPELLINGS, N, Spelling, mean, module_of, squares

BF16, F16 = torch.bfloat16, torch.float16


def in_float32(function: Callable) -> Callable:
    """The function in float32, rounded at the end."""

    def run(x, *others):
        return function(*(t.float() for t in (x, *others))).to(x.dtype)

    return run


def assert_numbers(spelling: Spelling, leaves: dict, y: torch.Tensor) -> None:
    """Hold an output, and the gradients of its inputs, to the formula in float64."""
    dy = random(3, N, dtype=y.dtype, seed=9)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    got = {"output": y, **dict(zip(leaves, grads, strict=True))}
    assert_step(got, expected_of(spelling.form, leaves, [dy], eps=spelling.eps))


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_op_with_the_numbers_of_the_formula(name, gradients_made):
    form, function, eps = SPELLINGS[name]
    tensors = tensors_of(form, 3, N, dtype=BF16)
    replaced = by_make_fx(module_of(in_float32(function)), *tensors.values())
    (call,) = calls(replaced.graph_module)
    assert [kind for kind, _ in replaced.report.replaced] == [form.op]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2  # the op, and its first result
    assert argument(call, "rounding") == "late"
    assert argument(call, "activation") == form.options.get("activation", "silu")
    assert argument(call, "eps") == pytest.approx(eps, rel=1e-12)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    assert_numbers(SPELLINGS[name], leaves, replaced.run(*leaves.values()))
    assert gradients_made == [set(tensors)]


def test_every_spelling_as_torch_compile_captures_it(dynamo):
    """One graph with all of them takes a tenth of the time of a graph for each."""

    def function(input, gate, weight, bias):
        return [
            function(input, gate, weight, bias) if form.other else function(input, weight, bias)
            for form, function, _ in SPELLINGS.values()
        ]

    tensors = {name: t.requires_grad_() for name, t in tensors_of(GATED, 3, N).items()}
    replaced = by_dynamo(function, *tensors.values())
    assert [kind for kind, _ in replaced.report.replaced] == [s.form.op for s in SPELLINGS.values()]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2 * len(SPELLINGS)
    for spelling, y in zip(SPELLINGS.values(), replaced.run(*tensors.values()), strict=True):
        assert_numbers(spelling, {name: tensors[name] for name in spelling.form.names}, y)


def outer_eps(x, w):
    return x / (x.norm(dim=-1, keepdim=True) * N**-0.5 + EPS) * w


def sample_variance(x, w):
    return (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS) * w


def mean_is_used(x, w):
    center = mean(x)
    return (x - center) / torch.sqrt(squares(x - center) + EPS) * w, center


OTHER_FORMULAS = {
    "eps beside the root": (outer_eps, "eps is added to the root"),
    "eps beside std": (
        lambda x, w: (x - mean(x)) / (x.std(-1, unbiased=False, keepdim=True) + EPS) * w,
        "eps is added to the root",
    ),
    "variance of a sample": (sample_variance, "its result is 0.989529 times a norm"),
    "unit length": (lambda x, w: x / x.norm(dim=-1, keepdim=True) * w, "0.144338 times a norm"),
    "F.normalize": (lambda x, w: F.normalize(x, dim=-1) * N**0.5 * w, "eps is a lower bound"),
    "clamped": (
        lambda x, w: x / (x.norm(dim=-1, keepdim=True) * N**-0.5).clamp(min=EPS),
        "eps is a lower bound",
    ),
    "a tensor": (lambda x, w: x * torch.rsqrt(squares(x) + w[0].abs()), "its eps is a tensor"),
    "16 bits": (lambda x, w: F.normalize(x.bfloat16(), dim=-1, eps=0) * N**0.5, "not float32"),
    "its mean is used": (mean_is_used, "use its intermediate result"),
}


@pytest.mark.parametrize("tracer", ["dynamo", "make_fx"])
@pytest.mark.parametrize("name", OTHER_FORMULAS)
def test_other_formulas_are_left_with_the_reason(name, tracer, dynamo):
    function, expected = OTHER_FORMULAS[name]
    tensors = random(3, N), random(N, seed=1)
    replaced = TRACERS[tracer](module_of(function), *tensors)
    assert not replaced.report.replaced
    ((_, reason),) = replaced.report.left
    assert expected in reason
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors), rtol=0, atol=0)


NOT_NORMS = {
    "loss": lambda x, y: ((x - y) ** 2).mean(-1, keepdim=True),
    "distance": lambda x, y: (x - y).norm(dim=-1),
    "scaled by another's": lambda x, y: x * torch.rsqrt(squares(y) + EPS),
    "of columns": lambda x, y: x * torch.rsqrt(x.square().mean(0, keepdim=True) + EPS),
    "standard deviation": lambda x, y: x * x.std(-1, keepdim=True) + y,
    "not centred": lambda x, y: x / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS),
    "centred by another's": lambda x, y: (x - mean(y)) * (x.var(-1, False, True) + EPS).rsqrt(),
    "columns by rows": lambda x, y: x * torch.rsqrt(x.square().mean(-1) + EPS),
    "norm of a matrix": lambda x, y: x / torch.linalg.norm(x, dim=(-2, -1)) + x.norm("nuc"),
    "another power": lambda x, y: x / (squares(x) + EPS),
    "another norm": lambda x, y: x / x.norm(p=1, dim=-1, keepdim=True),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_what_is_no_norm_stays_and_is_not_reported(name):
    function = NOT_NORMS[name]
    tensors = random(N, N), random(N, N, seed=1)
    graph_module = make_fx(function)(*tensors)
    report = replace_norms(graph_module)
    assert report.replaced == report.left == ()


@pytest.mark.parametrize("bound, expressed", [(1e-12, True), (1e-9, False)])
def test_the_lower_bound_of_float16_rows_is_an_eps(bound, expressed, dynamo):
    """No row of float16 but one of zeros has a norm near 1e-12, which is F.normalize's eps."""

    def function(x, w):
        return (F.normalize(x.float(), dim=-1, eps=bound) * N**0.5 * w).half()

    x, w = random(3, N, dtype=F16), random(N, dtype=F16, seed=1)
    x[:2] = 0
    x[1, 5] = 2**-24  # the smallest number
    for tracer in ("dynamo", "make_fx"):
        replaced = TRACERS[tracer](module_of(function), x, w)
        assert len(replaced.report.replaced) == len(calls(replaced.graph_module)) == expressed
        y = replaced.run(x, w)
        torch.testing.assert_close(y, function(x, w), rtol=2**-10, atol=0)
        assert not y[0].any()


def test_the_sum_in_front_of_a_spelled_out_norm_is_part_of_the_op(dynamo):
    def function(x, r, w, b):
        return SPELLINGS["layer, var_mean"].function(x + r, w, b)

    tensors = random(3, N), random(3, N, seed=1), random(N, seed=2), random(N, seed=3)
    replaced = by_dynamo(function, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == ["add_layer_norm"]
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))


def test_centred_rows_of_which_the_mean_is_used_are_an_rms_norm(dynamo):
    def function(x, w):
        center = mean(x)
        rows = x - center
        return rows * torch.rsqrt(squares(rows) + EPS) * w, center

    tensors = random(3, N), random(N, seed=1)
    replaced = by_dynamo(function, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == ["rms_norm"]
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))
