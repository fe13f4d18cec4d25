"""The compiled code of quantised norms: its results, its rows' bits, and what it is made of."""

from collections import Counter
from dataclasses import replace
from itertools import cycle, product
from random import Random

import pytest
import torch

from tests import cases
from tests.executors import Inputs
from tests.quantized import HOWS, check, label
from tilenorm.launch import heuristics
from tilenorm.launch.calls import ForwardArrays
from tilenorm.launch.plan import ForwardPlan, plan_forward
from tilenorm.launch.target import Target
from tilenorm.launch.tuned import TABLES
from tilenorm.ops.quantized.tensors import QuantizedNorm
from tilenorm.spec import OPS, NormSpec, Quantization
from tilenorm.tools.precompile import calls_of, compile_call, cubin_of

from .code import instructions, nvdisasm
from .executor import Compiled, runs

NEEDS_NVDISASM = pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
ROW, BLOCK = Quantization("row", output=True), Quantization("block", layout="column", output=True)
STATIC = Quantization("tensor", output=True)
# Bytes that a thread spills. Without spills it took 73.5 µs and not 70.0 (H200, 2026-11-25).
SPILLS = {("sm_90", "rms_norm", 16384, "block"): 32}
HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
B = "bfloat16"


def spec_of(op: str, hidden: int, how: Quantization, dtype: str = B) -> NormSpec:
    bias = dtype if "layer" in op else None
    return NormSpec.of(op, hidden, dtype, weight=dtype, bias=bias, quantized=how)


@NEEDS_NVDISASM
@pytest.mark.parametrize("how", [HOWS[i] for i in (1, 2, 6, 8)], ids=label)
def test_results_are_those_of_the_oracle(how):
    dtype = cases.DTYPES[HOWS.index(how) % 3]
    spec = spec_of("rms_norm", 128, how, dtype)
    executor, inputs = Compiled("sm_90"), Inputs.random(spec, 3, "cpu")
    y = executor.forward(spec.unquantized, inputs)["y"]
    found = executor.forward(spec, inputs)
    scale = found.get("scale", inputs.scale)
    found = QuantizedNorm(found["q"], scale, found.get("y"), found.get("amax"))
    check(how, found, y, 128, inputs.scale)


def sees(spec: NormSpec, drawn: bool) -> bool:
    """Whether one kernel serves, whose tiles are rows. It is compiled with other hints than the
    plain norm's, or reads its weights later. drawn: and it has no prescribed order.
    """
    plan = plan_forward(spec, Target("sm_90", 1), True)
    fused = plan.spec.quantized is not None
    return fused and plan.config.rows == 1 and runs(plan) and not (drawn and plan.ordered)


def rows_to_add_up():
    """Of each entry of the table whose tiles are rows: its size, and, where the compiler chooses
    the order of sums, another one that it serves. Scalings take turns, and so do y and no y.
    """
    rng, turns = Random(0), cycle(product((ROW, BLOCK, STATIC), (True, False)))
    for (op, size), table in TABLES["sm_90"].FORWARD.items():
        dtype, before = {2: B, 4: "float32"}[size], 0
        for hidden, _ in table if op in OPS[:4] else ():
            drawn = 128 * rng.randint(before // 128 + 1, max(1, hidden // 128))
            before = hidden
            for n in dict.fromkeys((hidden, drawn)):
                # The first had other bits with the plain norm's hint; the other is prescribed.
                quick = (op, n) in (("add_rms_norm", 3072), ("rms_norm", 2048)) and size == 2
                how, output = (ROW, True) if quick else next(turns)
                spec = spec_of(op, n, how._replace(output=output), dtype)
                if sees(spec, drawn=n != hidden):
                    marks = [] if quick else [pytest.mark.slow]
                    name = f"{cases.label(spec.unquantized)}-{how.scaling}{'-y' * output}"
                    yield pytest.param(spec, marks=marks, id=name)


@NEEDS_NVDISASM
@pytest.mark.parametrize("spec", list(rows_to_add_up()))
def test_a_row_is_added_up_as_by_the_plain_norm(spec):
    """Every operation disturbs its result, so that another order would show: in y, or, where y is
    not returned, in the codes.
    """
    executor, inputs = Compiled("sm_90", disturbs=True), Inputs.random(spec, 2, "cpu")
    expected, found = executor.forward(spec.unquantized, inputs), executor.forward(spec, inputs)
    assert all(torch.equal(found[name], expected[name]) for name in found.keys() & expected.keys())
    if not spec.quantized.output:
        with_y = replace(spec, quantized=spec.quantized._replace(output=True))
        again = executor.forward(with_y, inputs)
        assert torch.equal(again["y"], expected["y"])
        assert torch.equal(again["q"].view(torch.uint8), found["q"].view(torch.uint8))


@NEEDS_NVDISASM
def test_the_hint_of_the_plain_norm_would_change_the_order(monkeypatch):
    spec = spec_of("add_rms_norm", 3072, ROW)
    hints = heuristics.forward(spec, Target.of("sm_90")).hints
    monkeypatch.setattr(ForwardPlan, "hints", hints)
    plan_forward.cache_clear()
    executor, inputs = Compiled("sm_90", disturbs=True), Inputs.random(spec, 2, "cpu")
    expected, found = executor.forward(spec.unquantized, inputs), executor.forward(spec, inputs)
    plan_forward.cache_clear()
    assert not torch.equal(expected["y"], found["y"])


def kernel(spec: NormSpec, arch: str, rows: int = 65537):
    """The norm's call, without clear_slots."""
    return calls_of(plan_forward(spec, Target.of(arch), False), rows)[-1]


@NEEDS_NVDISASM
@pytest.mark.parametrize(
    "arch, how", [("sm_90", ROW), ("sm_100", BLOCK), ("sm_120", Quantization("mx"))], ids=str
)
def test_the_hardware_converts_and_divides_by_groups(arch, how):
    """A conversion for each two elements of a thread, and two divisions for each of its groups."""
    call = kernel(spec_of("rms_norm", 4096, how), arch)
    cubin = cubin_of(call, arch)
    threads = compile_call(call, arch).threads
    names = Counter()
    for i in instructions(cubin)[0]:
        eights = i.name == "F2FP" and "E4M3" in i.modifiers
        names["F2FP.E4M3" if eights else i.name] += 1
    assert names["F2FP.E4M3"] == 4096 // threads // 2
    groups = {"row": 1, "mx": 0, "block": 4096 // threads // 8}[how.scaling]
    assert names["FCHK"] <= 2 * groups


def spilled_params():
    for arch in ("sm_90", "sm_100", "sm_120"):
        for op in (OPS[0], OPS[3]):
            for how in (ROW, BLOCK):
                for hidden in HIDDEN if arch == "sm_90" else HIDDEN[::3]:
                    quick = (arch, hidden) == ("sm_120", 1024)
                    marks = () if quick else pytest.mark.slow
                    name = f"{arch}-{op}-{hidden}-{how.scaling}"
                    given = how._replace(output=op == OPS[3])
                    yield pytest.param(arch, spec_of(op, hidden, given), marks=marks, id=name)


@pytest.mark.parametrize("arch, spec", list(spilled_params()))
def test_no_spills(arch, spec):
    case = arch, spec.unquantized.op, spec.hidden, spec.quantized.scaling
    assert compile_call(kernel(spec, arch), arch).spill_bytes == SPILLS.get(case, 0)


def test_the_plain_norm_is_not_touched():
    """Its plan has no constant of a quantisation, and its arrays none of its arrays."""
    spec = spec_of("rms_norm", 4096, ROW)
    plain = kernel(replace(spec, quantized=None), "sm_90")
    assert len(plain.arguments[2]) == ForwardArrays._fields.index("slots") + 1
    assert len(kernel(spec, "sm_90").arguments[2]) == len(ForwardArrays._fields)
