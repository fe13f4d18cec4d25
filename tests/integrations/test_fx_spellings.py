"""The FX pass on norms as people spell them: one op, with the formula's numbers and bits."""

import random as draw
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.support.calls import EPS, GATED, assert_step, expected_of, name_of, random, tensors_of

from .graphs import TRACERS, argument, calls, kinds_of, module_of, targets
from .spellings import RMSES, SPELLINGS, N, every_spelling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("tracer", ["dynamo", "make_fx"])
def test_one_op_with_the_numbers_of_the_formula(tracer, dtype, dynamo, gradients_made):
    tensors = tensors_of(GATED, 3, N, dtype=dtype)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    replaced = TRACERS[tracer](module_of(every_spelling), *leaves.values())
    forms = [spelling.form for spelling in SPELLINGS.values()]
    assert kinds_of(replaced.report) == [form.op for form in forms]
    assert not replaced.report.left
    found = calls(replaced.graph_module)
    assert len(targets(replaced.graph_module)) == 2 * len(found)  # an op, and its first result
    for form, call, y in zip(forms, found, replaced.run(*leaves.values()), strict=True):
        assert argument(call, "rounding") == "late"
        if "gate" in form.names:
            assert argument(call, "activation") == form.options.get("activation", "silu")
        assert argument(call, "eps") == pytest.approx(EPS, rel=1e-7)  # PyTorch's own is a float32
        of = {name: leaves[name] for name in form.names}
        dy = random(3, N, dtype=dtype, seed=9)
        grads = torch.autograd.grad(y, list(of.values()), dy)
        assert gradients_made[-1] == of.keys()
        got = {"output": y, **dict(zip(of, grads, strict=True))}
        assert_step(got, expected_of(form, of, [dy], eps=EPS))


def silu(z):
    return F.silu(z.float())


ORDER = ("x_hat", "weight", "bias", "gate")
FACTORS = {"w": lambda w: w, "1 + w": lambda w: 1 + w, "1 + w.float()": lambda w: 1.0 + w.float()}
CASTS = {
    "to": lambda y, x, w: y.to(x.dtype),
    "type_as": lambda y, x, w: y.type_as(x),
    "to the weight's": lambda y, x, w: y.to(w.dtype),
    "and back": lambda y, x, w: y.to(x.dtype).float(),
}
# Of x as it is stored, of a weight, and what a view makes of x.
LAYOUTS = {
    "rows": ((3, N), (N,), lambda x: x),
    "heads": ((2, 3, 4, N), (4, N), lambda x: x),
    "transposed": ((2, 4, 3, N), (N,), lambda x: x.transpose(1, 2)),
}


@pytest.mark.parametrize("examples", [45, pytest.param(90, marks=pytest.mark.slow)])
def test_bits_are_kept_for_drawn_casts(examples, dynamo):
    """What a drawn expression does to x̂, a stage after the other, with a cast after some.

    Among them are the norms of Llama, Gemma, OLMo 2 and T5.
    """
    choose = draw.Random(examples)
    made = set()
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

        shape, row, view = LAYOUTS[layout := choose.choice(list(LAYOUTS))]
        tracer = choose.choice((*["make_fx"] * 5, *TRACERS))
        x, z = (view(random(*shape, dtype=dtype, seed=seed)) for seed in (0, 1))
        tensors = x, z, random(*row, dtype=weight, seed=2), random(*row, dtype=bias, seed=3)
        dynamo.reset()
        replaced = TRACERS[tracer](module_of(function), *tensors)
        assert len(replaced.report.replaced) + len(replaced.report.left) == 1
        roundings = [argument(call, "rounding") for call in calls(replaced.graph_module)]
        made.update(zip(kinds_of(replaced.report), roundings, strict=True))
        made.update([layout] if roundings and "weight" in steps else [])
        label = (
            f"{tracer}, {layout}, {dtype}, {factor} {weight}, bias {bias}, {steps}, {casts}, {gate}"
        )
        got, expected = replaced.run(*tensors), function(*tensors)
        assert got.stride() == expected.stride(), label
        assert got.dtype == expected.dtype and torch.equal(got, expected), label
    assert made == {*LAYOUTS, *product(("rms_norm", "gated_rms_norm"), ("late", "early"))}
