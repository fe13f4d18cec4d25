"""The FX pass on norms as people spell them: one op, with the formula's numbers and bits."""

import random as draw

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EPS, GATED, assert_step, expected_of, random, tensors_of
from .graphs import TRACERS, argument, by_dynamo, by_make_fx, calls, targets
from .spellings import RMSES, SPELLINGS, N, Spelling, every_spelling, mean, module_of, squares

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def assert_numbers(spelling: Spelling, leaves: dict, y: torch.Tensor) -> None:
    """Hold an output, and the gradients of its inputs, to the formula in float64."""
    dy = random(3, N, dtype=y.dtype, seed=9)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    got = {"output": y, **dict(zip(leaves, grads, strict=True))}
    assert_step(got, expected_of(spelling.form, leaves, [dy], eps=EPS))


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_op_with_the_numbers_of_the_formula(name, gradients_made):
    form, function = SPELLINGS[name]
    tensors = tensors_of(form, 3, N, dtype=BF16)

    def in_float32(x, *others):
        return function(*(t.float() for t in (x, *others))).to(x.dtype)

    replaced = by_make_fx(module_of(in_float32), *tensors.values())
    (call,) = calls(replaced.graph_module)
    assert [kind for kind, _ in replaced.report.replaced] == [form.op]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2  # the op, and its first result
    assert argument(call, "rounding") == "late"
    if "gate" in form.names:
        assert argument(call, "activation") == form.options.get("activation", "silu")
    assert argument(call, "eps") == pytest.approx(EPS, rel=1e-7)  # PyTorch's own is a float32
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    assert_numbers(SPELLINGS[name], leaves, replaced.run(*leaves.values()))
    assert gradients_made == [set(tensors)]


def test_every_spelling_as_torch_compile_captures_it(dynamo):
    tensors = {name: t.requires_grad_() for name, t in tensors_of(GATED, 3, N).items()}
    replaced = by_dynamo(every_spelling, *tensors.values())
    assert [kind for kind, _ in replaced.report.replaced] == [s.form.op for s in SPELLINGS.values()]
    assert not replaced.report.left
    assert len(targets(replaced.graph_module)) == 2 * len(SPELLINGS)
    for spelling, y in zip(SPELLINGS.values(), replaced.run(*tensors.values()), strict=True):
        assert_numbers(spelling, {name: tensors[name] for name in spelling.form.names}, y)


def sample_variance(x, w):
    return (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS) * w


def mean_is_used(x, w):
    center = mean(x)
    return (x - center) / torch.sqrt(squares(x - center) + EPS) * w, center


OTHER_FORMULAS = {
    "eps beside the root": (lambda x, w: x / (squares(x).sqrt() + EPS) * w, "added to the root"),
    "variance of a sample": (sample_variance, "its result is 0.989529 times a norm"),
    "unit length": (
        lambda x, w: x * torch.rsqrt(x.square().sum(-1, True) + EPS),
        "0.144338 times a norm",
    ),
    "a tensor": (lambda x, w: x * torch.rsqrt(squares(x) + w[0].abs()), "its eps is a tensor"),
    "its mean is used": (mean_is_used, "use its intermediate result"),
}


@pytest.mark.parametrize("tracer", ["dynamo", "make_fx"])
@pytest.mark.parametrize("name", OTHER_FORMULAS)
def test_other_formulas_are_left_with_the_reason(name, tracer, dynamo):
    function, expected = OTHER_FORMULAS[name]
    tensors = random(3, N), random(N, seed=1)
    replaced = TRACERS[tracer](module_of(function), *tensors)
    assert not replaced.report.replaced
    ((_, reason),) = replaced.report.left
    assert expected in reason
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors), rtol=0, atol=0)


NOT_NORMS = {
    "loss": lambda x, y: ((x - y) ** 2).mean(-1, keepdim=True),
    "scaled by another's": lambda x, y: x * torch.rsqrt(squares(y) + EPS),
    "of columns": lambda x, y: x * torch.rsqrt(x.square().mean(0, keepdim=True) + EPS),
    "not centred": lambda x, y: x / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS),
    "centred by another's": lambda x, y: (x - mean(y)) * (x.var(-1, False, True) + EPS).rsqrt(),
    "columns by rows": lambda x, y: x * torch.rsqrt(x.square().mean(-1) + EPS),
    "another power": lambda x, y: x / (squares(x) + EPS),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_what_is_no_norm_stays_and_is_not_reported(name):
    report = replace_norms(make_fx(NOT_NORMS[name])(random(N, N), random(N, N, seed=1)))
    assert report.replaced == report.left == ()


def centred_rows(x, r, w):
    center = mean(x)
    rows = x - center
    return rows * torch.rsqrt(squares(rows) + EPS) * w, center


def of_a_sum(x, r, w):
    return SPELLINGS["layer, var_mean"].function(x + r, w, w)


def output_used_twice(x, r, w):
    y = F.rms_norm(x, (N,), eps=EPS)
    return y * w, y.sin()


@pytest.mark.parametrize(
    "function, kind",
    [(centred_rows, "rms_norm"), (of_a_sum, "add_layer_norm"), (output_used_twice, "rms_norm")],
)
def test_what_is_around_a_norm(function, kind, dynamo):
    """The centred rows, the sum before the norm, or the output alone belong to the op."""
    tensors = random(3, N), random(3, N, seed=1), random(N, seed=2)
    replaced = by_dynamo(function, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == [kind]
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))


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


@pytest.mark.parametrize("examples", [60, pytest.param(200, marks=pytest.mark.slow)])
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
