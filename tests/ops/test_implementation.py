"""What compiled code calls in place of the ops: their results, found by a shorter way."""

from itertools import compress

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


def off_by_one(x: Tensor) -> Tensor:
    """The same elements, not on 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def one_row(x: Tensor) -> Tensor:
    """A row of another stride than its size."""
    return x.repeat(1, 3)[:1, : x.shape[1]]


# How what has rows differs in later calls from the first; not on 16 bytes, parameters too.
LATER = {
    "alike": lambda x: x,
    "cube": lambda x: x.view(2, 3, -1),
    "rows apart": lambda x: x.repeat(1, 2)[:, : x.shape[1]],
    "not on 16 bytes": off_by_one,
    "one row": one_row,
    "no rows": lambda x: x[:0],
}
SHORT = ("alike", "cube", "one row", "no rows")


def changed(form, later, device):
    tensors = tensors_of(form, 6, WIDE, dtype=torch.bfloat16, device=device)
    change = LATER[later]
    differs = {n: t for n, t in tensors.items() if t.dim() == 2 or change is off_by_one}
    return tensors, tensors | {name: change(t) for name, t in differs.items()}


def assert_as_the_op(bound, op, tensors, calls, wanted):
    """tensors: how many of a call's arguments are."""
    for arguments in calls:
        found, expected = bound(*arguments[:tensors]), op(*arguments)
        for got, t in zip(compress(found, wanted), compress(expected, wanted), strict=True):
            assert torch.equal(got, t) and got.is_contiguous()


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("later", LATER)
def test_forward(device, form, save, later):
    calls = [forward_arguments(form, t, save) for t in changed(form, later, device)]
    wanted = (True, form.other == "residual", save, save)
    bound = bind_norm(*calls[0][5:], wanted=wanted)
    assert_as_the_op(bound, OPS.norm, 5, calls, wanted)


@EACH_DEVICE
@EACH_FORM
@SHORT_WAY
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("wanted", [(True,) * 5, (True, False, False, True, False)])
def test_backward(device, form, later, wanted):
    calls = [backward_arguments(form, t) for t in changed(form, later, device)]
    bound = bind_norm_backward(*calls[0][8:], wanted=wanted)
    assert_as_the_op(bound, OPS.norm_backward, 8, calls, wanted)


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
