"""The sweep finds a kernel whose rows depend on their place, and prints how to see it again."""

import shlex
from dataclasses import replace
from unittest.mock import patch

import cuda.tile as ct
import pytest
import torch

from tests.support import cases
from tests.support.calls import NEEDS_GPU
from tilenorm.kernels import backward, forward
from tilenorm.spec import NormSpec

from .__main__ import main
from .draw import Case

SEVERAL_ROWS_A_TILE = Case(NormSpec("layer", 40, "float32", "float32"), 9, 1)
ONE_ROW_A_TILE = Case(NormSpec("rms", 1030, "bfloat16", "bfloat16"), 4, 2)


def run(capsys, *arguments: str) -> tuple[int, str]:
    status = main(list(arguments))
    return status, capsys.readouterr().out


@pytest.mark.parametrize("executor", cases.INTERPRETERS)
def test_drawn_cases_pass(executor, capsys):
    seed = str(cases.INTERPRETERS.index(executor) + 1)
    status, printed = run(capsys, "--executor", executor, "--specs", "2", "--seed", seed)
    assert status == 0, printed
    assert printed.startswith("2 specs, 0 failures")


def by_place_in_the_tile(real):
    """moments() whose variance is another in every second row of a tile."""

    def moments(*arguments):
        found = real(*arguments)
        rows = ct.arange(found.variance.shape[0], dtype=ct.int32)[:, None]
        return replace(
            found, variance=ct.where(rows % 2 == 1, found.variance * 1.01, found.variance)
        )

    return moments


def by_row_count(real):
    """moments() whose variance is another in a grid of several blocks."""

    def moments(*arguments):
        found = real(*arguments)
        few = ct.num_blocks(1) < 3
        return replace(found, variance=ct.where(few, found.variance * 1.01, found.variance))

    return moments


@pytest.mark.parametrize(
    "case, fault",
    [(SEVERAL_ROWS_A_TILE, by_place_in_the_tile), (ONE_ROW_A_TILE, by_row_count)],
    ids=["place", "rows"],
)
def test_a_fault_is_found_and_found_again_by_the_printed_command(case, fault, capsys):
    given = ("--executor", "interpreter_sm_90", "--case", str(case))
    with patch.object(forward, "moments", fault(forward.moments)):
        status, printed = run(capsys, *given)
        assert status == 1
        assert "FAILED picked" in printed and "output" in printed
        commands = {line.strip() for line in printed.splitlines() if "python -m" in line}
        words = [shlex.split(command) for command in sorted(commands)]
        assert words[0][:3] == ["python", "-m", "tests.sweep"]
        assert all(run(capsys, *again[3:])[0] == 1 for again in words)
    assert run(capsys, *given)[0] == 0


def test_an_exception_is_a_failure(capsys):
    with patch.object(backward, "no_dots", lambda rows: None):
        given = ("--executor", "interpreter_sm_90", "--case", str(SEVERAL_ROWS_A_TILE))
        status, printed = run(capsys, *given)
    assert status == 1 and "FAILED plain call" in printed and "Error" in printed


@NEEDS_GPU
def test_a_short_sweep():
    torch.cuda.empty_cache()
    assert main(["--seconds", "300", "--specs", "200", "--seed", "1"]) == 0
