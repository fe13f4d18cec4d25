"""A dropout mask and a layer scale: what a call takes, refuses and explains. test_add.py has bits.

tests/distributed makes its calls with `made` and `call`.
"""

import pytest
import torch

import tilenorm

from .helpers import EACH_DEVICE, EPS, op_call, random

pytestmark = EACH_DEVICE
N = 40
KINDS = {"both": ("dropout_mask", "layer_scale")}


def made(kind, *shape, device="cpu"):
    """The tensors of a call, by the names of its arguments. kind: those of KINDS that it has."""
    tensors = {
        n: random(*shape, device=device, seed=i) for i, n in enumerate(("input", "residual"))
    }
    for seed, name in enumerate(("weight", "bias", "layer_scale"), 2):
        tensors[name] = random(shape[-1], device=device, seed=seed)
    tensors["dropout_mask"] = random(*shape, device=device, seed=5) > -1
    return {n: t for n, t in tensors.items() if n in kind or n not in KINDS["both"]}


def call(op, tensors):
    scale = {"dropout_scale": 1 / 0.9} if "dropout_mask" in tensors else {}
    shape = tensors["input"].shape[-1:]
    return getattr(tilenorm, op)(**tensors, normalized_shape=shape, eps=EPS, **scale)


@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_the_mask_of_pytorchs_dropout(device, op):
    tensors = made((), 64, N, device=device)
    dropped, mask = torch.ops.aten.native_dropout(tensors["input"], 0.1, True)
    found = call(op, tensors | {"dropout_mask": mask})
    assert torch.equal(found[1], dropped + tensors["residual"])


def test_what_the_op_refuses(device):
    x = random(5, N, device=device)
    for message, residual, others in (
        ("take one residual", x, {"addend": x, "dropout_mask": x > 0}),
        ("third dtype has fewer bits", x.bfloat16(), {"addend": x}),
    ):
        given = {"input": x.half() if "third" in message else x, "residual": residual, **others}
        with pytest.raises(NotImplementedError, match=message):
            op_call("add_rms_norm", given, N, save=False)


def test_what_is_explained(device):
    x = random(5, N, device=device)
    how = {"dropout_mask": x > 0, "dropout_scale": 2.0, "layer_scale": x[0]}
    told = str(tilenorm.explain("add_rms_norm", x, x, (N,), eps=EPS, **how))
    assert "input masked, times 2" in told and "layer scale float32" in told
