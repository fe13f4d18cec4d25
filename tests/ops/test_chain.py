"""A norm, an addition and a norm as one call, which rounds where the two functions do."""

from random import Random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tilenorm
from tests import layouts
from tilenorm.launch import kernel
from tilenorm.launch.plan import chain_refused, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import calls_of, compile_call

from .helpers import random
from .pretended import by

B, H, F, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = ((B, B), (F, F), (H, H), (B, F), (F, B), (D, D))
SERVED = ("reference", "sm_90", "sm_100")
chain = tilenorm.rms_norm_add_rms_norm


def apart(input, residual, shape, weight=None, next_weight=None, eps=None, **options):
    total = tilenorm.rms_norm_add(input, residual, shape, weight, eps, **options)
    return tilenorm.rms_norm(total, shape, next_weight, eps, **options), total


def made(*shape, dtypes=(B, B), weights=(B, F)):
    rows = [random(*shape, dtype=d, seed=i) for i, d in enumerate(dtypes)]
    return rows, [random(shape[-1], dtype=d, seed=7 + i) for i, d in enumerate(weights)]


def compare(found, expected, equal=True):
    """Sums in another order move a number by a unit in the last place, or in that of the sum."""
    for one, other in zip(found, expected, strict=True):
        bound = 0.0 if equal else 4 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.fixture
def passes(monkeypatch):
    """What was launched in one pass."""
    found, bind = [], cutile.bind_forward

    def bound(plan, *arguments):
        run = bind(plan, *arguments)
        return (lambda *a: found.append(a) or run(*a)) if plan.spec.inner else run

    monkeypatch.setattr(cutile, "bind_forward", bound)
    return found


@pytest.mark.parametrize("served", SERVED)
def test_drawn_calls(served, passes):
    rng = Random(served)
    with by(served):
        for dtypes in DTYPES:
            hidden = rng.choice((7, 40, 128, 1024))
            shape = rng.choice(((1, hidden), (5, hidden), (2, 3, hidden), (0, hidden)))
            weights = rng.choice(dtypes), rng.choice((H, F))
            rows, parameters = made(*shape, dtypes=dtypes, weights=weights)
            if shape[0]:
                rows[0] = layouts.draw(rng, shape, False).filled(rows[0])
            parameters = [rng.choice((w, w, None)) for w in parameters]
            eps, offset = rng.choice((None, 1e-3)), rng.choice((0.0, 1.0))
            options = {"offset": offset, "rounding": rng.choice(("late", "early"))}
            arguments = *rows, (hidden,), *parameters, eps
            found, expected = chain(*arguments, **options), apart(*arguments, **options)
            assert all(t.dtype == dtypes[1] and t.is_contiguous() for t in found)
            compare(found, expected, equal=served == "reference")


@pytest.mark.parametrize(
    "arch, hidden", [("sm_90", 128), ("sm_90", 2304), ("sm_100", 40), ("sm_100", 5376)]
)
@pytest.mark.parametrize("save", [False, True])
def test_one_pass(arch, hidden, save, passes):
    rows, weights = made(3, hidden)
    if save:
        rows[0].requires_grad_()
    with by(arch):
        found = chain(*rows, (hidden,), *weights, rounding="early")
        expected = apart(*rows, (hidden,), *weights, rounding="early")
        again = [t.detach() for t in chain(*rows, (hidden,), *weights, rounding="early")]
    assert len(passes) == 2
    assert all(map(torch.equal, found, again))
    compare(found, expected, equal=False)


def test_a_kernel_that_does_not_compile(monkeypatch):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise kernel.CompileError("no")

    rows, weights = made(3, 40)
    with by("sm_100"):
        expected = apart(*rows, (40,), *weights)
        bind = cutile.bind_forward
        monkeypatch.setattr(
            cutile, "bind_forward", lambda plan, run: fail if plan.spec.inner else bind(plan, run)
        )
        for _ in range(2):
            assert all(map(torch.equal, chain(*rows, (40,), *weights), expected))
    assert len(calls) == 1


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients(served, used):
    rows, weights = made(5, 40, dtypes=(F, F), weights=(F, F))
    leaves = [t.requires_grad_() for t in (*rows, *weights)]
    grads = []
    with by(served):
        for function in (chain, apart):
            outputs = [function(*rows, (40,), *weights, offset=1.0)[i] for i in used]
            dys = [random(5, 40, dtype=F, seed=20 + i) for i in used]
            grads.append(torch.autograd.grad(outputs, leaves, dys, allow_unused=True))
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if len(used) == 1 and one is not None and served == "reference":
            assert torch.equal(one, other)
        elif one is not None:
            torch.testing.assert_close(one, other)


def test_second_derivatives_and_transforms():
    rows, weights = made(2, 5, dtypes=(D, D), weights=(D, D))
    inputs = [t.requires_grad_() for t in (*rows, *weights)]

    def function(x, residual, weight, next_weight):
        return chain(x, residual, (5,), weight, next_weight, 1e-3)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    mapped = torch.func.vmap(function, (0, 0, None, None))(*inputs)
    for one, other in zip(mapped, function(*inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_op():
    rows, weights = made(3, 8, weights=(B, B))
    rows[0].requires_grad_()
    arguments = (*rows, *weights, 8, 1.0, "late", 1e-6, 1e-6, True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.tilenorm.rms_norm_add_rms_norm, arguments, test_utils=utilities)
    traced = make_fx(lambda *t: chain(*t[:2], (8,), *t[2:]))(*rows, *weights)
    assert torch.ops.tilenorm.rms_norm_add_rms_norm.default in [
        n.target for n in traced.graph.nodes
    ]
    assert all(map(torch.equal, traced(*rows, *weights), chain(*rows, (8,), *weights)))


@pytest.mark.slow
def test_op_with_symbolic_sizes():
    rows, weights = made(3, 8, weights=(B, B))
    arguments = (*(t.requires_grad_() for t in (*rows, *weights)), 8, 1.0, "late", 1e-6, 1e-6, True)
    opcheck(torch.ops.tilenorm.rms_norm_add_rms_norm, arguments)


def test_compiled_without_a_graph_break():
    rows, weights = made(3, 8, weights=(B, B))
    function = torch.compile(chain, fullgraph=True, backend="aot_eager")
    found, expected = function(*rows, (8,), *weights), chain(*rows, (8,), *weights)
    assert all(map(torch.equal, found, expected))
    rows[0].requires_grad_()
    y, total = function(*rows, (8,), *weights)
    other, same = chain(*rows, (8,), *weights)
    for loss in ((y, other), (total, same)):
        grads = [torch.autograd.grad(t.sum(), rows[0], retain_graph=True)[0] for t in loss]
        assert torch.equal(*grads)


def test_symbolic_trace_and_nested_tensors():
    rows, weights = made(4, 8)
    traced = torch.fx.symbolic_trace(lambda a, b: chain(a, b, (8,)))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [chain]
    offsets = torch.tensor([0, 1, 4])
    nested = [torch.nested.nested_tensor_from_jagged(t, offsets) for t in rows]
    found, expected = chain(*nested, (8,), *weights), chain(*rows, (8,), *weights)
    assert all(torch.equal(f.values(), e) for f, e in zip(found, expected, strict=True))


def spec_of(hidden: int, dtype: str = "bfloat16") -> NormSpec:
    before = NormSpec("rms", hidden, dtype, dtype, offset=1.0, skip=dtype)
    return NormSpec.chained(before, NormSpec("rms", hidden, dtype, dtype, offset=1.0))


def test_what_one_pass_refuses():
    for arch, hidden, reason in (
        ("sm_100", 1024, None),
        ("sm_90", 128, None),
        ("sm_100", 2304, None),
        ("sm_90", 5376, None),
        ("sm_90", 65536, "blocks share a row"),
    ):
        found = chain_refused(spec_of(hidden), Target.of(arch))
        assert found is None if reason is None else reason in found


def test_explained(capsys):
    rows, weights = made(3, 40)
    found = tilenorm.explain("rms_norm_add_rms_norm", *rows, (40,), *weights)
    assert (found.before.spec.skip, found.after.spec.weight) == ("bfloat16", "float32")
    assert found.refused in capsys.readouterr().out


SLOW = pytest.mark.slow
COMPILED = [pytest.param("sm_100", 1024)]
COMPILED += [
    pytest.param(arch, n, marks=SLOW)
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120")
    for n in (128, 2048, 2304, 3584, 4096, 5376)
]


@pytest.mark.parametrize("arch, hidden", COMPILED)
def test_compiles_without_spills(arch, hidden):
    call = calls_of(plan_forward(spec_of(hidden), Target.of(arch), True), 65537)[-1]
    assert compile_call(call, arch).spill_bytes == 0
