"""The tools know norms with a quantised output."""

import pytest
import torch

import tilenorm
from tests.quantized import HOWS, arguments, label
from tilenorm.__main__ import main
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops.registry import MAX_ROWS
from tilenorm.spec import NormSpec, Quantization
from tilenorm.tools.explain import explain_spec, planned_device
from tilenorm.tools.precompile import calls_of, training_calls
from tilenorm.tools.signature import signature

B = "bfloat16"
TARGET = Target.of("sm_90")
BLOCK = Quantization("block", layout="column")


def spec_of(how: Quantization, **fields) -> NormSpec:
    return NormSpec("rms", 4096, B, B, quantized=how, **fields)


@pytest.mark.parametrize("output", [False, True])
def test_explain(output, capsys):
    how = BLOCK._replace(output=output)
    x = torch.ones(6, 4096, dtype=torch.bfloat16)
    asked = arguments(how)
    found = tilenorm.explain("add_rms_norm_quantized", x, x, (4096,), x[0], **asked)
    assert found.spec == spec_of(how, residual=B)
    assert (found.chosen, found.forward) == ("reference", ())
    assert "add_rms_norm_quantized of 6 rows of 4096 bfloat16 on cpu" in capsys.readouterr().out
    found = explain_spec(found.spec, 8192, planned_device("sm_90"))
    assert found.chosen == "cutile"
    assert [step.kernel for step in found.forward] == ["row_forward"]
    assert bool(found.backward) == output == (found.backward_source is not None)
    assert "block scales float8_e4m3fn layout column" in str(found)
    with pytest.raises(ValueError, match="'layout' takes 'column' or"):
        tilenorm.explain("rms_norm_quantized", x, (4096,), **(asked | {"layout": "swizzled"}))


def test_bytes_are_those_of_the_mathematics():
    rows, matrix, weight = 100, 100 * 4096, 4096 * 2
    for how, most in (
        (Quantization("row"), 3 * matrix + weight + rows * 4),
        (BLOCK._replace(output=True), 5 * matrix + weight + rows * 32 * 4),
        (Quantization("mx", layout="swizzled"), 3 * matrix + weight + rows * 128),
        (Quantization("tensor"), 3 * matrix + weight + 4),
    ):
        found = explain_spec(spec_of(how), rows, planned_device("sm_90"))
        assert found.forward_bytes == most
        assert bool(found.backward_bytes) == how.output


@pytest.mark.parametrize("how", HOWS, ids=label)
def test_no_number_of_rows_compiles_code_that_was_not_compiled_ahead(how):
    spec = NormSpec("rms", 1024, B, B, quantized=how)
    ahead = {signature(c.kernel, c.arguments).symbol for c in training_calls(spec, TARGET)}
    for save in (False, True) if how.output else (False,):
        plan = plan_forward(spec, TARGET, save)
        for rows in (1, 2, 3, 8, 16, 100, 128, 130, 4097, 65536, MAX_ROWS >> 9):
            calls = calls_of(plan, rows)
            assert {signature(c.kernel, c.arguments).symbol for c in calls} <= ahead


def test_training_needs_an_output():
    for how, names in ((HOWS[0], {"row_forward"}), (HOWS[2], {"row_forward", "norm_backward"})):
        calls = training_calls(NormSpec("rms", 1024, B, quantized=how), TARGET)
        assert {c.kernel._pyfunc.__name__ for c in calls} == names


def test_the_command_line(capsys):
    given = ["explain", "--arch", "sm_90", "--op", "rms_norm_quantized", "--hidden", "1024"]
    more = ["--scaling", "block", "--layout", "column_tma", "--power-of-2", "--return-output"]
    assert main([*given, *more, "--fp8", "float8_e5m2"]) == 0
    text = capsys.readouterr().out
    assert "block scales powers of two float8_e5m2 layout column_tma output" in text
