"""What a quantised norm is compiled with: what may differ from the plain norm, and what may not."""

from dataclasses import replace
from random import Random

import pytest

from tilenorm.launch.arrays import ForwardArrays
from tilenorm.launch.calls import Call
from tilenorm.launch.config import Hints, RowForward, SharedForward
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import Target
from tilenorm.launch.tuned.quantized import ONE_ROW, SHARED
from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import NORMS
from tilenorm.tools.precompile import calls_of

THREADS = 2048  # of a multiprocessor
SCALINGS = ("row", "block", "mx", "tensor")
ROW = Quantization("row")


def drawn(rng: Random) -> NormSpec:
    op, dtype = rng.choice(NORMS[:4]), rng.choice(("bfloat16", "float16", "float32"))
    hidden = 128 * rng.randint(1, 2048 if rng.choice((True, False)) else 160)
    bias = dtype if "layer" in op else None
    how = Quantization(rng.choice(SCALINGS), output=rng.choice((True, False)))
    return NormSpec.of(op, hidden, dtype, weight=dtype, bias=bias, quantized=how)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("seed", range(10))
def test_the_rows_are_cut_and_shared_among_threads_as_the_plain_norms(arch, seed):
    """So that, where the order of sums is prescribed, q has the bits of the plain norm."""
    rng, target, fused = Random(seed), Target.of(arch), 0
    for _ in range(60):
        spec = drawn(rng)
        plan, plain = (plan_forward(s, target, False) for s in (spec, spec.unquantized))
        if plan.spec.quantized is None:
            continue
        fused += 1
        found, config = plan.compiled, plain.config
        assert plan.config == config
        assert found.hints.num_worker_warps == config.hints.num_worker_warps
        occupancy = found.hints.occupancy or 1
        assert occupancy * found.hints.threads <= THREADS
        free = {"hints": found.hints}
        if isinstance(config, RowForward) and config.rows == 1:
            assert not found.packed or spec.widest_item == 2
            free |= {"packed": found.packed, "fetch": found.fetch}
        if isinstance(config, SharedForward):
            assert occupancy <= config.hints.occupancy
        assert found == replace(config, **free), spec
    assert fused >= 20


@pytest.mark.parametrize("rows", [*ONE_ROW.values(), *SHARED.values()], ids=str)
def test_more_elements_of_a_thread_have_no_fewer_registers(rows):
    assert list(rows) == sorted(rows)
    assert [registers for _, registers in rows] == sorted(registers for _, registers in rows)


def spec_of(op: str, hidden: int, how: Quantization = ROW) -> NormSpec:
    return NormSpec.of(op, hidden, "bfloat16", weight="bfloat16", quantized=how)


def test_a_small_batch_has_the_hints_of_every_small_batch():
    """It has tiles for fewer blocks than fit, so that no registers have to be spared."""
    plan = plan_forward(spec_of("rms_norm", 2048), Target.of("sm_90"), False)
    small = replace(plan, small=True)
    assert plan.fetches
    assert small.hints == Hints(None, plan.config.hints.num_worker_warps)


def kernel(spec: NormSpec, arch: str) -> Call:
    """The norm's call, without clear_slots."""
    return calls_of(plan_forward(spec, Target.of(arch), False), 65537)[-1]


def test_the_plain_norm_has_no_array_of_a_quantisation():
    spec = spec_of("rms_norm", 4096)
    plain = kernel(replace(spec, quantized=None), "sm_90")
    assert len(plain.arguments[2]) == ForwardArrays._fields.index("slots") + 1
    taken = ForwardArrays._fields.index("inner_mean") + 1
    assert len(kernel(spec, "sm_90").arguments[2]) == taken
