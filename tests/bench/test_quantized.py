"""bench quantized: its bytes, its check, and its table."""

import torch

from bench import quantized
from bench.__main__ import main
from bench.quantized import MOST_ERROR, bytes_of, inputs, wrong_by


def test_bytes_are_what_the_mathematics_needs():
    x, weight = 64 * 1024 * 2, 1024 * 2
    assert bytes_of("row", False, False, 64, 1024) == x + weight + x // 2 + 64 * 4
    assert bytes_of("block", False, True, 64, 1024) == 2 * x + weight + x // 2 + 64 * 8 * 4
    assert bytes_of("row", True, False, 64, 1024) == 3 * x + weight + x // 2 + 64 * 4


def test_a_wrong_scale_or_sum_is_found():
    given = inputs(8, 256, "cpu", True)
    for scaling in quantized.SCALINGS:
        q, scale, total = quantized.PROVIDERS["torch"](scaling, True, False)(*given)
        assert wrong_by((q, scale, total), given, scaling) < MOST_ERROR
        assert wrong_by((q, scale * 1.1, total), given, scaling) > MOST_ERROR
        assert wrong_by((q, scale, total + 1), given, scaling) > MOST_ERROR
        nan = torch.full_like(scale, torch.nan)
        assert wrong_by((q, nan, total), given, scaling) > MOST_ERROR


def test_the_command_prints_a_table(capsys):
    given = ["--hidden", "256", "--provider", "tilenorm", "torch", "vllm", "--budget", "0.01"]
    assert main(["quantized", *given, "--elements", "2048"]) == 0
    text = capsys.readouterr().out
    for op in ("rms_norm_quantized row", "add_rms_norm_quantized block"):
        assert op in text
    assert "wrong" not in text
