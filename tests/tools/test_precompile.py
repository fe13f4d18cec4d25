"""Compiling ahead uses every CPU that the process may use, and leaves nothing for a first step."""

import os
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.support import cases, stand_in_driver
from tests.support.calls import EACH_FORM, call, slow, spec_of, tensors_of
from tests.support.executors import backward_calls, forward_calls
from tests.support.pretended import pretended_gpu
from tests.support.quantized import HOWS
from tilenorm.launch.calls import bound, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec
from tilenorm.tools import precompile
from tilenorm.tools.precompile import (
    calls_of,
    signature,
    training_calls,
)

H200 = Target.of("sm_90")


def test_as_many_processes_as_cpus_and_no_more_than_work(monkeypatch):
    started = []

    def pool(processes, *_):
        started.append(processes)
        return nullcontext(SimpleNamespace(map=map))

    monkeypatch.setattr(precompile, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    for work in ([-1, 2, -3, 4], [-1, 2], [-1]):
        with precompile.compiling(abs, work, None) as results:
            assert list(results) == [abs(n) for n in work]
    assert started == [3, 2]


def test_each_spec_has_its_own_kernels(monkeypatch):
    monkeypatch.setattr(precompile, "_compile_nth", lambda item: item[0].hidden)
    specs = [NormSpec("rms", n, "bfloat16") for n in (64, 128)]
    assert [set(found) for found in precompile.precompile(specs, H200, 1)] == [{64}, {128}]


def keys(calls) -> set[str]:
    return {f"{id(c.kernel)} {signature(c.kernel, c.arguments).symbol}" for c in calls}


@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 4))])
def test_drawn_groups_compile_nothing_new(seed):
    rng, target = Random(seed), Target.of(list(MULTIPROCESSORS)[seed % len(MULTIPROCESSORS)])
    dtype, hidden = rng.choice(cases.DTYPES), rng.choice((64, 1152, 3072, rng.randint(1, 8192)))
    fields = {"mod_scale": dtype, "mod_shift": rng.choice((None, dtype))}
    fields |= rng.choice(({}, {"weight": dtype}, {"residual": dtype, "mod_gate": dtype}))
    spec = NormSpec(rng.choice(("rms", "layer")), hidden, dtype, **fields)
    ahead = keys(training_calls(spec, target))
    plan = plan_backward(spec, target, every_gradient(spec))
    for most in (3, 40, 300, 3000, 30000) * 4:
        groups, tokens = rng.randint(1, most), rng.choice((1, 16, 256, rng.randint(1, 4500)))
        calls = calls_of(plan, groups * tokens, groups)
        for save in (False, True):
            calls += calls_of(plan_forward(spec, target, save), groups * tokens, groups)
        assert keys(calls) <= ahead, (groups, tokens)


@pytest.mark.parametrize("seed", [*range(9), *slow(*range(9, 15))])
def test_a_drawn_step_compiles_nothing_new(seed):
    rng, target = Random(seed), Target.of(list(MULTIPROCESSORS)[seed % len(MULTIPROCESSORS)])
    dtype, hidden = rng.choice(cases.DTYPES), rng.choice((rng.randint(1, 3000), *cases.HIDDEN))
    spec = NormSpec(hidden=hidden, dtype=dtype, **rng.choice(cases.variants(dtype)))
    every, heads = every_gradient(spec), spec.heads or 1
    terms, output = rng.choice((((1,), False), ((1, 2, 3), True)))
    ahead = keys(training_calls(spec, target, terms, output))
    drawn = rng.randint(1, 70000), rng.randint(1, 1 << 20)
    for rows in (1, 2, 15, 16, 17, 32, 127, 1000, 4096, 5000, 65536, *drawn):
        rows, again = rows * heads, output and rng.choice((False, True))
        needs = every._replace(terms=rng.choice(terms), output=again and not spec.output_refused)
        if len(terms) > 1:
            needs = needs._replace(dsum=rng.choice((False, True)))
        calls = backward_calls(spec, target, rows, needs)
        calls += [c for save in (False, True) for c in forward_calls(spec, target, rows, save)]
        assert keys(calls) <= ahead, (rows, needs)


@pytest.fixture
def launched():
    """What ops launch, as on a GPU. Nothing runs."""
    calls = []

    def launch(stream, launches, arrays):
        calls.extend(bound(launches, arrays))

    with pretended_gpu("sm_90"), patch.object(cutile, "launch", launch):
        yield calls


@EACH_FORM
def test_an_op_launches_what_is_compiled_ahead(form, launched):
    tensors = {name: t.requires_grad_() for name, t in tensors_of(form, 5, 64).items()}
    outputs = call(form, tensors)
    torch.autograd.grad(outputs, list(tensors.values()), [torch.ones_like(y) for y in outputs])
    ahead = training_calls(spec_of(form, tensors), cases.target("sm_90"))
    assert launched and keys(launched) <= keys(ahead)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_quantised_norm_compiles_nothing_new(how):
    """There is no training without an output that has a gradient."""
    spec = NormSpec("rms", 1024, "bfloat16", "bfloat16", quantized=how)
    made = training_calls(spec, H200)
    kernels = {"row_forward", "norm_backward", "column_sum"} if how.output else {"row_forward"}
    assert {call.kernel._pyfunc.__name__ for call in made} == kernels
    for save in (False, True) if how.output else (False,):
        for rows in (1, 2, 3, 8, 16, 100, 128, 130, 4097, 65536, 1 << 22):
            assert keys(forward_calls(spec, H200, rows, save)) <= keys(made), rows


# Drawn arrays, and every other kind of argument. test_driver.py has the arguments of kernels.
PROGRAM = """
from random import Random
import cuda.tile as ct
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature
from tests.support.stand_in_driver import arrays_of
from tilenorm.tools.precompile import signature

@ct.kernel
def kernel(X, n: int, eps: float, N: ct.Constant[int], WIDTHS: ct.Constant[tuple[int, ...]]):
    pass

convention, rng, symbols = CallingConvention.cutile_python_v2(), Random(0), set()
for _ in range(300):
    dtype = rng.choice((torch.float16, torch.float32, torch.int32, torch.uint8))
    shape = rng.choice((1, 5, 16)), rng.choice((1, 9, 16, 48))
    # Rows that are contiguous, apart, in whole vectors or not, and that share elements; columns.
    strides = rng.choice(((shape[1], 1), (64, 1), (60, 1), (50, 1), (8, 1), (1, 16), (1, 5)))
    start = rng.choice((0, 0, 1, 4))
    x = torch.empty(1000 + start, dtype=dtype, device="meta").as_strided(shape, strides, start)
    arguments = x, 5, 1e-6, 9, (8, 1)
    expected = KernelSignature.from_kernel_args(kernel, arrays_of(arguments), convention)
    found = signature(kernel, arguments)
    assert found.parameters == expected.parameters, arguments
    symbols.add(found.symbol)
assert len(symbols) > 50
"""


def test_agrees_with_cutile(tmp_path):
    stand_in_driver.check(PROGRAM, tmp_path)
