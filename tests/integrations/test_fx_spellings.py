"""The FX pass on norms as people spell them: one op, with the numbers of the formula."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EPS, GATED, assert_step, expected_of, random, tensors_of
from .graphs import TRACERS, argument, by_dynamo, by_make_fx, calls, targets
from .spellings import SPELLINGS, N, Spelling, every_spelling, mean, module_of, squares

BF16 = torch.bfloat16


def assert_numbers(spelling: Spelling, leaves: dict, y: torch.Tensor) -> None:
    """Hold an output, and the gradients of its inputs, to the formula in float64."""
    dy = random(3, N, dtype=y.dtype, seed=9)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    got = {"output": y, **dict(zip(leaves, grads, strict=True))}
    assert_step(got, expected_of(spelling.form, leaves, [dy], eps=EPS))


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_op_with_the_numbers_of_the_formula(name, gradients_made):
    form, function = SPELLINGS[name]
    tensors = tensors_of(form, 3, N, dtype=BF16)

    def in_float32(x, *others):
        return function(*(t.float() for t in (x, *others))).to(x.dtype)

    replaced = by_make_fx(module_of(in_float32), *tensors.values())
    (call,) = calls(replaced.graph_module)
    assert [kind for kind, _ in replaced.report.replaced] == [form.op]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2  # the op, and its first result
    assert argument(call, "rounding") == "late"
    assert argument(call, "activation") == form.options.get("activation", "silu")
    assert argument(call, "eps") == pytest.approx(EPS, rel=1e-7)  # PyTorch's own is a float32
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    assert_numbers(SPELLINGS[name], leaves, replaced.run(*leaves.values()))
    assert gradients_made == [set(tensors)]


def test_every_spelling_as_torch_compile_captures_it(dynamo):
    tensors = {name: t.requires_grad_() for name, t in tensors_of(GATED, 3, N).items()}
    replaced = by_dynamo(every_spelling, *tensors.values())
    assert [kind for kind, _ in replaced.report.replaced] == [s.form.op for s in SPELLINGS.values()]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2 * len(SPELLINGS)
    for spelling, y in zip(SPELLINGS.values(), replaced.run(*tensors.values()), strict=True):
        assert_numbers(spelling, {name: tensors[name] for name in spelling.form.names}, y)


def sample_variance(x, w):
    return (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS) * w


def mean_is_used(x, w):
    center = mean(x)
    return (x - center) / torch.sqrt(squares(x - center) + EPS) * w, center


OTHER_FORMULAS = {
    "eps beside the root": (lambda x, w: x / (squares(x).sqrt() + EPS) * w, "added to the root"),
    "variance of a sample": (sample_variance, "its result is 0.989529 times a norm"),
    "unit length": (
        lambda x, w: x * torch.rsqrt(x.square().sum(-1, True) + EPS),
        "0.144338 times a norm",
    ),
    "a tensor": (lambda x, w: x * torch.rsqrt(squares(x) + w[0].abs()), "its eps is a tensor"),
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
    "another power": lambda x, y: x / (squares(x) + EPS),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_what_is_no_norm_stays_and_is_not_reported(name):
    report = replace_norms(make_fx(NOT_NORMS[name])(random(N, N), random(N, N, seed=1)))
    assert report.replaced == report.left == ()


def centred_rows(x, r, w):
    center = mean(x)
    rows = x - center
    return rows * torch.rsqrt(squares(rows) + EPS) * w, center


def of_a_sum(x, r, w):
    return SPELLINGS["layer, var_mean"].function(x + r, w, w)


def output_used_twice(x, r, w):
    y = F.rms_norm(x, (N,), eps=EPS)
    return y * w, y.sin()


@pytest.mark.parametrize(
    "function, kind",
    [(centred_rows, "rms_norm"), (of_a_sum, "add_layer_norm"), (output_used_twice, "rms_norm")],
)
def test_what_is_around_a_norm(function, kind, dynamo):
    """The centred rows, the sum before the norm, or the output alone belong to the op."""
    tensors = random(3, N), random(3, N, seed=1), random(N, seed=2)
    replaced = by_dynamo(function, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == [kind]
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))
