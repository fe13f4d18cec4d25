"""One row, one result: every norm of rows of one kind, size and dtype adds up a row in one order.

The interpreter and a GPU show that equal orders give equal bits: tests/ops/test_one_result.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from random import Random

import pytest

from tests.support import cases, drawing
from tests.support.executors import backward_calls, forward_calls
from tests.support.one_result import one_result
from tests.support.quantized import HOWS
from tilenorm.kernels.backward import norm_backward
from tilenorm.launch import heuristics
from tilenorm.launch.calls import Call, Needs, constants_of, every_gradient
from tilenorm.launch.config import Served
from tilenorm.launch.order import RowOrder, order_by_slices, prescribed, slices_of
from tilenorm.launch.plan import ForwardPlan, plan_backward, plan_forward
from tilenorm.launch.target import TARGETS, Target
from tilenorm.launch.tuned.tables import TABLES
from tilenorm.spec import ITEM_BYTES, NormSpec
from tilenorm.table import MODULATED_NORMS, NORMS
from tilenorm.tools.dev import digests

KINDS = ("rms", "layer")
APART = ("gated_", "modulated_")  # have orders of their own without TILENORM_ONE_RESULT
SEEDS = 40
DRAWS = 6  # of each op, size and dtype
QUICK = {*cases.INTERPRETED, *TABLES}
each_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(Target.of(name), id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name in TARGETS
    ],
)


def forms(rng: Random, norm: str, hidden: int, dtype: str, apart: bool) -> Iterator[NormSpec]:
    """Specs of every op that normalises rows of a dtype: all their other fields are drawn. apart:
    those of APART alone, else all others.
    """
    ops = [op for op in (*NORMS, *MODULATED_NORMS) if f"{norm}_norm" in op]
    for op in ops:
        if op.startswith(APART) != apart:
            continue
        for _ in range(DRAWS):
            spec = drawing.spec(rng, op, rng.choice(drawing.DTYPES), hidden)
            spec = replace(spec, **{"residual" if spec.residual else "dtype": dtype})
            before = spec.gate_first and ITEM_BYTES[spec.gate] != spec.item_bytes
            if spec.unserved or before:  # such a gate before the norm has orders of its own
                continue
            yield spec
            if not (spec.skip or spec.branches or spec.modulated):
                yield replace(spec, quantized=rng.choice(HOWS))
    if apart:
        return
    weight, bias = rng.choice((None, dtype)), dtype if norm == "layer" else None
    plain = NormSpec(norm, hidden, dtype, weight=weight, bias=bias)
    yield NormSpec.chained(replace(plain, skip=dtype), plain)


def drawn(seed: int, target: Target, apart: bool = False) -> tuple[NormSpec, list[NormSpec]]:
    """A plain norm, and norms of the same rows whose tensors all fill vectors."""
    rng = Random(f"{seed} {target.name}")
    norm, dtype = rng.choice(KINDS), rng.choice(drawing.DTYPES)
    hidden = 8 * drawing.size(rng, cases.MAX_HIDDEN // 8)
    plain = NormSpec(norm, hidden, dtype, weight=dtype)
    return plain, [spec for spec in forms(rng, norm, hidden, dtype, apart) if spec.aligned]


@each_target
def test_every_norm_of_a_row_has_one_order(target):
    for seed in range(SEEDS):
        plain, specs = drawn(seed, target)
        expected = plan_forward(plain, target, False).order
        assert expected.prescribes
        for spec, save in product(specs, (False, True)):
            assert plan_forward(spec, target, save).order == expected, (spec, save)


@each_target
def test_every_gated_and_modulated_norm_has_the_order_of_the_plain_norm(target):
    """Where TILENORM_ONE_RESULT asks for it."""
    with one_result():
        for seed in range(SEEDS):
            plain, specs = drawn(seed, target, apart=True)
            expected = plan_forward(plain, target, False).order
            for spec, save in product(specs, (False, True)):
                assert plan_forward(spec, target, save).order == expected, (spec, save)


def requests(rng: Random, spec: NormSpec) -> Needs:
    """Which gradients of a norm are asked for, dx among them, of some terms of dy."""
    every = every_gradient(spec)
    names = ("dw", "db", "dresidual", "dsum")
    some = {name: getattr(every, name) and rng.choice((True, False)) for name in names}
    output = not spec.output_refused and rng.choice((True, False))
    return every._replace(**some, dx=True, terms=rng.randint(1, 4), output=output)


def of_gradients(seed: int, target: Target) -> Iterator[tuple[NormSpec, Needs]]:
    """A plain norm, and norms of the same rows, whose dx has one order."""
    plain, specs = drawn(seed, target)
    yield plain, Needs(True)
    rng = Random(seed)
    for spec in specs:
        if spec.differentiable and not (spec.inner or spec.modulated):
            yield spec, requests(rng, spec)


@each_target
def test_every_gradient_of_a_row_has_one_order(target):
    """dx is added up alike with and without a residual, whichever gradients are asked for."""
    with one_result():
        for seed in range(SEEDS):
            orders = set()
            for spec, needs in of_gradients(seed, target):
                plan = plan_backward(spec, target, needs)
                served = Served(spec.hidden, spec.widest_item, spec.aligned, target)
                assert not plan.config.refusal(served), spec
                assert plan.chunks <= plan.resident, spec
                orders.add(order_by_slices(spec, plan.config))
            assert len(orders) == 1, spec


@each_target
def test_kernels_of_gradients_have_their_order(target):
    with one_result():
        for seed in range(SEEDS):
            spec, needs = Random(seed).choice(list(of_gradients(seed, target)))
            expected = prescribed(spec, target, backward=True)
            assert_ordered(expected, spec, backward_call(spec, target, needs))


def backward_call(spec: NormSpec, target: Target, needs: Needs) -> Call:
    """The launch of norm_backward."""
    calls = backward_calls(spec, target, 1000 * (spec.heads or 1), needs)
    return next(call for call in calls if call.kernel._pyfunc is norm_backward._pyfunc)


@each_target
def test_without_the_setting_nothing_else_is_chosen(target, monkeypatch):
    """Backward passes, gates and modulated norms have the configurations of tables and rules that
    know no order.
    """
    asked = []
    with one_result(False):
        for seed in range(SEEDS):
            apart = drawn(seed, target, apart=True)[1][::5]
            asked += [(spec, None) for spec in apart]
            gated = [spec for spec in apart if spec.gate]
            for spec, needs in (*of_gradients(seed, target), *((s, Needs(True)) for s in gated)):
                asked.append((spec, needs))
                call = backward_call(spec, target, needs)
                assert constants_of(call.kernel, call.arguments)["THREADS"] == 0, spec
        chosen = [heuristics.chosen(spec, target, needs) for spec, needs in asked]
    with one_result():
        monkeypatch.setattr(heuristics, "keeps_order", lambda *_: True)
        for rule in ("forward_rule", "backward_rule"):
            monkeypatch.setattr(heuristics, rule, lambda *_: None)
        assert chosen == [heuristics.chosen(spec, target, needs) for spec, needs in asked]


@each_target
def test_architectures_share_their_orders(target):
    """The order is the same on every architecture, whatever its table."""
    for seed in range(20):
        plain, _ = drawn(seed, Target.of("sm_90"))
        orders = [plan_forward(plain, t, True).order for t in (target, Target.of("sm_90"))]
        assert orders[0] == orders[1], plain


@each_target
def test_the_kernels_have_the_order_of_their_plan(target):
    """In small and in large batches: the constants and the block of what is launched."""
    for spec in chain.from_iterable(drawn(seed, target)[1][::17] for seed in range(SEEDS)):
        plan = plan_forward(spec, target, True)
        assert isinstance(plan, ForwardPlan)
        for rows in (1, 100_000):
            call = forward_calls(spec, target, rows * (spec.heads or 1), True)[-1]
            assert_ordered(plan.order, spec, call)


def assert_ordered(order: RowOrder, spec: NormSpec, call: Call) -> None:
    """The constants of a kernel, and its block, prescribe an order."""
    found = constants_of(call.kernel, call.arguments)
    threads = 32 * (call.kernel._compiler_options.num_worker_warps or 4)
    assert found["THREADS"] == threads and found["ALIGNED"]
    unit = 16 // ITEM_BYTES[spec.residual or spec.dtype]
    slices = slices_of(found["WIDTHS"], found["ROWS"], threads, unit)
    assert slices == order.slices
    assert (found["CHUNKS"] > 1) == bool(order.chunk)


@pytest.mark.parametrize("name", TABLES)
def test_every_configuration_of_a_table_has_the_order(name):
    """Else the planner would pass over it."""
    for (op, size), rows in TABLES[name].forward.items():
        for hidden, config in rows:
            spec = digests.spec_of(op, hidden, {2: "bfloat16", 4: "float32"}[size])
            rule = prescribed(spec, Target.of(name), backward=False)
            assert config is None or rule is None or order_by_slices(spec, config) == rule, spec


def test_a_users_configuration_of_another_order_does_not_serve(monkeypatch):
    from tilenorm.launch import user_table
    from tilenorm.launch.config import Hints, RowForward

    target = Target.of("sm_90")
    spec = NormSpec("rms", 4096, "bfloat16", "bfloat16")
    key = user_table.Key.of(spec, "forward", "rms_norm")
    serves = RowForward(1, Hints(2), (1024,) * 4)
    other = RowForward(1, Hints(2, 8), (4096,))
    for config, used in ((serves, True), (other, False)):
        monkeypatch.setattr(user_table, "configs", lambda arch, config=config: {key: config})
        assert (heuristics.chosen(spec, target) == config) is used
        assert ("user" in heuristics.source(spec, target)) is used


@pytest.mark.parametrize(
    "widths, rows, threads, expected",
    [
        ((4096,), 1, 128, [(0, 1024, 8)]),
        ((1024,) * 4, 1, 128, [(0, 1024, 8)]),
        ((2048, 1024), 1, 128, [(0, 1024, 8)]),
        ((1024,) * 4, 1, 256, [(0, 1024, 4)]),
        ((1024, 512), 1, 128, [(0, 1024, 8), (1024, 512, 4)]),
        ((512,) * 3, 2, 128, [(0, 512, 8)]),
        ((8,), 256, 128, [(0, 8, 8)]),
        ((64,), 4, 128, [(0, 64, 2)]),
    ],
)
def test_slices(widths, rows, threads, expected):
    assert list(slices_of(widths, rows, threads, 8)) == expected
