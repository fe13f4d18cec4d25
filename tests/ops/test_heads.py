"""A weight for each head: queries and keys where a fused projection left them."""

import pytest
import torch

from .helpers import (
    EACH_CALL,
    EACH_DEVICE,
    RMS,
    assert_step,
    expected_of,
    incoming_of,
    rows_of,
    same,
    step,
    tensors_of,
)

pytestmark = EACH_DEVICE
BATCH, LENGTH, HEADS, D = 2, 5, 6, 16


def by_heads(form, heads=HEADS, d=D, **options):
    """Tensors of (B, S, H, D), weight and bias of (H, D)."""
    return tensors_of(form, BATCH, LENGTH, heads, d, parameter_shape=(heads, d), **options)


@EACH_CALL
@pytest.mark.parametrize("heads", [1, 6])
def test_accuracy_of_every_function(device, form, heads):
    tensors = by_heads(form, heads, device=device)
    got = step(form, tensors)
    assert got["weight"].shape == (heads, D)
    assert_step(got, expected_of(form, tensors))


def test_one_head_is_a_weight_for_all_rows(device):
    tensors = by_heads(RMS, 1, device=device)
    shared = tensors | {n: tensors[n].flatten() for n in ("weight", "bias")}
    got, expected = step(RMS, tensors), step(RMS, shared)
    assert all(torch.equal(got[n].flatten(), expected[n].flatten()) for n in expected)


def test_several_normalised_dimensions(device):
    tensors = tensors_of(RMS, 5, 3, 4, 6, parameter_shape=(3, 4, 6), device=device)
    got = step(RMS, tensors, dims=2)
    assert got["weight"].shape == (3, 4, 6)
    assert_step(got, expected_of(RMS, tensors, dims=2))


@pytest.mark.parametrize(
    "shape", [(HEADS, D), (5, HEADS, D), (0, HEADS, D), (2, 5, HEADS, 0)], ids=str
)
def test_leading_dimensions(device, shape):
    tensors = tensors_of(RMS, *shape, parameter_shape=shape[-2:], device=device)
    assert_step(step(RMS, tensors), expected_of(RMS, tensors))


LAYOUTS = {
    "fused": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "heads apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "one element in": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "batch and length swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@EACH_CALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_bit(device, form, layout):
    tensors = by_heads(form, device=device)
    rows = {n: LAYOUTS[layout](t) for n, t in rows_of(tensors).items()}
    incoming = [LAYOUTS[layout](dy) for dy in incoming_of(tensors)]
    assert same(step(form, tensors | rows, incoming), step(form, tensors))
