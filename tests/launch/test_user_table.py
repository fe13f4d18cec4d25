"""Plans read the tables that were written, and ignore tables that are invalid here."""

import json
import warnings
from dataclasses import replace
from random import Random

import pytest

from tests.support import cases
from tilenorm.launch import heuristics, user_table
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.config import Backward, Hints, RowForward, SharedForward, StreamForward
from tilenorm.launch.target import Target
from tilenorm.launch.tuned import tables
from tilenorm.launch.user_table import Entry, Key, TableWarning
from tilenorm.spec import NormSpec
from tilenorm.tools.candidates import Search
from tilenorm.tools.dev import shipped

H200 = Target.of("sm_90")
SPEC = NormSpec("rms", 4096, "bfloat16", "bfloat16")
HEADS = replace(SPEC, heads=8)
NEEDS = every_gradient(SPEC)
FORWARD = StreamForward(1, Hints(3, 4), (2048, 2048), tma=True, store=True)
BACKWARD = Backward((4096,), hints=Hints(2, 8))
SHARED = SharedForward(Hints(6), (8192,), packed=True)


def entry(config, spec=SPEC, op=None, terms=1, **fields) -> Entry:
    measured = Entry(
        Key.of(spec, config.direction, op or spec.op, terms), config, 67.125, 0.0031, 96, 4000.5,
        16384, "a spec", {"row_forward": 71}, {}, "NVIDIA H200", "580.159.04", "2026-11-21",
    )  # fmt: skip
    return replace(measured, **fields)


@pytest.fixture
def path(tables):
    """The path of a table with an entry for each direction."""
    user_table.write(tables / "sm_90.json", "sm_90", [entry(FORWARD), entry(BACKWARD)])
    return tables / "sm_90.json"


@pytest.mark.parametrize("seed", range(10))
def test_entries_are_read_as_they_were_written(seed, path):
    rng = Random(seed)
    expected = {e.key: e for e in (entry(FORWARD), entry(BACKWARD))}
    for _ in range(3):  # a later measurement replaces an earlier one
        spec = replace(SPEC, hidden=rng.choice((64, 1001, 4096, 8192, 65536)), heads=seed % 2 * 8)
        tried = Search(spec, H200, rng.choice(cases.DIRECTIONS)).candidates()
        new = [entry(rng.choice(tried), spec, us=rng.random(), terms=rng.randint(1, 4))]
        user_table.write(path, "sm_90", new)
        expected |= {e.key: e for e in new}
    assert {e.key: e for e in user_table.read(path, "sm_90")} == expected
    assert [p.name for p in path.parent.iterdir()] == ["sm_90.json"], "a temporary file was left"


def test_plans_use_the_table(path):
    for needs, config in ((None, FORWARD), (NEEDS, BACKWARD)):
        assert heuristics.chosen(SPEC, H200, needs) == config
        assert heuristics.source(SPEC, H200, needs) == f"user table {path}"
    path.unlink()
    assert heuristics.chosen(SPEC, H200) == FORWARD  # a table is read once


def test_an_entry_serves_all_specs_with_its_key(path):
    like = {"dtype": "float16", "weight": None}, {"offset": 1.0, "rounding": "early"}
    unlike = {"hidden": 4104}, {"dtype": "float32"}, {"norm": "layer"}, {"residual": "bfloat16"}
    unlike += ({"heads": 8},)
    assert all(heuristics.chosen(replace(SPEC, **fields), H200) == FORWARD for fields in like)
    for fields in unlike:
        assert heuristics.source(replace(SPEC, **fields), H200) == "tuned/sm_90"
    assert heuristics.source(SPEC, Target.of("sm_100")) == "heuristic, untimed"


def test_a_table_serves_sizes_that_no_shipped_table_has(tables):
    for hidden, config in ((8, Backward((8,), 128)), (1001, Backward((1024,), 2))):
        spec = replace(SPEC, hidden=hidden)
        assert heuristics.source(spec, H200, NEEDS) == "heuristic, untimed"
        user_table.write(tables / "sm_90.json", "sm_90", [entry(config, spec)])
        assert heuristics.chosen(spec, H200, NEEDS) == config


def test_an_entry_for_several_terms_of_dy(path):
    """It serves so many. Others are served by the entry for one term, which adds up alike."""
    two = replace(BACKWARD, hints=Hints(1, 8))
    user_table.write(path, "sm_90", [entry(two, terms=2)])
    for terms, expected, told in (
        (1, BACKWARD, ""),
        (2, two, ""),
        (3, BACKWARD, ", timed with one term of dy"),
    ):
        needs = NEEDS._replace(terms=terms)
        assert heuristics.chosen(SPEC, H200, needs) == expected
        assert heuristics.source(SPEC, H200, needs) == f"user table {path}{told}"
    assert shipped.render(user_table.read(path, "sm_90"), "sm_90").count('"Backward"') == 1


def test_a_table_without_terms_is_for_one(path):
    table = json.loads(path.read_text())
    for each in table["entries"]:
        assert each["key"].pop("terms") == 1
    path.write_text(json.dumps(table))
    user_table.configs.cache_clear()
    assert heuristics.chosen(SPEC, H200, NEEDS) == BACKWARD


KEY, CONFIG = "entries.0.key.", "entries.0.config."  # of the backward pass
# What is written at a place of a table, and why the table is ignored.
UNSERVING = [
    ({"arch": "sm_100"}, "it is for sm_100, not for sm_90"),
    ({"versions.tileiras": "13.9.1"}, "measured with {'tileiras': '13.9.1'"),
    ({"format": 4}, "not a table of format 3"),
    ({"entries": 3}, "its fields are"),
    ({"entries.0.mean": 3.0}, "entry 0: Entry has"),
    ({f"{CONFIG}form": "Cluster"}, "entry 0: 'Cluster'"),
    ({f"{CONFIG}tma": 1}, "entry 0: Backward: tma is 1"),
    ({f"{CONFIG}widths": [4096, 16]}, "do not fit a row of 4096"),
    ({f"{KEY}direction": "forward"}, "Backward does not serve the forward pass"),
    ({f"{KEY}terms": 5}, "takes 1 to 4 terms of dy"),
    ({f"{KEY}op": "modulated_rms_norm by float32", f"{CONFIG}widths": [2048]}, "do not share rows"),
]


def check_ignored(path, message):
    with pytest.warns(TableWarning, match="tilenorm ignores") as caught:
        found = heuristics.chosen(SPEC, H200)
    assert found != FORWARD and heuristics.source(SPEC, H200) == "tuned/sm_90"
    (warning,) = caught
    assert str(path) in str(warning.message) and message in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a table is warned about once
        heuristics.chosen(SPEC, H200, NEEDS)


@pytest.mark.parametrize("changes, message", UNSERVING, ids=str)
def test_a_foreign_table_is_ignored(changes, message, path):
    table = json.loads(path.read_text())
    for place, value in changes.items():
        *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
        inner = table
        for key in outer:
            inner = inner[key]
        inner[last] = value
    path.write_text(json.dumps(table))
    check_ignored(path, message)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00\xff"])
def test_a_damaged_table_is_ignored_and_replaced(text, path):
    path.write_text(text, encoding="latin1")
    check_ignored(path, "")
    user_table.write(path, "sm_90", [entry(FORWARD)])
    assert user_table.read(path, "sm_90") == [entry(FORWARD)]


def test_a_folder_in_the_place_of_a_table_is_ignored(path):
    path.unlink()
    path.mkdir()
    check_ignored(path, "directory")


def test_entries_as_a_shipped_table():
    sizes = [replace(SPEC, hidden=n) for n in (2048, 4096, 8192)]
    text = shipped.render(
        [
            entry(RowForward(1, Hints(8), (8192,)), sizes[2]),
            entry(RowForward(1, Hints(8), (4096,)), sizes[1], gb_s=3990.4),
            entry(RowForward(2, widths=(2048,)), sizes[0]),
            entry(FORWARD, sizes[1], op="layer_norm", spills={"row_forward": 8}),
            entry(BACKWARD, sizes[1]),
            entry(RowForward(4), HEADS),
            entry(RowForward(4), replace(SPEC, hidden=1001)),
            entry(SHARED, replace(SPEC, hidden=65536)),
        ],
        "sm_90",
    )
    row = '[8192, {"form": "RowForward", "hints": {"occupancy": 8}}, "3990 (4096), 4000"]'
    assert f"   {row},\n" in text
    found = tables.read(text)
    wide = (8192, RowForward(1, Hints(8))), (65536, SHARED)
    assert found.forward == {
        ("rms_norm", 2): ((2048, RowForward(2)), *wide),
        ("layer_norm", 2): ((4096, FORWARD),),
    }
    assert found.backward == {("rms_norm", 2): ((4096, BACKWARD),)}
    assert found.spills == {("row_forward", "layer_norm", 2, 4096): 8}


def test_a_gap_in_a_shipped_table_is_refused():
    entries = [entry(Backward((n,)), replace(SPEC, hidden=n)) for n in (1024, 8192)]
    entries[1] = replace(entries[1], config=Backward((4096, 4096)))
    with pytest.raises(ValueError, match=r"would serve from 1032 on.*tune a size between"):
        shipped.render(entries, "sm_90")
