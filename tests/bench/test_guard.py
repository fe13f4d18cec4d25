"""``python -m bench --check`` beside records of this machine that were made faster or slower."""

import json
from pathlib import Path

import pytest

from bench import guard
from bench.__main__ import main
from bench.op import DIRECTIONS

pytestmark = [
    pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning"),
    pytest.mark.usefixtures("tiny"),
]


@pytest.fixture(scope="module")
def made() -> list[str]:
    """The text of the records that the first test has made: the others begin with the same."""
    return []


@pytest.fixture
def records(made, tmp_path, without_gpu) -> list[Path]:
    """A record of the shapes that are compared, and one of the host times."""
    shapes, hosts = tmp_path / "shapes.jsonl", tmp_path / "hosts.jsonl"
    if made:
        for path, text in zip((shapes, hosts), made, strict=True):
            path.write_text(text)
        return [shapes, hosts]
    asked = ["--hidden", str(guard.N), "--dtype", guard.DTYPE, "--provider", "tilenorm"]
    release = ["--suite", "release", "--op", *guard.CHECKED, "--direction", *DIRECTIONS]
    main([*release, *asked, "--out", str(shapes)])
    both = ["--op", *guard.HOST_OPS, "--provider", "torch", "tilenorm"]
    main(["host", "--way", "call", *both, "--out", str(hosts)])
    made += [shapes.read_text(), hosts.read_text()]
    return [shapes, hosts]


def scaled(path: Path, wanted: dict, names: tuple[str, ...], factor: float) -> None:
    """Multiply figures of the lines whose fields have the wanted values."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    count = 0
    for line in lines:
        if wanted.items() <= line.items():
            count += 1
            line |= {name: line[name] * factor for name in names}
    assert count == 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_slow(records: list[Path]) -> None:
    """Figures a thousand times as long: whatever the machine does now is faster."""
    for op in guard.CHECKED:
        for way in DIRECTIONS:
            scaled(records[0], {"op": op, "direction": way}, ("median_us",), 1e3)
    for op in guard.HOST_OPS:
        of = {"record": "host", "op": op, "provider": "tilenorm"}
        scaled(records[1], of, (guard.HOST_TIME,), 1e3)


def check(records: list[Path]) -> int:
    return main(["--check", *map(str, records)])


def test_nothing_is_slower(records, capsys):
    made_slow(records)
    assert check(records) == 0
    out = capsys.readouterr().out
    assert "slower by more than 5%: none" in out and "SLOWER" not in out
    rows = [line.strip().startswith(guard.CHECKED) for line in out.splitlines()]
    assert rows.count(True) == 8


@pytest.mark.parametrize(
    "file, line, name, told",
    [
        (0, {"op": "layer_norm", "direction": "backward"}, "median_us", "layer_norm backward"),
        (1, {"op": "rms_norm", "provider": "tilenorm"}, guard.HOST_TIME, "host time of rms_norm"),
    ],
)
def test_one_figure_is_slower(file, line, name, told, records, capsys):
    made_slow(records)
    scaled(records[file], line, (name,), 1e-9)
    assert check(records) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"slower by more than 5%: {told}") and last.count(",") <= 3


def test_records_of_another_machine_or_without_a_figure_are_refused(records):
    with pytest.raises(SystemExit, match="no host time of rms_norm, no host time of layer_norm"):
        check(records[:1])
    with pytest.raises(SystemExit, match="no rms_norm forward"):
        check(records[1:])
    first, *rest = records[0].read_text().splitlines()
    run = json.loads(first) | {"machine": "NVIDIA H100"}
    records[0].write_text("\n".join([json.dumps(run), *rest]) + "\n")
    with pytest.raises(SystemExit, match=r"is of NVIDIA H100, and this machine is .*: nothing"):
        check(records)
