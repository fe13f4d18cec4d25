"""out_dtype: the bits of the plain norm in another dtype, through what sees calls and graphs.

Its accuracy, its gradients and its bits in other layouts are drawn with those of all other calls:
see tests/support/drawn.py and drawing.py.
"""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import tilenorm
from tests.support.calls import (
    ADD,
    CALLS,
    NEEDS_GPU,
    RMS,
    call,
    called,
    each,
    leaves_of,
    name_of,
    op_arguments,
    random,
    same,
    slow,
    step,
    tensors_of,
    tensors_of_op,
)
from tests.support.cases import DTYPES, HIDDEN
from tests.support.executors import Inputs, Interpreter
from tests.support.pretended import pretended_gpu
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import TARGETS, Target
from tilenorm.ops.passes.bound import bound_of
from tilenorm.ops.torch_ops.library import AUTOCAST_NORMS
from tilenorm.spec import NormSpec
from tilenorm.table import OPS
from tilenorm.tools.specs import moved_bytes

B, H, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS_OF_IT = tuple(name for name, op in OPS.items() if "out_dtype" in op.options)
FORMS = {name: form for name, form in CALLS.items() if form.op in OPS_OF_IT}
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
# A layer scale takes no input that is wider than the residual, and dropout rounds to its dtype.
SUMS = {n: f for n, f in FORMS.items() if f.other == "residual" and not f.branch}
PAIRS = [(B, F32), (H, F32), (F32, B), (F32, H)]
# Rows that fill 16-byte vectors in both dtypes, in one and in none; tiles of several rows, and rows
# that blocks share.
SIZES = (1, 4, 12, 100, 513, 1024, *slow(2, 5, 8, 40, 1100, 4100, 5120, 16392, 20480))


@EACH
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype, out_dtype", PAIRS, ids=name_of)
def test_the_wider_output_rounded_is_the_narrower_one(form, dtype, out_dtype, hidden):
    """The kernels compute in float32 to the end. The sum of add_... keeps its dtype."""
    tensors = tensors_of(form, 3, hidden, dtype=dtype)
    with pretended_gpu():
        y, *total = call(form, tensors, out_dtype=out_dtype)
        plain, *plain_total = call(form, tensors)
    assert (y.dtype, plain.dtype) == (out_dtype, dtype)
    narrow = min(dtype, out_dtype, key=lambda d: d.itemsize)
    assert torch.equal(y.to(narrow), plain.to(narrow))
    assert all(map(torch.equal, total, plain_total))


@pytest.mark.parametrize("form", [RMS, ADD])
def test_the_reference_rounds_float32_once(form):
    tensors = tensors_of(form, 7, 100)
    for narrow in (B, H):
        y, *_ = call(form, tensors, out_dtype=narrow)
        assert torch.equal(y, call(form, tensors)[0].to(narrow))


@pytest.mark.parametrize("served", ["reference", "kernels"], indirect=True)
def test_early_rounding_rounds_the_product_once(way):
    x, w = random(5, 96, dtype=B), random(96, dtype=B, seed=1)
    y = tilenorm.rms_norm(x, (96,), w, rounding="early", out_dtype=F32)
    assert torch.equal(y, tilenorm.rms_norm(x, (96,)).float() * w.float())


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype, out_dtype", PAIRS, ids=name_of)
def test_statistics_are_those_without_it(norm, dtype, out_dtype):
    dtype, out_dtype = name_of(dtype), name_of(out_dtype)
    for hidden, more in product((4, 100, 1024), ({}, {"residual": "float32"})):
        spec = NormSpec(norm, hidden, dtype, dtype, **more)
        inputs = Inputs.random(spec, 5, "cpu")
        cast = Interpreter("sm_90").forward(replace(spec, out_dtype=out_dtype), inputs)
        plain = Interpreter("sm_90").forward(spec, inputs)
        assert same(cast | {"y": plain["y"]}, plain)


@pytest.mark.parametrize("arch", TARGETS)
def test_the_plan_cuts_rows_as_without_it(arch):
    kinds = product(("rms", "layer"), DTYPES, DTYPES, (None, "float32"), HIDDEN)
    for norm, dtype, out_dtype, residual, hidden in kinds:
        if dtype != out_dtype:
            spec = NormSpec(norm, hidden, dtype, dtype, residual=residual)
            plain = plan_forward(spec, Target.of(arch), True)
            plan = plan_forward(replace(spec, out_dtype=out_dtype), Target.of(arch), True)
            assert replace(plan, spec=spec) == plain
            assert (plan.cut, plan.order) == (plain.cut, plain.order)


@pytest.mark.parametrize("op", OPS_OF_IT)
def test_bytes_count_the_dtype_of_the_output_and_of_its_gradient(op):
    spec = NormSpec.of(op, 40, "bfloat16")
    cast = moved_bytes(replace(spec, out_dtype="float32"), 12)
    assert cast == tuple(moved + 2 * 12 * 40 for moved in moved_bytes(spec, 12))


def test_the_dtype_of_the_input_is_no_dtype_of_its_own():
    """Also where autocast has cast the input, and out_dtype asks for what it is cast to."""
    x = random(3, 8)
    options = OPS["rms_norm"], (x, None, None)
    specs = [bound_of(*options, (8, 0.0, "late", dtype), None).spec for dtype in (None, F32, B)]
    assert specs[0] == specs[1] == replace(specs[2], out_dtype=None) != specs[2]


@pytest.mark.parametrize("served", ["reference", "kernels"], indirect=True)
@pytest.mark.parametrize("form", [RMS, ADD])
@pytest.mark.parametrize("dtype, out_dtype", PAIRS, ids=name_of)
def test_compiled_calls_have_the_bits_of_eager_ones(form, dtype, out_dtype, way):
    torch._dynamo.reset()
    tensors = tensors_of(form, 5, 40, dtype=dtype, other=F32)
    run = torch.compile(called, fullgraph=True, backend="aot_eager")
    got, expected = (step(form, tensors, function=f, out_dtype=out_dtype) for f in (run, call))
    assert same(got, expected)
    assert {n: t.dtype for n, t in got.items()} == {
        **{n: t.dtype for n, t in tensors.items()},
        **dict(zip(("output", "sum"), (out_dtype, F32)[: 1 + (form is ADD)], strict=False)),
    }


@pytest.mark.parametrize("op", OPS_OF_IT)
@pytest.mark.parametrize("dtype, out_dtype", [*PAIRS[:1], *PAIRS[2:3], (F32, F64)], ids=name_of)
def test_opcheck(op, dtype, out_dtype):
    tensors = {n: t for n, t in tensors_of_op(op, dtype).items() if n != "addend"}
    given = leaves_of(tensors)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    overload = getattr(torch.ops.tilenorm, op).default
    opcheck(overload, op_arguments(op, given, 8, out_dtype=out_dtype), test_utils=utilities)


def test_single_operations_give_the_same_gradients():
    """As second derivatives have them made. dy has the dtype of the output."""
    tensors = leaves_of(tensors_of(ADD, 5, 40, dtype=B, other=F32, parameter=F32))
    y, _ = call(ADD, tensors, out_dtype=F32)
    of, dy = [*tensors.values()], random(5, 40, seed=9)
    plain, twice = (
        torch.autograd.grad(y, of, dy, retain_graph=True, create_graph=again)
        for again in (False, True)
    )
    for one, other, t in zip(plain, twice, of, strict=True):
        assert one.dtype == other.dtype == t.dtype
        bound = 2 * torch.finfo(t.dtype).eps
        torch.testing.assert_close(one, other, rtol=bound, atol=8 * bound)
    assert torch.autograd.grad(twice[0].float().sum(), of[0])[0].isfinite().all()


def test_forward_mode_and_transforms():
    x = random(5, 40, dtype=B)

    def function(x: Tensor) -> Tensor:
        return tilenorm.layer_norm(x, (40,), out_dtype=F32)

    y, dy = torch.func.jvp(function, (x,), (x,))
    assert y.dtype == dy.dtype == torch.func.vmap(function)(x).dtype == F32


def test_programs_keep_it():
    module, x = tilenorm.RMSNorm(40, dtype=B, out_dtype=F32), random(5, 40, dtype=B)
    expected = module(x)
    program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), expected)
    apart = program.run_decompositions(tilenorm.decompositions()).module()(x)
    torch.testing.assert_close(apart, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.jit.trace(module, x)(x), expected)


def test_kernels_write_no_float64():
    x = random(3, 8)
    with pretended_gpu():
        with pytest.warns(tilenorm.ReferenceWarning, match="out_dtype is float64; the kern"):
            assert tilenorm.rms_norm(x, (8,), out_dtype=F64).dtype == F64
        with pytest.raises(RuntimeError, match="out_dtype is float64"):
            tilenorm.rms_norm(x, (8,), out_dtype=F64, backend="cutile")


@pytest.mark.parametrize("op", sorted(OPS.keys() - {*OPS_OF_IT}))
def test_other_functions_do_not_take_it(op):
    with pytest.raises(TypeError, match="out_dtype"):
        getattr(tilenorm, op)(out_dtype=F32)


@NEEDS_GPU
@EACH
def test_autocast_gives_the_dtype_that_is_asked_for(form):
    tensors = tensors_of(form, 5, 40, dtype=B, device="cuda")
    casts = OPS[form.op].norm in AUTOCAST_NORMS and form.other != "residual"
    with torch.autocast("cuda", B):
        y, *_ = call(form, tensors, out_dtype=B)
    wide = {"input": tensors["input"].float()} if casts else {}
    assert torch.equal(y, call(form, tensors | wide, out_dtype=B)[0])


@each(SUMS)
@pytest.mark.parametrize("hidden", [24, 100, 1536])
def test_a_sum_does_not_need_the_cast_that_autocast_makes(form, hidden):
    """Under autocast a norm of a sum asks for a float32 output, and leaves its input as it is."""
    tensors = tensors_of(form, 3, hidden, dtype=B)
    wide = tensors | {"input": tensors["input"].float()}
    with pretended_gpu():
        results, cast = (step(form, t, out_dtype=F32) for t in (tensors, wide))
    assert torch.equal(results["sum"], cast["sum"])
    cast["input"] = cast["input"].to(B)
    torch.testing.assert_close(results, cast)


@NEEDS_GPU
@EACH
@pytest.mark.parametrize("dtype, out_dtype", PAIRS, ids=name_of)
def test_bits_on_a_gpu(form, dtype, out_dtype):
    """Of compiled kernels, for rows that fill 16-byte vectors: their plans prescribe the order.

    Each form has four of the sizes, because compiling takes half a second a kernel.
    """
    narrow, wrong = min(dtype, out_dtype, key=lambda d: d.itemsize), []
    drawn = Random(f"{form} {dtype} {out_dtype}")
    for hidden in drawn.sample((8, 40, 104, 384, 1000, 1024, 1536, 4096, 5120, 8192), 4):
        tensors = tensors_of(form, 67, hidden, dtype=dtype, device="cuda")
        y, plain = call(form, tensors, out_dtype=out_dtype)[0], call(form, tensors)[0]
        if not torch.equal(y.to(narrow), plain.to(narrow)):
            wrong.append(hidden)
    assert not wrong
