"""A weight for each head: queries and keys where a fused projection left them."""

import pytest
import torch

import tilenorm
from tilenorm.launch.calls import Needs, bound
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops import cutile, layout
from tilenorm.ops.tensors import Saved, Tensors
from tilenorm.spec import NormSpec

from .helpers import (
    EACH_CALL,
    EACH_DEVICE,
    EACH_FORM,
    LAYER,
    NEEDS_GPU,
    RMS,
    assert_step,
    assert_within,
    call,
    expected_of,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)
from .pretended import tensors_among

BATCH, LENGTH, HQ, HKV, D = 2, 5, 6, 3, 16


def by_heads(form, heads=HQ, d=D, **options):
    """Tensors of (B, S, H, D), weight and bias of (H, D)."""
    return tensors_of(form, BATCH, LENGTH, heads, d, parameter_shape=(heads, d), **options)


def fused(device="cpu", dtype=torch.float32, d=D):
    """q (B, S, Hq, D) and k (B, S, Hkv, D), slices of one projection (B, S, (Hq + 2 Hkv) D)."""
    qkv = random(BATCH, LENGTH, (HQ + 2 * HKV) * d, dtype=dtype, device=device)
    q, k, _ = qkv.split([HQ * d, HKV * d, HKV * d], -1)
    return q.unflatten(-1, (HQ, d)), k.unflatten(-1, (HKV, d))


@EACH_DEVICE
@EACH_CALL
@pytest.mark.parametrize("heads", [1, 6])
def test_accuracy_of_every_function(device, form, heads):
    tensors = by_heads(form, heads, device=device)
    assert_step(step(form, tensors), expected_of(form, tensors))


@EACH_DEVICE
@pytest.mark.parametrize("form", [RMS, LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("d", [16, 128, 100])
@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 32])
def test_accuracy(device, form, heads, d):
    tensors = by_heads(form, heads, d, dtype=torch.bfloat16, device=device)
    got = step(form, tensors, offset=1.0)
    assert got["weight"].shape == (heads, d)
    assert_step(got, expected_of(form, tensors, offset=1.0))


@EACH_DEVICE
@pytest.mark.parametrize("absent", ["weight", "bias"])
def test_one_parameter(device, absent):
    tensors = by_heads(LAYER, device=device)
    del tensors[absent]
    assert_step(step(LAYER, tensors), expected_of(LAYER, tensors))


@EACH_DEVICE
def test_one_head_is_a_weight_for_all_rows(device):
    tensors = by_heads(RMS, 1, device=device)
    shared = tensors | {n: tensors[n].flatten() for n in ("weight", "bias")}
    got, expected = step(RMS, tensors), step(RMS, shared)
    assert all(torch.equal(got[n].flatten(), expected[n].flatten()) for n in expected)


@EACH_DEVICE
def test_equal_heads_are_a_weight_for_all_rows(device):
    tensors = by_heads(RMS, device=device)
    one = {n: tensors[n][0] for n in ("weight", "bias")}
    repeated = {n: t.expand(HQ, D) for n, t in one.items()}
    expected = expected_of(RMS, tensors | one)["output"]
    assert_within("output", call(RMS, tensors | repeated)[0], *expected)


@EACH_DEVICE
def test_several_normalised_dimensions(device):
    tensors = tensors_of(RMS, 5, 3, 4, 6, parameter_shape=(3, 4, 6), device=device)
    got = step(RMS, tensors, dims=2)
    assert got["weight"].shape == (3, 4, 6)
    assert_step(got, expected_of(RMS, tensors, dims=2))


@EACH_DEVICE
@pytest.mark.parametrize("shape", [(HQ, D), (5, HQ, D), (0, HQ, D), (2, 5, HQ, 0)], ids=str)
def test_leading_dimensions(device, shape):
    tensors = tensors_of(RMS, *shape, parameter_shape=shape[-2:], device=device)
    assert_step(step(RMS, tensors), expected_of(RMS, tensors))


def transposed(t):
    """As attention has it in memory, (B, H, S, D), seen as (B, S, H, D)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "fused": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "heads apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "one element in": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
    "transposed": transposed,
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "batch and length swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@EACH_DEVICE
@EACH_FORM
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(device, form, layout):
    tensors = by_heads(form, device=device)
    rows = {n: LAYOUTS[layout](tensors[n]) for n in tensors if n not in ("weight", "bias")}
    incoming = [LAYOUTS[layout](dy) for dy in incoming_of(tensors)]
    assert same(step(form, tensors | rows, incoming), step(form, tensors))


@EACH_DEVICE
def test_gradients_of_a_fused_projection(device):
    """Those of q and k meet in the projection's, beside the zeros of v."""
    qkv = random(BATCH, LENGTH, (HQ + 2 * HKV) * D, device=device).requires_grad_()
    found = torch.zeros_like(qkv)
    q, k, _ = qkv.split([HQ * D, HKV * D, HKV * D], -1)
    loss = 0
    for part, heads, start in ((q, HQ, 0), (k, HKV, HQ * D)):
        weight = random(heads, D, device=device, seed=heads)
        x = part.unflatten(-1, (heads, D))
        dy = random(*x.shape, device=device, seed=heads + 1)
        loss = loss + (tilenorm.rms_norm(x, (D,), weight, 1e-6) * dy).sum()
        expected = expected_of(RMS, {"input": x, "weight": weight}, [dy])["input"].exact
        found[..., start : start + heads * D] = expected.flatten(-2).to(found)
    loss.backward()
    torch.testing.assert_close(qkv.grad, found, rtol=1e-5, atol=1e-5)
    assert not qkv.grad[..., (HQ + HKV) * D :].any()


SPEC = NormSpec("rms", 128, "bfloat16", "bfloat16", heads=HQ)
TARGET = Target.of("sm_90")


def passed(function, plan, *given) -> list:
    """The tensors that the implementation hands to the launches."""
    calls = []
    function(plan, *given, run=lambda launches, arrays, _: calls.extend(bound(launches, arrays)))
    return [a for made in calls for a in tensors_among(made.arguments)]


def reads(arguments, tensor) -> bool:
    """Whether a kernel is handed a tensor's own memory."""
    return any(a.data_ptr() == tensor.data_ptr() for a in arguments)


def test_queries_of_a_fused_projection_are_read_in_place():
    q, _ = fused(dtype=torch.bfloat16, d=128)
    weight, dy = random(HQ, 128, dtype=torch.bfloat16), torch.empty_like(q)
    stats = torch.empty(q.numel() // 128)
    forward = plan_forward(SPEC, TARGET, True)
    backward = plan_backward(SPEC, TARGET, Needs(True, True))
    assert reads(passed(cutile.forward, forward, Tensors(q, weight=weight), 1e-6), q)
    inputs = (dy, None, Saved(q, None, weight, None, None, stats))
    assert reads(passed(cutile.backward, backward, *inputs), q)


def test_a_batch_that_does_not_merge_with_the_length_is_copied_once(monkeypatch):
    base = random(LENGTH, BATCH, HQ, 128, dtype=torch.bfloat16)
    q = base.transpose(0, 1)
    plan = plan_forward(SPEC, TARGET, False)
    copies = []
    for name in ("contiguous", "clone"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _original=original, **options):
            result = _original(self, *args, **options)
            if result.data_ptr() != self.data_ptr():
                copies.append(result)
            return result

        monkeypatch.setattr(torch.Tensor, name, counted)
    weight = random(HQ, 128, dtype=torch.bfloat16)
    arguments = passed(cutile.forward, plan, Tensors(q, weight=weight), 1e-6)
    assert len(copies) == 1
    assert reads(arguments, copies[0]) and not reads(arguments, base)


@NEEDS_GPU
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
def test_the_eager_path_reads_a_fused_projection_in_place(which, monkeypatch):
    x = fused("cuda", torch.bfloat16, 128)[which]
    weight = random(x.shape[-2], 128, dtype=torch.bfloat16, device="cuda")
    seen, original = [], layout.rows_of

    def spy(tensor, spec):
        view = original(tensor, spec)
        seen.append((tensor.data_ptr(), view.data_ptr()))
        return view

    for module in (layout, cutile):
        monkeypatch.setattr(module, "rows_of", spy)
    step(RMS, {"input": x, "weight": weight})
    assert len(seen) == 3  # x, then x and dy
    assert all(given == taken for given, taken in seen)
