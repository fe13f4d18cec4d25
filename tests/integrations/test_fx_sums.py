"""The FX pass fuses a sum with its norm, unless a node in between could see the difference."""

import pytest
import torch
import torch.nn.functional as F

from ..ops.helpers import EPS, random
from .graphs import by_dynamo

N = 40


SUMS = {
    "of equals": (lambda x, r: x + r, True),
    "by a function": (lambda x, r: torch.add(r, other=x), True),
    "with itself": (lambda x, r: x + x, True),
    "scaled": (lambda x, r: torch.add(x, r, alpha=2), False),
    "of a row": (lambda x, r: x + r[0], False),
    "of other dtypes": (lambda x, r: x + r.bfloat16(), False),
    "transposed": (lambda x, r: (x.t().contiguous() + r.t().contiguous()).t(), False),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_sum_is_fused_with_its_norm(name, norm, dynamo):
    add, fused = SUMS[name]

    def function(x, residual, weight):
        total = add(x, residual)
        return getattr(F, norm)(total, (N,), weight, eps=EPS), total * 2

    tensors = random(3, N), random(3, N, seed=1), random(N, seed=2)
    replaced = by_dynamo(function, *tensors)
    ((kind, _),) = replaced.report.replaced
    assert kind == (f"add_{norm}" if fused else norm)
    leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
    results = [run(*inputs) for run, inputs in zip((replaced.run, function), leaves, strict=True)]
    for outputs in results:
        sum(y.sin().sum() for y in outputs).backward()
    torch.testing.assert_close(results[0], results[1])
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def two_norms(total, weight):
    return F.rms_norm(total, (N,), weight), F.layer_norm(total, (N,), weight)


def weight_after_the_sum(total, weight):
    """The fused op would stand at the sum's place, before its weight is computed."""
    used = total.sin()
    return F.rms_norm(total, (N,), weight * 2), used


def written_after_the_sum(total, weight):
    total += 1
    return F.rms_norm(total, (N,), weight), total


def gradients_off_between(total, weight):
    with torch.no_grad():
        return F.rms_norm(total, (N,), weight), total


AFTER = {
    two_norms: ["add_rms_norm", "layer_norm"],
    weight_after_the_sum: ["rms_norm"],
    written_after_the_sum: ["rms_norm"],
    gradients_off_between: ["rms_norm"],
}


@pytest.mark.parametrize("function", AFTER)
def test_what_follows_a_sum_may_prevent_fusion(function, dynamo):
    def whole(x, residual, weight):
        return function(x + residual, weight)

    tensors = random(3, N).requires_grad_(), random(3, N, seed=1), random(N)
    replaced = by_dynamo(whole, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == AFTER[function]
    got, expected = replaced.run(*tensors), whole(*tensors)
    torch.testing.assert_close(got, expected)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]


WRITERS = {
    "method": lambda x: x.mul_(2),
    "out": lambda x: torch.sin(x, out=x),
    "in place, by name": lambda x: F.relu(x, inplace=True),
    "in place, by position": lambda x: F.relu(x, True),
    "assigned": lambda x: x.__setitem__(0, 1),
    "added": lambda x: x.__iadd__(1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_write_between_the_norms_nodes_prevents_replacement(name, dynamo):
    def function(x, weight):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        WRITERS[name](x)
        return x * rstd * weight

    x, weight = random(3, N), random(N)
    replaced = by_dynamo(function, x.clone(), weight)
    ((_, reason),) = replaced.report.left
    assert reason == "a node between its operations may write to a tensor"
    assert torch.equal(replaced.run(x.clone(), weight), function(x.clone(), weight))
