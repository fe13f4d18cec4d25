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

from tests import cases, drawing, layouts
from tests.executors import Inputs
from tests.guarded import guarded
from tests.tolerance import assert_close
from tilenorm.launch.calls import needs_of
from tilenorm.launch.plan import BackwardPlan, plan_backward
from tilenorm.ops.backward import NormBackward
from tilenorm.spec import MAX_TERMS, SHARED_FROM, NormSpec
from tilenorm.table import NORMS as NAMES
from tilenorm.table import OPS

from .helpers import NEEDS_GPU, by_inductor, op_call, random
from .pretended import by, pretended_gpu

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
    """A call of the op. terms: all of dy's. given: the arguments from the second to the mask. y:
    what the forward pass returned. inputs: with the sum of the terms, as autograd makes it.
    """

    spec: NormSpec
    terms: tuple[Tensor, ...]
    given: tuple
    y: Tensor
    inputs: Inputs

    @classmethod
    def of(cls, spec, rows=3, terms=3, mask=EVERY, dsum=True, seed=0, device="cpu") -> "Call":
        """dsum: whether there is a gradient of the sum, or, where nothing was added, of x."""
        p = Inputs.random(spec, rows, device, seed)
        names, how = [port.name for port in OPS[spec.op].takes], (*spec.options, p.eps)
        options = spec.options._asdict() | {"norm_before_gate": not spec.gate_first}
        options = {name: options[name] for name in OPS[spec.op].options}
        tensors = dict(zip(names, p.tensors(spec), strict=True))
        made = op_call(spec.op, tensors, spec.hidden, eps=p.eps, **options)
        y, added = made["output"], spec.residual is not None
        x, mean, rstd = made["residual_out"] if added else p.x, made.get("mean"), made["rstd"]
        incoming = random(*x.shape, dtype=x.dtype, seed=seed + 99, device=device) if dsum else None
        given = (incoming, x, p.gate, p.weight, p.bias, mean, rstd, *how, added, list(mask))
        some = [random(*y.shape, dtype=y.dtype, seed=seed + i, device=device) for i in range(terms)]
        inputs = replace(p, dy=reduce(add, some), dsum=incoming)
        return cls(spec, tuple(some), given, y, inputs)

    @property
    def branch(self) -> tuple[Tensor | None, Tensor | None]:
        """What the input was multiplied by before the residual was added."""
        return self.inputs.dropout_mask, self.inputs.layer_scale

    def arguments(self, output=False) -> tuple:
        absent = [None] * (MAX_TERMS - len(self.terms))
        last = (None, *self.terms[1:], *absent, output, *self.branch)
        return self.terms[0], *self.given, *last

    def alone(self) -> tuple[Tensor, ...]:
        """The gradients for the sum in one tensor."""
        return OP(*self._replace(terms=(self.inputs.dy,)).arguments())[:5]


def plans(call: Call, served: str, output: bool) -> list[BackwardPlan]:
    """The plan for all terms, and the plan for their sum."""
    spec = call.spec
    asked = [
        role for role, need in zip(NormBackward.row.masked, call.given[-1], strict=True) if need
    ]
    given = (spec, asked, call.given[0] is not None)
    one = needs_of(*given)
    needs = [one._replace(terms=len(call.terms), output=output), one]
    return [plan_backward(spec, cases.target(served), n) for n in needs]


def described(arguments: tuple) -> tuple:
    """The arguments with tensors on the meta device, for which the op's fake answers."""
    return tuple(t.to("meta") if isinstance(t, Tensor) else t for t in arguments)


def check(call: Call, served: str, output: bool) -> None:
    """y has the bits of the forward pass. Gradients have those of the sum where the plans add up in
    the same order: a row in the same segments, and dW and dB in as many blocks.
    """
    with by(served), guarded():
        *grads, y = OP(*call.arguments(output))
        expected = call.alone()
    assert torch.equal(y, call.y) if output else y.shape == (0,)
    for got, fake in zip(grads, OP(*described(call.arguments(output))), strict=False):
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
@pytest.mark.parametrize("examples", [1, pytest.param(8, marks=pytest.mark.slow)])
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
            call = call._replace(terms=(*call.terms[:-1], place.filled(call.terms[-1])))
        check(call, served, output)
        written += output
    writes = op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    assert bool(written) == writes or examples == 1


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
        *grads, y = OP(*call.arguments(output))
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
    opcheck(OP.default, Call.of(spec).arguments(output))


def refused(device, call, match, *last, error=RuntimeError):
    """The op refuses these arguments behind the first one's gradient, on a device."""
    given = [call.terms[0], *call.given, None, *last]
    with pytest.raises(error, match=match):
        OP(*(t.to(device) if isinstance(t, Tensor) else t for t in given))


EACH_KIND = pytest.mark.parametrize("device", ["cpu", "meta"])


@EACH_KIND
def test_wrong_terms(device):
    call, like = Call.of(ADDED), random(3, 48, dtype=torch.bfloat16)
    match = "'grad_output_2' is absent, but 'grad_output_4' is given"
    refused(device, call, match, None, like, like)
    match = r"'grad_output_3' takes what 'grad_output' is, \[3, 48\] .*, got \[48\]"
    refused(device, call, match, like, like[0])
    match = r"'grad_output_2' takes .*bfloat16 on .*, got \[3, 48\] torch.float32"
    refused(device, call, match, like.float())


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
    last = (*[None] * (MAX_TERMS - 1), True)
    match = f"'output' takes no True for {why}"
    refused(device, Call.of(spec), match, *last, error=NotImplementedError)


def test_a_term_on_another_device():
    a, b = (call := Call.of(ADDED, terms=2)).terms
    with pytest.raises(RuntimeError, match=r"takes .* on cpu, got .* on meta"):
        by_inductor("norm_backward")(*call._replace(terms=(a, b.to("meta"))).arguments())
