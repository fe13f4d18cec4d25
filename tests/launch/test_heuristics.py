"""The tables are well formed, and every size gets a configuration that can serve it."""

from dataclasses import replace
from itertools import chain, pairwise, product
from random import Random

import pytest

from tests.support import cases
from tilenorm.launch import heuristics
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.config import Config, Served
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.launch.tuned.tables import TABLES
from tilenorm.spec import ITEM_BYTES, NormSpec
from tilenorm.table import NORMS, OPS
from tilenorm.tools.candidates import Search, explicit
from tilenorm.tools.dev import digests

TABLE_LIST = [
    pytest.param(arch, direction, key, table, id=f"{arch}-{direction}-{key}")
    for arch, tables in TABLES.items()
    for direction in cases.DIRECTIONS
    for key, table in getattr(tables, direction).items()
]
each_table = pytest.mark.parametrize("arch, direction, key, table", TABLE_LIST)
UNEVEN_LIST = [
    pytest.param(arch, direction, key, id=f"{arch}-{direction}-{key}")
    for arch, tables in TABLES.items()
    for direction in cases.DIRECTIONS
    for key in getattr(tables, f"{direction}_uneven")
]
DTYPE = {2: "bfloat16", 4: "float32"}
REGIMES = [
    pytest.param(
        *(direction, arch, dtype, aligned),
        id=f"{arch}-{direction}-{dtype}-{aligned}",
        marks=() if arch in cases.INTERPRETED else pytest.mark.slow,
    )
    for number, (arch, direction) in enumerate(product(MULTIPROCESSORS, cases.DIRECTIONS))
    for dtype, aligned in product(DTYPE.values(), (True, False))
    # Of architectures that the interpreter does not plan for, one kind of rows each, in turn.
    if arch in cases.INTERPRETED or number % 4 == 2 * (dtype == "float32") + aligned
]


def spec_of(hidden: int, key: tuple[str, int]) -> NormSpec:
    """A spec that a table's key serves."""
    op, size = key
    return digests.spec_of(op, hidden, DTYPE[size])


def check(config: Config, spec: NormSpec, target: Target) -> None:
    """tests/tools/test_search.py tests what a configuration refuses."""
    served = Served(spec.hidden, spec.widest_item, spec.aligned, target)
    assert config.refusal(served) is None, (config, spec)


@pytest.mark.parametrize("op, differs", [("gated_rms_norm", True), ("rms_norm", False)])
def test_a_machine_has_rows_of_its_own_beside_those_of_its_architecture(op, differs):
    spec = digests.spec_of(op, 1024, "bfloat16")
    one, other = (cases.config("forward", spec, Target.of(n)) for n in ("sm_90", "sm_90_H100"))
    assert (one != other) == differs


@pytest.mark.parametrize("arch", TABLES)
def test_tables_have_every_norm_without_a_gate_in_every_item_size(arch):
    ops = [op for op in NORMS if not op.startswith("gated") and not op.endswith("_add")]
    known = {*OPS, "gate_first", *(f"add_{op}" for op in OPS if op.startswith("modulated"))}
    for table in (TABLES[arch].forward, TABLES[arch].backward):
        assert {(op, size) for op in ops for size in DTYPE} <= set(table)
        assert {op for op, _ in table} <= known


@each_table
def test_the_planner_returns_what_the_table_has(arch, direction, key, table):
    target, largest = Target.of(arch), [n for n, _ in table]
    assert largest == sorted(set(largest)) and largest[-1] == cases.MAX_HIDDEN
    assert all(n * key[1] % 16 == 0 for n in largest)
    starts = [32] + [n + 16 // key[1] for n, _ in table]
    for first, (last, config) in zip(starts, table, strict=False):
        specs = [spec_of(hidden, key) for hidden in (first, last)]
        for_first, for_last = (cases.config(direction, spec, target) for spec in specs)
        if config is None:
            needs = None if direction == "forward" else every_gradient(specs[1])
            found = heuristics.source(specs[1], target, needs)
            other = heuristics.shipped_op(specs[1], key[0])
            if len(heuristics.operations(specs[1], needs)) == 1:
                assert "untimed" in found or (other != key[0] and found.endswith(other))
            continue
        assert for_last == config
        tried = Search(specs[1], target, direction).candidates()
        assert explicit(config, last) in tried, "what tuning would not try"
        if for_first in [other for _, other in uneven_rows(arch, direction, key)]:
            assert config.ends_within_a_chunk(first)
            continue
        # The narrowest row may not reach its last segments.
        widths = for_first.widths
        assert for_first == (config if widths is None else replace(config, widths=widths))
        assert widths is None or config.widths[: len(widths)] == widths


def uneven_rows(arch: str, direction: str, key: tuple[str, int]) -> tuple:
    return getattr(TABLES[arch], f"{direction}_uneven").get(key, ())


@pytest.mark.parametrize("arch, direction, key", UNEVEN_LIST)
def test_rows_that_end_within_a_chunk(arch, direction, key):
    """Of drawn sizes, such a table serves those whose last chunk is not full, whatever is asked
    for. It serves no others.
    """
    target, rng, unit = Target.of(arch), Random(f"{key}"), 16 // key[1]
    table = getattr(TABLES[arch], direction)[key]
    rows, previous = uneven_rows(arch, direction, key), 0
    assert [n for n, _ in rows] == sorted({n for n, _ in rows})
    for most, config in rows:
        uneven, even = [], []
        for hidden in (most, *(unit * rng.randint(1, most // unit) for _ in range(400))):
            own = next(c for n, c in table if hidden <= n)
            kind = uneven if hidden > previous and own.ends_within_a_chunk(hidden) else even
            kind.append((spec_of(hidden, key), own))
        assert len(uneven) > 40 and even
        tried = Search(spec_of(most, key), target, direction).candidates()
        assert config in [explicit(c, most) for c in tried], "what tuning would not try"
        for spec, own in uneven:
            every = [None if direction == "forward" else every_gradient(spec)]
            if direction == "backward":
                y = spec.output_refused is None
                every.append(every[0]._replace(terms=rng.randint(1, 4), output=y))
            check(config, spec, target)
            assert own != config
            assert {heuristics.chosen(spec, target, needs) for needs in every} == {config}
        for spec, own in even:
            assert cases.config(direction, spec, target) != config or own == config
        previous = most


@pytest.mark.parametrize("arch", TABLES)
def test_configurations_for_several_terms_and_for_y(arch):
    """Each is for a size of the table, and serves so many terms, but not one alone. More terms it
    serves unless a later one does."""
    target = Target.of(arch)
    for key, rows in TABLES[arch].more.items():
        sizes = dict(TABLES[arch].backward[key])
        for hidden, terms, output, config in rows:
            spec = spec_of(hidden, key)
            every = every_gradient(spec)
            check(config, spec, target)
            assert heuristics.chosen(spec, target, every) == sizes[hidden] != config
            assert (terms, output) != (1, False) and terms <= 3
            for more in {terms, 4}:
                needs = every._replace(terms=more, output=output)
                fits = [
                    c for n, least, y, c in rows if n == hidden and least <= more and y <= output
                ]
                assert heuristics.chosen(spec, target, needs) == fits[-1]
                assert more > terms or fits[-1] == config
                assert heuristics.source(spec, target, needs) == f"tuned/{arch}, untimed"
            assert not output or spec.output_refused is None


@pytest.mark.parametrize("direction, arch, dtype, aligned", REGIMES)
def test_every_configuration_can_serve_its_sizes(direction, arch, dtype, aligned):
    target, ranges = Target.of(arch), cases.regimes(direction, arch, dtype, aligned)
    step = 16 // ITEM_BYTES[dtype] if aligned else 2
    ends = (step if aligned else 1, cases.MAX_HIDDEN - (not aligned))
    assert (ranges[0][0], ranges[-1][1]) == ends
    assert all(b[0] == a[1] + step for a, b in pairwise(ranges))
    for hidden, fields in product(chain(*ranges), cases.tabled(dtype)):
        spec = NormSpec(**{"norm": "rms", "hidden": hidden, "dtype": dtype, **fields})
        check(cases.config(direction, spec, target), spec, target)
