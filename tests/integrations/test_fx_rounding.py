"""The FX pass on what follows x̂: weight, bias and gate, in the op that rounds as they do."""

import random as draw

import pytest
import torch
import torch.nn.functional as F

from ..ops.helpers import EPS, GATED, random, tensors_of
from .graphs import argument, by_dynamo, by_make_fx, calls
from .spellings import RMSES, N, module_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def silu(z):
    return F.silu(z.float())


# What follows x̂ in float32, of an x in bfloat16; the kind of the op, and how it rounds. A norm
# without its gate is what is left where the op rounds elsewhere.
STAGES = {
    "at the end": (lambda y, z, w, b: y * w * silu(z), "gated_rms_norm", "late"),
    "after x_hat": (lambda y, z, w, b: y.bfloat16() * silu(z), "gated_rms_norm", "early"),
    "after x_hat and weight": (
        lambda y, z, w, b: y.bfloat16() * w * silu(z),
        *("gated_rms_norm", "early"),
    ),
    "after x_hat, but not after weight": (
        lambda y, z, w, b: (y.bfloat16() * w.float() + b.float()).bfloat16(),
        *("rms_norm", "late"),
    ),
    "after weight": (lambda y, z, w, b: (y * w).bfloat16() * silu(z), "rms_norm", "late"),
    "in silu": (lambda y, z, w, b: (y * w).bfloat16() * F.silu(z), "rms_norm", "late"),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_op_rounds_where_the_model_does(name):
    finish, kind, rounding = STAGES[name]

    def function(x, z, w, b):
        return finish(RMSES["** -0.5"](x.float()), z, w, b).bfloat16()

    tensors = tensors_of(GATED, 3, N, dtype=BF16).values()
    replaced = by_make_fx(module_of(function), *tensors)
    (call,) = calls(replaced.graph_module)
    assert [k for k, _ in replaced.report.replaced] == [kind]
    assert argument(call, "rounding") == rounding
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors), rtol=0, atol=0)


ORDER = ("x_hat", "weight", "bias", "gate")
FACTORS = {"w": lambda w: w, "1 + w": lambda w: 1 + w, "1 + w.float()": lambda w: 1.0 + w.float()}
CASTS = {
    "to": lambda y, x, w: y.to(x.dtype),
    "type_as": lambda y, x, w: y.type_as(x),
    "to the weight's": lambda y, x, w: y.to(w.dtype),
    "and back": lambda y, x, w: y.to(x.dtype).float(),
}


@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_bits_are_kept_for_drawn_casts(examples):
    """What a drawn expression does to x̂, a stage after the other, with a cast after some."""
    choose = draw.Random(7)
    kinds = set()
    for _ in range(examples):
        dtype = choose.choice([BF16, F16, F32])
        weight, bias = (choose.choice([dtype, F32, BF16]) for _ in range(2))
        steps = {"weight", "bias", "gate", "x_hat"} - set(choose.choices(["weight", "bias", "-"]))
        casts = {s: choose.choice(list(CASTS)) for s in ORDER if choose.random() < 0.5}
        factor, gate = choose.choice(list(FACTORS)), choose.choice([torch.sigmoid, silu, F.silu])

        def function(x, z, w, b, steps=steps, casts=casts, factor=factor, gate=gate):
            y = RMSES["sum / n"](x.float())
            others = {"weight": FACTORS[factor](w), "bias": b, "gate": gate(z)}
            for stage in ORDER:
                if stage in others and stage in steps:
                    y = y + b if stage == "bias" else y * others[stage]
                y = CASTS[casts[stage]](y, x, w) if stage in casts else y
            return y

        x, z = random(3, N, dtype=dtype), random(3, N, dtype=dtype, seed=1)
        tensors = x, z, random(N, dtype=weight, seed=2), random(N, dtype=bias, seed=3)
        replaced = by_make_fx(module_of(function), *tensors)
        assert len(replaced.report.replaced) + len(replaced.report.left) == 1
        kinds.update(kind for kind, _ in replaced.report.replaced)
        label = f"{dtype}, {factor} {weight}, bias {bias}, {steps}, casts {casts}, {gate}"
        got, expected = replaced.run(*tensors), function(*tensors)
        assert got.dtype == expected.dtype and torch.equal(got, expected), label
    assert kinds == {"rms_norm", "gated_rms_norm"}


@pytest.mark.parametrize("gate", ["of the norm", "of a head", "used again"])
def test_gates_that_no_op_takes(gate, dynamo):
    def function(x, z):
        y = F.rms_norm(x, (N,), eps=EPS)
        factor = torch.sigmoid(
            y if gate == "of the norm" else z[:, :1] if gate == "of a head" else z
        )
        return y * factor, factor if gate == "used again" else x

    tensors = random(3, N), random(3, N, seed=1)
    replaced = by_dynamo(function, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == ["rms_norm"]
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))


def test_a_gated_norm_of_transposed_heads_keeps_its_strides(dynamo):
    def function(x, z, w):
        return RMSES["1 / sqrt"](x) * w * F.silu(z)

    x, z = (random(2, 5, 4, N, seed=i).transpose(1, 2) for i in range(2))
    w = random(N, seed=2)
    replaced = by_dynamo(function, x, z, w)
    assert [kind for kind, _ in replaced.report.replaced] == ["gated_rms_norm"]
    got, expected = replaced.run(x, z, w), function(x, z, w)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)
