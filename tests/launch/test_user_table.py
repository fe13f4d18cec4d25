"""Plans read the tables that were written, and ignore tables that are invalid here."""

import json
import warnings
from dataclasses import asdict, replace

import pytest

from tilenorm.launch import heuristics, tuned, user_table
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.config import Backward, Hints, RowForward, SharedForward, StreamForward
from tilenorm.launch.target import Target
from tilenorm.launch.user_table import Entry, Key, TableWarning
from tilenorm.spec import NormSpec
from tilenorm.tools.dev import shipped

H200 = Target.of("sm_90")
SPEC = NormSpec("rms", 4096, "bfloat16", "bfloat16")
NEEDS = every_gradient(SPEC)
FORWARD = StreamForward(1, Hints(3, 8), (2048, 2048), tma=True, store=True)
BACKWARD = Backward((4096,), hints=Hints(2, 8))
SHARED = SharedForward(Hints(6), (8192,), packed=True)


def entry(config, spec=SPEC, direction=None, op=None, **fields) -> Entry:
    direction = direction or ("backward" if isinstance(config, Backward) else "forward")
    measured = Entry(
        Key.of(spec, direction, op or spec.op), config, 67.125, 0.0031, 96, 4000.5, 16384, "a spec",
        {"row_forward": 71}, {}, "NVIDIA H200", "580.159.04", "2026-11-21",
    )  # fmt: skip
    return replace(measured, **fields)


@pytest.fixture
def path(tables):
    """The path of a table with an entry for each direction."""
    user_table.write(tables / "sm_90.json", "sm_90", [entry(FORWARD), entry(BACKWARD)])
    return tables / "sm_90.json"


def test_entries_are_read_as_they_were_written(path):
    others = [entry(SHARED, replace(SPEC, hidden=65536)), entry(RowForward(4), heads_of(SPEC))]
    user_table.write(path, "sm_90", others)
    expected = {e.key: e for e in (entry(FORWARD), entry(BACKWARD), *others)}
    assert {e.key: e for e in user_table.read(path, "sm_90")} == expected
    assert [p.name for p in path.parent.iterdir()] == ["sm_90.json"], "a temporary file was left"
    user_table.write(path, "sm_90", [entry(RowForward(2), us=1.0)])  # a later measurement
    assert {e.key: e for e in user_table.read(path, "sm_90")}[entry(FORWARD).key].us == 1.0


def heads_of(spec):
    return replace(spec, heads=8)


def test_plans_use_the_table(path):
    assert heuristics.chosen(SPEC, H200) == FORWARD
    assert heuristics.chosen(SPEC, H200, NEEDS) == BACKWARD
    for needs in (None, NEEDS):
        assert heuristics.source(SPEC, H200, needs) == f"user table {path}"
    path.unlink()
    assert heuristics.chosen(SPEC, H200) == FORWARD  # a table is read once


def test_an_entry_serves_all_specs_with_its_key(path):
    like = (
        replace(SPEC, dtype="float16", weight=None),
        replace(SPEC, offset=1.0, rounding="early", weight="float32"),
    )
    unlike = (
        replace(SPEC, hidden=4104),
        replace(SPEC, dtype="float32"),
        replace(SPEC, norm="layer"),
        replace(SPEC, residual="bfloat16"),
        heads_of(SPEC),
    )
    assert all(heuristics.chosen(spec, H200) == FORWARD for spec in like)
    assert all(heuristics.source(spec, H200) == "tuned/sm_90" for spec in unlike)
    assert heuristics.source(SPEC, Target.of("sm_100")) == "heuristic, untimed"


def test_a_table_serves_sizes_that_no_shipped_table_has(tables):
    narrow, parts = replace(SPEC, hidden=8), replace(SPEC, hidden=1001)
    entries = [entry(Backward((8,), 128), narrow), entry(Backward((1024,), 2), parts)]
    assert heuristics.source(narrow, H200, NEEDS) == "heuristic, untimed"
    user_table.write(tables / "sm_90.json", "sm_90", entries)
    assert heuristics.chosen(narrow, H200, NEEDS) == Backward((8,), 128)
    assert heuristics.chosen(parts, H200, NEEDS) == Backward((1024,), 2)


def test_an_entry_for_several_terms_of_dy(path):
    """It serves so many. Others are served by the entry for one term, which adds up alike."""
    two = replace(BACKWARD, hints=Hints(1, 8))
    key = Key.of(SPEC, "backward", SPEC.op, 2)
    user_table.write(path, "sm_90", [replace(entry(two), key=key)])
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


def edited(**fields):
    return lambda table: table | fields


def first(**fields):
    """Change fields of the first entry, which is for the backward pass."""
    return lambda table: table | {"entries": [table["entries"][0] | fields, *table["entries"][1:]]}


def config(**fields):
    return lambda table: first(config=table["entries"][0]["config"] | fields)(table)


KEY = asdict(entry(BACKWARD).key)
UNSERVING = {
    "for another architecture": (edited(arch="sm_100"), "it is for sm_100, not for sm_90"),
    "of another compiler": (
        lambda table: table | {"versions": table["versions"] | {"tileiras": "13.9.1"}},
        "measured with {'tileiras': '13.9.1'",
    ),
    "of a newer format": (edited(format=4), "not a table of format 3"),
    "a list": (lambda _: [1, 2], "not a table of format 3"),
    "of an older format": (edited(format=1), "not a table of format 3"),
    "an extra field": (edited(extra=1), "its fields are"),
    "entries that are not a list": (edited(entries=3), "its fields are"),
    "an entry without fields": (edited(entries=[7]), "entry 0"),
    "an entry with an extra field": (first(mean=3.0), "entry 0: Entry has"),
    "an unknown form": (config(form="Cluster"), "entry 0: 'Cluster'"),
    "a field of a newer configuration": (config(depth=2), "entry 0: Backward has"),
    "a value of another type": (config(tma=1), "entry 0: Backward: tma is 1"),
    "widths that are not numbers": (config(widths=["4096"]), "entry 0"),
    "no hints": (config(hints=None), "entry 0"),
    "widths that do not fit": (config(widths=[4096, 16]), "do not fit a row of 4096"),
    "blocks that cannot share a row": (
        config(widths=[2048], rows=2),
        "need rows=1 and no tile loads",
    ),
    "32 bits packed": (
        lambda table: first(
            key=KEY | {"item_bytes": 4}, config=table["entries"][0]["config"] | {"packed": True}
        )(table),
        "packed needs rows with 16-bit elements",
    ),
    "for the other direction": (
        first(key=KEY | {"direction": "forward"}),
        "Backward does not serve the forward pass",
    ),
    "a key with an extra field": (first(key=KEY | {"rows": 3}), "entry 0"),
    "too many terms": (first(key=KEY | {"terms": 5}), "takes 1 to 4 terms of dy"),
    "terms that are not a number": (first(key=KEY | {"terms": "2"}), "entry 0"),
    "a size that is not a number": (first(key=KEY | {"hidden": "4096"}), "entry 0"),
}


def check_ignored(path, message):
    with pytest.warns(TableWarning, match="tilenorm ignores") as caught:
        found = heuristics.chosen(SPEC, H200)
    assert found != FORWARD and heuristics.source(SPEC, H200) == "tuned/sm_90"
    (warning,) = caught
    assert str(path) in str(warning.message) and message in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a table is warned about once
        heuristics.chosen(SPEC, H200, NEEDS)


@pytest.mark.parametrize("case", UNSERVING)
def test_a_foreign_table_is_ignored(case, path):
    change, message = UNSERVING[case]
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    check_ignored(path, message)


@pytest.mark.parametrize("text", ["", "{", '{"format": 2', "\x00\xff"])
def test_a_damaged_table_is_ignored(text, path):
    path.write_text(text, encoding="latin1")
    check_ignored(path, "")


def test_a_table_that_cannot_be_read_is_ignored(path):
    path.unlink()
    path.mkdir()
    check_ignored(path, "directory")


def test_writing_replaces_an_invalid_table(path):
    path.write_text("{")
    user_table.write(path, "sm_90", [entry(FORWARD)])
    assert user_table.read(path, "sm_90") == [entry(FORWARD)]


def test_entries_as_a_shipped_table():
    sizes = [replace(SPEC, hidden=n) for n in (2048, 4096, 8192)]
    found = tuned.read(
        shipped.render(
            [
                entry(RowForward(1, Hints(8), (8192,)), sizes[2]),
                entry(RowForward(1, Hints(8), (4096,)), sizes[1], gb_s=3990.4),
                entry(RowForward(2, widths=(2048,)), sizes[0]),
                entry(FORWARD, sizes[1], op="layer_norm", spills={"row_forward": 8}),
                entry(BACKWARD, sizes[1]),
                entry(RowForward(4), heads_of(sizes[1])),
                entry(RowForward(4), replace(SPEC, hidden=1001)),
                entry(SHARED, replace(SPEC, hidden=65536)),
            ],
            "sm_90",
        )
    )
    assert found.forward == {
        ("rms_norm", 2): (
            (2048, RowForward(2)),
            (8192, RowForward(1, Hints(8))),
            (65536, SHARED),
        ),
        ("layer_norm", 2): ((4096, FORWARD),),
    }
    assert found.backward == {("rms_norm", 2): ((4096, BACKWARD),)}
    assert found.spills == {("row_forward", "layer_norm", 2, 4096): 8}


def test_the_text_of_a_shipped_table():
    sizes = [replace(SPEC, hidden=n) for n in (4096, 8192)]
    entries = [entry(RowForward(1, Hints(8)), spec, gb_s=4000.5 - spec.hidden) for spec in sizes]
    text = shipped.render(entries, "sm_90")
    assert (
        '   [8192, {"form": "RowForward", "hints": {"occupancy": 8}}, "-96 (4096), -4192"]\n'
        in text
    )


def test_a_gap_in_a_shipped_table_is_refused():
    entries = [entry(Backward((n,)), replace(SPEC, hidden=n)) for n in (1024, 8192)]
    entries[1] = replace(entries[1], config=Backward((4096, 4096)))
    with pytest.raises(ValueError, match=r"would serve from 1032 on.*tune a size between"):
        shipped.render(entries, "sm_90")
