"""What compiled code calls in place of the ops: their results, found by a shorter way."""

from itertools import zip_longest

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilenorm.ops import implementation
from tilenorm.ops.implementation import bind_norm, bind_norm_backward

from .helpers import EACH_DEVICE, EACH_FORM, RMS, random, tensors_of
from .test_library import OPS, backward_arguments, forward_arguments

SHORT_WAY = pytest.mark.usefixtures("as_on_a_gpu")
WIDE = 64


def rows_apart(x: Tensor) -> Tensor:
    return x.repeat(*[1] * (x.dim() - 1), 2)[..., : x.shape[-1]]


def off_by_one(x: Tensor) -> Tensor:
    """The same elements, not on 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def one_row(x: Tensor) -> Tensor:
    """A row of another stride than its size."""
    return x.repeat(1, 3)[:1, : x.shape[-1]] if x.dim() == 2 else x


# How the tensors of later calls differ from those of the first.
LATER = {
    "alike": lambda x: x,
    "cube": lambda x: x.view(2, 3, -1) if x.dim() == 2 else x,
    "rows apart": lambda x: rows_apart(x) if x.dim() == 2 else x,
    "not on 16 bytes": off_by_one,
    "one row": one_row,
    "no rows": lambda x: x[:0] if x.dim() == 2 else x,
}
SHORT = ("alike", "cube", "one row", "no rows")


def changed(form, later, device, dtype=torch.bfloat16, n=WIDE):
    tensors = tensors_of(form, 6, n, dtype=dtype, device=device)
    return tensors, {name: LATER[later](t) for name, t in tensors.items()}


def used(results, wanted):
    """Those results that somebody wants."""
    return [t for t, w in zip_longest(results, wanted, fillvalue=True) if w]


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("later", LATER)
def test_forward(device, form, save, later):
    first, then = changed(form, later, device)
    wanted = (True, "residual" in first, save, save)
    bound = bind_norm(*forward_arguments(form, first, save)[5:], wanted=wanted)
    for tensors in (first, then):
        arguments = forward_arguments(form, tensors, save)
        expected = used(OPS.norm(*arguments), wanted)
        for got, y in zip(used(bound(*arguments[:5]), wanted), expected, strict=True):
            assert torch.equal(got, y) and got.is_contiguous()


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("wanted", [(True,) * 5, (True, False, False, True, False)])
def test_backward(device, form, later, wanted):
    first, then = changed(form, later, device)
    first, then = (backward_arguments(form, t) for t in (first, then))
    bound = bind_norm_backward(*first[8:], wanted=wanted)
    for arguments in (first, then):
        expected = used(OPS.norm_backward(*arguments), wanted)
        for got, d in zip(used(bound(*arguments[:8]), wanted), expected, strict=True):
            assert torch.equal(got, d) and got.is_contiguous()


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("later", LATER)
def test_the_way_is_short(device, form, later, monkeypatch):
    """The long one is that of layouts that have to be looked at."""
    first, then = changed(form, later, device)
    long = []
    for name in ("norm_forward", "norm_backward"):
        implemented = getattr(implementation, name)
        monkeypatch.setattr(
            implementation, name, lambda *a, f=implemented, n=name: long.append(n) or f(*a)
        )
    added = "residual" in first
    bound = bind_norm(*forward_arguments(form, first)[5:], wanted=(True, added, False, True))
    back = bind_norm_backward(
        *backward_arguments(form, first)[8:], wanted=(True, False, False, False, False)
    )
    arguments = [(forward_arguments(form, t), backward_arguments(form, t)) for t in (first, then)]
    long.clear()
    for forward, backward in arguments:
        bound(*forward[:5])
        back(*backward[:8])
    assert long == ([] if later in SHORT else ["norm_forward"])


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("heads", [(3, 1, 4), (1, 3)])
def test_parameters_of_heads(device, form, heads):
    """As many as are given, whatever there were in the first call."""
    made = []
    for h in heads:
        tensors = tensors_of(form, 4, h, 32, parameter_shape=(h, 32), device=device)
        made.append((forward_arguments(form, tensors), backward_arguments(form, tensors)))
    bound = bind_norm(*made[0][0][5:], wanted=(True, "residual" in tensors, False, True))
    back = bind_norm_backward(*made[0][1][8:], wanted=(True, False, False, True, True))
    for forward, backward in made:
        expected, grads = OPS.norm(*forward), OPS.norm_backward(*backward)
        y, _, _, rstd = bound(*forward[:5])
        dx, _, _, dw, db = back(*backward[:8])
        assert torch.equal(y, expected[0]) and torch.equal(rstd, expected[3])
        assert all(map(torch.equal, (dx, dw, db), (grads[0], grads[3], grads[4])))


@EACH_DEVICE
@SHORT_WAY
def test_forward_mode_is_refused(device):
    tensors = tensors_of(RMS, 3, WIDE, device=device)
    arguments = forward_arguments(RMS, tensors, False)
    bound = bind_norm(*arguments[5:], wanted=(True, False, False, False))
    bound(*arguments[:5])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        bound(*arguments[:5])


def test_the_backend_asked_for_is_asked_every_time():
    tensors = {"input": random(3, WIDE)}
    arguments = forward_arguments(RMS, tensors, False)
    bound = bind_norm(*arguments[5:], "cutile", wanted=(True, False, False, False))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuTile runs on NVIDIA GPUs"):
            bound(*arguments[:5])
