"""Within activation checkpointing and inference_mode, and from several threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .helpers import EACH_DEVICE, EACH_FORM, FAMILY, RMS, call, same, step, tensors_of

pytestmark = EACH_DEVICE
NORM = torch.ops.tilenorm.norm.default


@EACH_FORM
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointing_gives_the_same_bits(device, form, reentrant):
    def checkpointed(form, tensors):
        return checkpoint(call, form, tensors, use_reentrant=reentrant)

    def flat(form, tensors):
        # Reentrant checkpointing sees tensors among its arguments alone.
        run = lambda *values: call(form, dict(zip(tensors, values, strict=True)))  # noqa: E731
        return checkpoint(run, *tensors.values(), use_reentrant=True)

    tensors = tensors_of(form, 5, 40, device=device)
    function = flat if reentrant else checkpointed
    assert same(step(form, tensors, function=function), step(form, tensors))


@pytest.mark.parametrize("keep", [False, True])
def test_selective_checkpointing_sees_the_op(device, keep, monkeypatch):
    """Kept, its outputs are saved; else the backward pass calls it again."""
    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append((op, context.is_recompute))
        wanted = keep and op == NORM
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE

    def selective(form, tensors):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(
            lambda: tuple(y.sin() for y in call(form, tensors)),
            use_reentrant=False,
            context_fn=contexts,
        )

    tensors = tensors_of(RMS, 5, 40, device=device)
    plain = step(RMS, tensors, function=lambda form, t: (call(form, t)[0].sin(),))
    assert same(step(RMS, tensors, function=selective), plain)
    assert (NORM, False) in seen


@EACH_FORM
def test_inference_mode_gives_the_same_bits(device, form):
    tensors = tensors_of(form, 5, 40, device=device)
    expected = call(form, tensors)
    with torch.inference_mode():
        got = call(form, tensors)
        again = call(form, tensors | {"input": tensors["input"].clone()})
    assert all(y.is_inference() for y in got)
    for a, b, c in zip(got, again, expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm"])
def test_threads_give_the_same_bits(device, name):
    form = FAMILY[name]
    tensors = [tensors_of(form, rows, 40, device=device) for rows in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(partial(step, form), tensors * 4))
    for number, got in enumerate(found):
        assert same(got, step(form, tensors[number % 8]))
