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

from tilenorm.ops import cutile, reference

from .helpers import EACH_DEVICE, EACH_FORM, FAMILY, RMS, call, same, step, tensors_of

pytestmark = EACH_DEVICE


@EACH_FORM
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointing_gives_the_same_bits(device, form, reentrant):
    def checkpointed(form, tensors):
        def run(*values):
            return call(form, dict(zip(tensors, values, strict=True)))

        return checkpoint(run, *tensors.values(), use_reentrant=reentrant)

    tensors = tensors_of(form, 5, 40, device=device)
    assert same(step(form, tensors, function=checkpointed), step(form, tensors))


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_selective_checkpointing_sees_the_op(device, keep, no_memory, monkeypatch):
    calls = []

    def counted(forward):
        return lambda *args: calls.append(forward) or forward(*args)

    bind = cutile.bind_forward
    monkeypatch.setattr(cutile, "bind_forward", lambda *args: counted(bind(*args)))
    monkeypatch.setattr(reference, "forward", counted(reference.forward))

    def policy(context, op, *args, **kwargs):
        wanted = keep and op == torch.ops.tilenorm.norm.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE

    def sine(form, tensors):
        return (call(form, tensors)[0].sin(),)

    def selective(form, tensors):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(sine, form, tensors, use_reentrant=False, context_fn=contexts)

    tensors = tensors_of(RMS, 5, 40, device=device)
    got = step(RMS, tensors, function=selective)
    assert len(calls) == (1 if keep else 2)
    assert same(got, step(RMS, tensors, function=sine))


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
