"""What a run of tests writes of each case, and how cases take turns."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import turns

ROOT = Path(__file__).parents[1]
CASES = """
import os, pytest

@pytest.fixture
def broken():
    raise OSError("no fixture")

@pytest.fixture
def untidy():
    yield
    raise OSError("left something")

def test_passes(): pass
def test_fails(): assert 1 == 2, "numbers differ"
def test_skips(): pytest.skip("needs another machine")
def test_setup(broken): pass
def test_teardown(untidy): pass
def test_dies(): os._exit(3)
"""
RUN = """
import sys, pytest
from pathlib import Path
from tests.support.outcomes import Outcomes
sys.exit(pytest.main(sys.argv[2:], plugins=[Outcomes(Path(sys.argv[1]))]))
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_each_case_has_an_outcome(processes, tmp_path):
    file, written = tmp_path / "test_a.py", tmp_path / "cases"
    file.write_text(CASES if processes else CASES.replace("os._exit(3)", "assert 0, 'died'"))
    how = ["-q", "-n", str(processes), "--rootdir", str(tmp_path), str(file)]
    subprocess.run([sys.executable, "-c", RUN, str(written), *how], cwd=ROOT, capture_output=True)
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert len({*lines[0]["collected"]}) == 6
    outcomes: dict[str, list] = {}
    for line in lines:
        if "test" in line:
            name = line["test"].rpartition("::")[2]
            outcomes.setdefault(name, []).append((line["outcome"], line["why"]))
    assert outcomes["test_passes"] == [("passed", "")]
    [(outcome, why)] = outcomes["test_fails"]
    assert outcome == "failed" and "numbers differ" in why
    [(outcome, why)] = outcomes["test_skips"]
    assert outcome == "skipped" and "needs another machine" in why
    assert outcomes["test_setup"] == [("failed", "OSError: no fixture")]
    assert outcomes["test_teardown"] == [("passed", ""), ("failed", "OSError: left something")]
    [(outcome, why)] = outcomes["test_dies"]
    assert outcome == "failed" and ("crashed" if processes else "died") in why


HOLD = """
import sys, time
from pathlib import Path
from tests.support import turns
gib, memory, limit, seconds = map(float, sys.argv[1:5])
folder = Path(sys.argv[5])
turns.MOST_SECONDS, turns.memory_of_gpu = limit, lambda: memory
with turns.turn(gib):
    mine = folder / f"{time.monotonic_ns()}"
    mine.touch()
    until = time.monotonic() + seconds
    while len([*folder.iterdir()]) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    print(len([*folder.iterdir()]))
    time.sleep(0.1)
    mine.unlink()
"""


def held(
    folder: Path, *gib: float, memory: float = 0, limit: float = 60, seconds: float
) -> list[subprocess.Popen]:
    """Processes that each hold a turn for so much memory, until they meet or for some seconds.

    memory: the GiB of the GPU.
    """
    environment = {"CUDA_VISIBLE_DEVICES": f"test {time.monotonic()}", "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, "text": True}
    words = [[str(of), str(memory), str(limit), str(seconds), str(folder)] for of in gib]
    return [subprocess.Popen([sys.executable, "-c", HOLD, *of], cwd=ROOT, **how) for of in words]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gib, memory, beside",
    [
        ((0, 0), 80, True),
        ((0, 8), 80, True),
        ((8, 8), 80, False),
        ((8, 8), 140, True),
        ((0, 40), 140, False),
        ((8, 40), 140, False),
    ],
)
def test_cases_with_much_memory_take_turns(gib, memory, beside, tmp_path):
    for process in held(tmp_path, *gib, memory=memory, seconds=50 if beside else 1.0):
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert int(out) == (2 if beside else 1)


def test_long_cases_are_the_first_and_those_that_run_alone_the_last():
    def case(gib: float = 0, **marks) -> SimpleNamespace:
        marks |= {"gpu_memory": SimpleNamespace(args=(gib,))} if gib else {}
        return SimpleNamespace(get_closest_marker=marks.get)

    cases = [case(48), case(), case(8), case(turns.ALONE), case(long=True), case(8, long=True)]
    in_order = [cases[i] for i in (4, 5, 1, 2, 0, 3)]
    assert sorted(cases, key=turns.place_in_run) == in_order


def test_places_leave_memory_for_the_other_cases():
    for memory in range(200):
        count = turns.places(memory)
        assert count == 1 or count * turns.WIDE_GIB + turns.OTHERS <= memory
    assert turns.places(80) == 1 and turns.places(140) > 1  # an H100 and an H200


def test_a_case_that_does_not_end_is_ended(tmp_path):
    [process] = held(tmp_path, 0, limit=0.5, seconds=50)
    _, err = process.communicate()
    assert process.returncode == 1 and "Timeout" in err
