"""bench quantized: its bytes, its check, and its table."""

import pytest
import torch

from bench import quantized
from bench.__main__ import main
from bench.quantized import MOST_ERROR, bytes_of, inputs, wrong_by
from bench.quantized_providers import PROVIDERS, SCALINGS


def test_bytes_are_what_the_mathematics_needs():
    x, weight = 64 * 1024 * 2, 1024 * 2
    assert bytes_of("row", False, False, 64, 1024) == x + weight + x // 2 + 64 * 4
    assert bytes_of("block", False, True, 64, 1024) == 2 * x + weight + x // 2 + 64 * 8 * 4
    assert bytes_of("row", True, False, 64, 1024) == 3 * x + weight + x // 2 + 64 * 4
    assert bytes_of("tensor", False, False, 64, 1024) == x + weight + x // 2
    assert bytes_of("tensor", True, True, 64, 1024) == 4 * x + weight + x // 2


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_result_is_found(scaling):
    given = inputs(8, 256, "cpu", True)
    found = PROVIDERS["torch"](scaling, True, False)(*given)
    assert wrong_by(found, given, scaling) < MOST_ERROR
    *codes, total = found
    assert wrong_by((*codes, total + 1), given, scaling) > MOST_ERROR
    assert wrong_by((codes[0].roll(1, -1), *found[1:]), given, scaling) > MOST_ERROR
    for wrong in [scale * factor for scale in codes[1:] for factor in (1.1, torch.nan)]:
        assert wrong_by((codes[0], wrong, total), given, scaling) > MOST_ERROR


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_the_callers_scale_is_not_among_the_results(added, output):
    given = inputs(8, 256, "cpu", added)
    ours, theirs = (
        PROVIDERS[name]("tensor", added, output)(*given) for name in ("tilenorm", "torch")
    )
    assert len(ours) == len(theirs) == 1 + added + output
    assert wrong_by(ours, given, "tensor") < MOST_ERROR


def test_the_command_prints_a_table(capsys):
    given = ["--hidden", "256", "--provider", "tilenorm", "torch", "vllm", "--budget", "0.01"]
    assert main(["quantized", *given, "--elements", "2048"]) == 0
    text = capsys.readouterr().out
    for op in quantized.OPS:
        assert all(f"\n{op} {scaling} forward" in text for scaling in SCALINGS)
    assert "wrong" not in text


def test_the_command_measures_the_ops_asked_for(capsys):
    given = ["--op", "add_rms_norm_quantized", "--hidden", "256", "--provider", "torch"]
    assert main(["quantized", *given, "--elements", "2048", "--budget", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "\nadd_rms_norm_quantized row forward" in text
    assert "\nrms_norm_quantized" not in text
