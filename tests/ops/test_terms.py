"""norm_backward with several terms of dy, and with y written once more."""

from dataclasses import replace
from functools import reduce
from itertools import product
from operator import add
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.support import cases, drawing, layouts
from tests.support.calls import NEEDS_GPU, by_inductor, op_call, random
from tests.support.executors import Inputs
from tests.support.guarded import guarded
from tests.support.pretended import by, pretended_gpu
from tests.support.tolerance import assert_close
from tilenorm.launch.calls import needs_of
from tilenorm.launch.plan import BackwardPlan, plan_backward
from tilenorm.ops.torch_ops.internal_ops import NormBackward
from tilenorm.spec import MAX_TERMS, SHARED_FROM, NormSpec
from tilenorm.table import BRANCH_PORTS, OPS
from tilenorm.table import NORMS as NAMES

TERMS = ("grad_output", "grad_output_2", "grad_output_3", "grad_output_4")
OP = torch.ops.tilenorm.norm_backward
B, F = "bfloat16", "float32"
SERVED = ("reference", *cases.INTERPRETED)
EACH = pytest.mark.parametrize("served", SERVED)
EVERY = [True] * 5
ADDED = NormSpec("rms", 48, B, B, residual=B)
LAYER = NormSpec("layer", 48, B, B, F, rounding="early")
# Tile loads, gathered rows of one and of several segments, rows that blocks share, and heads.
SCHEDULES = (
    NormSpec("rms", 4096, B, B),
    NormSpec("rms", 2048, B, B, offset=1.0),
    NormSpec("layer", 3000, B, B, B),
    pytest.param(NormSpec("rms", 20488, B, F, rounding="early"), marks=pytest.mark.slow),
    NormSpec("layer", 7168, "float16", "float16", residual=B),
    NormSpec("layer", 24, B, F, B, heads=3, residual=B),
)


class Call(NamedTuple):
    """A call of the op. given: the arguments by their names. y: what the forward pass returned.
    inputs: with the sum of the terms, as autograd makes it.
    """

    spec: NormSpec
    given: dict
    y: Tensor
    inputs: Inputs

    @classmethod
    def of(cls, spec, rows=3, terms=3, mask=EVERY, dsum=True, seed=0, device="cpu") -> "Call":
        """dsum: whether there is a gradient of the sum, or, where nothing was added, of x."""
        p = Inputs.random(spec, rows, device, seed)
        names = [port.name for port in OPS[spec.op].takes]
        options = spec.options._asdict() | {"norm_before_gate": not spec.gate_first}
        options["out_dtype"] = spec.out_dtype and getattr(torch, spec.out_dtype)
        options = {name: options[name] for name in OPS[spec.op].options}
        tensors = dict(zip(names, p.tensors(spec), strict=True))
        made = op_call(spec.op, tensors, spec.hidden, eps=p.eps, **options)
        y, added = made["output"], spec.residual is not None
        x = made["residual_out"] if added else p.x
        incoming = random(*x.shape, dtype=x.dtype, seed=seed + 99, device=device) if dsum else None
        some = [random(*y.shape, dtype=y.dtype, seed=seed + i, device=device) for i in range(terms)]
        given = {
            name: getattr(p, name)
            for name in ("gate", "weight", "bias", *(port.role for port in BRANCH_PORTS))
        }
        given |= {"input": x, "mean": made.get("mean"), "rstd": made["rstd"], "grad_sum": incoming}
        given |= {"eps": p.eps, "added": added, "output_mask": [*mask], **spec.options._asdict()}
        given |= {"input_dtype": p.x.dtype} if added else {}
        given |= zip(TERMS, some, strict=False)
        return cls(spec, given, y, replace(p, dy=reduce(add, some), dsum=incoming))

    def run(self, **changes) -> tuple[Tensor, ...]:
        return OP(**self.given | changes)


def plans(call: Call, served: str, output: bool) -> list[BackwardPlan]:
    """The plan for all terms, and the plan for their sum."""
    spec, given = call.spec, call.given
    roles = zip(NormBackward.row.masked, given["output_mask"], strict=True)
    one = needs_of(spec, [role for role, asked in roles if asked], given["grad_sum"] is not None)
    needs = [one._replace(terms=len(given.keys() & {*TERMS}), output=output), one]
    return [plan_backward(spec, cases.target(served), n) for n in needs]


def check(call: Call, served: str, output: bool) -> None:
    """y has the bits of the forward pass. Gradients have those of the sum where the plans add up in
    the same order: a row in the same segments, and dW and dB in as many blocks.
    """
    with by(served), guarded():
        *grads, y = call.run(output=output)
        expected = call.run(**dict.fromkeys(TERMS[1:]), grad_output=call.inputs.dy)[:5]
    assert torch.equal(y, call.y) if output else y.shape == (0,)
    tensors = {name: t.to("meta") for name, t in call.given.items() if isinstance(t, Tensor)}
    for got, fake in zip(grads, call.run(**tensors, output=output), strict=False):
        assert (got.shape, got.dtype) == (fake.shape, fake.dtype)
    rows_alike = sums_alike = True
    if served != "reference":
        a, b = plans(call, served, output)
        rows_alike = (a.config.widths, a.config.rows) == (b.config.widths, b.config.rows)
        rows = call.y.numel() // call.spec.hidden
        sums_alike = rows_alike and a.blocks(rows) == b.blocks(rows)
    for name, got, alone in zip(cases.GRADIENTS, grads, expected, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (alone.shape, alone.dtype, alone.stride())
        if sums_alike if name in ("dw", "db") else rows_alike:
            assert torch.equal(got, alone), name
        else:
            torch.testing.assert_close(got, alone)


@EACH
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("examples", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_drawn_calls(served, op, examples):
    rng, written = Random(f"{served} {op}"), 0
    for seed, dtype in product(range(examples), cases.DTYPES):
        spec = drawing.spec(rng, op, dtype, drawing.hidden(rng, 1500))
        masks = [mask for mask in product((True, False), repeat=5) if sum(mask) in (0, 1, 5)]
        output = spec.output_refused is None and rng.random() < 0.8
        with by(served):
            call = Call.of(
                spec, rng.randint(1, 9), rng.randint(1, MAX_TERMS), rng.choice(masks),
                rng.random() < 0.5, seed,
            )  # fmt: skip
        if rng.random() < 0.5:
            place = layouts.draw(rng, tuple(call.y.shape), False)
            call.given["grad_output"] = place.filled(call.given["grad_output"])
        check(call, served, output)
        written += output
    writes = op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    assert bool(written) == writes or examples == 1


@pytest.mark.long
@NEEDS_GPU
@pytest.mark.parametrize("op", NAMES)
def test_drawn_calls_on_a_gpu(op):
    """The gradients are within the budget of those of the sum, and y has the forward's bits."""
    rng = Random(op)
    for seed, dtype in product(range(3), cases.DTYPES):
        spec = drawing.spec(rng, op, dtype, drawing.hidden(rng, 20000))
        output, terms = spec.output_refused is None, rng.randint(2, MAX_TERMS)
        call = Call.of(spec, 300, terms, dsum=rng.random() < 0.5, seed=seed, device="cuda")
        truth, own = call.inputs.truth(spec), call.inputs.own(spec)
        *grads, y = call.run(output=output)
        assert not output or torch.equal(y, call.y)
        for name, got in zip(cases.GRADIENTS, grads, strict=True):
            if got.numel():
                got = got.reshape(truth[name].value.shape)
                assert_close(name, got, truth[name], own[name])


@pytest.mark.parametrize("spec", SCHEDULES, ids=cases.label)
def test_every_schedule(spec):
    with pretended_gpu():
        call = Call.of(spec, rows=2, dsum=spec.norm == "rms")
    check(call, "sm_90", output=True)


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("spec", [ADDED, LAYER], ids=cases.label)
def test_opcheck(spec, output):
    opcheck(OP.default, (), Call.of(spec).given | {"output": output})


def refused(device, call, match, error=RuntimeError, **changes):
    """The op refuses these arguments on a device."""
    given = {name: t for name, t in call.given.items() if name not in TERMS[1:]} | changes
    with pytest.raises(error, match=match):
        OP(**{n: t.to(device) if isinstance(t, Tensor) else t for n, t in given.items()})


EACH_KIND = pytest.mark.parametrize("device", ["cpu", "meta"])


@EACH_KIND
def test_wrong_terms(device):
    call, like = Call.of(ADDED), random(3, 48, dtype=torch.bfloat16)
    match = "'grad_output_2' is absent, but 'grad_output_4' is given"
    refused(device, call, match, grad_output_3=like, grad_output_4=like)
    match = r"'grad_output_3' takes what 'grad_output' is, \[3, 48\] .*, got \[48\]"
    refused(device, call, match, grad_output_2=like, grad_output_3=like[0])
    match = r"'grad_output_2' takes .*bfloat16 on .*, got \[3, 48\] torch.float32"
    refused(device, call, match, grad_output_2=like.float())


@EACH_KIND
@pytest.mark.parametrize(
    "spec, why",
    [
        (NormSpec("rms", 16, B, B, gate=F), "a norm with a gate"),
        (NormSpec("layer", 16, F, F), "LayerNorm of an input or a sum of more than 16 bits"),
        (NormSpec("layer", 16, B, B, residual=F), "LayerNorm of an input or a sum of more"),
        (NormSpec("layer", SHARED_FROM, B, B), "LayerNorm of rows of 8192 elements or more"),
        (NormSpec("layer", 16, B, None, B), "a norm with a bias and no weight"),
    ],
    ids=str,
)
def test_norms_whose_output_would_have_other_bits(device, spec, why):
    match = f"'output' takes no True for {why}"
    refused(device, Call.of(spec), match, NotImplementedError, output=True)


def test_a_term_on_another_device():
    given = Call.of(ADDED, terms=2).given
    there = {"grad_output_2": given["grad_output_2"].to("meta")}
    with pytest.raises(RuntimeError, match=r"takes .* on cpu, got .* on meta"):
        by_inductor("norm_backward")(**given | there)
