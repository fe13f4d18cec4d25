"""The FX pass on RMSNorm that is written with a norm of the row, as F.normalize(x) * √n is."""

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from .graphs import TRACERS, kinds_of, module_of

N = 48
ROOT = N**0.5
SPELLINGS = {
    "normalize": (1e-12, lambda x, w: F.normalize(x, dim=-1) * ROOT * w),
    "normalize, 1 + weight": (1e-12, lambda x, w: F.normalize(x, dim=-1) * ROOT * (1 + w)),
    "arguments": (1e-8, lambda x, w: w * (ROOT * F.normalize(x, 2.0, -1, 1e-8))),
    "clamp": (1e-8, lambda x, w: x / (x.norm(dim=-1, keepdim=True) / ROOT).clamp(min=1e-8) * w),
    "clamp_min": (1e-6, lambda x, w: x / torch.norm(x, 2, -1, True).clamp_min(1e-6) * ROOT * w),
}
EACH = pytest.mark.parametrize("tracer, name", [*zip([*TRACERS] * 2, SPELLINGS, strict=False)])


def rows(clamp: float) -> torch.Tensor:
    """A row of zeros, and rows whose norms lie around the clamp and far from it."""
    x = F.normalize(torch.randn(9, N, generator=torch.Generator().manual_seed(1)), dim=-1)
    return x * torch.tensor([0, 1e-6, 1e-4, 0.1, 1.0, 10, 1e4, 1e6, 1e9]).unsqueeze(-1) * clamp


NEAR, FAR = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 2, 6, 7, 8])  # of these rows


def run(function, *tensors):
    """The output and the gradients, for a dy that is zero in the rows that are near the clamp."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).index_fill(0, NEAR, 0)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@EACH
def test_rows_far_from_the_clamp_are_the_same(tracer, name, dynamo):
    clamp, function = SPELLINGS[name]
    clamp *= ROOT if name == "clamp" else 1  # it clamps the root mean square
    x = rows(clamp)
    weight = torch.randn(N, generator=torch.Generator().manual_seed(3))
    replaced = TRACERS[tracer](module_of(function), x, weight, inexact=True)
    assert kinds_of(replaced.report) == ["rms_norm"] and not replaced.report.left
    (expected, dx, dw), (got, got_dx, got_dw) = (
        run(function, x, weight),
        run(replaced.run, x, weight),
    )
    torch.testing.assert_close(got[FAR], expected[FAR], rtol=2e-6, atol=0)
    assert ((got_dx - dx).abs() <= 4e-6 * dx.abs().amax(-1, keepdim=True)).all()
    torch.testing.assert_close(got_dw, dw, rtol=1e-5, atol=1e-5)
    # A row at the clamp comes out smaller by √2, as the documentation says, and no other by more.
    ratio = expected[NEAR].abs().amax(-1) / got[NEAR].abs().amax(-1)
    assert ratio.max().item() == pytest.approx(2**0.5, rel=1e-5) and ratio.min() > 1


@EACH
def test_the_default_leaves_it_and_names_the_rows(tracer, name, dynamo):
    clamp, function = SPELLINGS[name]
    report = TRACERS[tracer](module_of(function), rows(1.0), torch.ones(N)).report
    assert not report.replaced
    (reason,) = {reason for _, reason in report.left}
    assert f"at least {clamp:.0e}" in reason and "inexact=True" in reason


def test_float16_has_no_such_rows(dynamo):
    def function(x, w):
        return (F.normalize(x.float(), dim=-1) * ROOT).to(x.dtype) * w

    x = rows(1.0).clamp(-6e4, 6e4).half()  # with a row of zeros, and rows of the smallest numbers
    x[1] = 0
    x[1, 0] = 6e-8
    for tracer in TRACERS.values():
        replaced = tracer(module_of(function), x, torch.ones(N).half())
        assert kinds_of(replaced.report) == ["rms_norm"]
        assert torch.equal(replaced.run(x, torch.ones(N).half()), function(x, torch.ones(N).half()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inexact_rounds_once(dtype, dynamo):
    function = SPELLINGS["normalize"][1]
    x, weight = torch.randn(5, N).to(dtype), torch.randn(N).to(dtype)
    replaced = TRACERS["dynamo"](module_of(function), x, weight, inexact=True)
    assert kinds_of(replaced.report) == ["rms_norm"]
    exact = F.rms_norm(x.double(), (N,), weight.double(), 0.0)
    error = (replaced.run(x, weight).double() - exact).abs().max()
    assert error <= (function(x, weight).double() - exact).abs().max()


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x, w: F.normalize(x, dim=-1) * w, "at least"),
        (lambda x, w: x / x.norm(dim=-1, keepdim=True) * ROOT * w, "nothing keeps from 0"),
        (lambda x, w: x / (x.norm(dim=-1, keepdim=True) + 1e-8) * ROOT * w, "added to the root"),
        (lambda x, w: F.normalize(x, p=1, dim=-1) * ROOT * w, None),
        (lambda x, w: F.normalize(x, dim=0) * ROOT * w, None),
        (lambda x, w: x / x.norm(dim=-1, keepdim=True).clamp(1e-8, 4.0) * ROOT * w, "nothing"),
    ],
)
def test_others_are_left(function, reason, dynamo):
    for tracer in TRACERS.values():
        report = tracer(module_of(function), rows(1.0), torch.ones(N)).report
        assert not report.replaced
        assert all(reason in why for _, why in report.left) if reason else not report.left


def test_compile_takes_the_option(dynamo):
    function = SPELLINGS["normalize"][1]
    x, weight = torch.randn(5, N), torch.randn(N)
    compiled = tilenorm.compile(function, backend="aot_eager", inexact=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight))
    assert [kind for kind, _ in compiled.tilenorm_report.replaced] == ["rms_norm"]
    with pytest.raises(TypeError, match="compile: argument 'inexact' takes a bool"):
        tilenorm.compile(function, inexact=1)
