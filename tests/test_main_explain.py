"""The command explain, and the options that describe a spec."""

import pytest

from tilenorm.__main__ import main
from tilenorm.spec import OPS

from .test_main import FOR_H200


@pytest.mark.parametrize("op", OPS)
def test_explain(op, capsys):
    arguments = ["--op", op, "--arch", "sm_100", "--hidden", "64", "8192", "--rows", "77"]
    assert main(["explain", *arguments, "--dtype", "float16", "float32", "--bias"]) == 0
    out = capsys.readouterr().out
    for hidden in (64, 8192):
        for dtype in ("float16", "float32"):
            line = f"77 rows of {hidden} {dtype} on sm_100 (weight {dtype}, bias {dtype}, offset 0"
            assert f"{op} of {line}" in out
    assert out.count("served by cutile") == 4


PLAIN = "weight bfloat16, bias None, offset 0"
# Options of explain, and the words of its output that show them.
OPTIONS = {
    "--weight-dtype float32 --offset 1": "weight float32, bias None, offset 1",
    "--no-weight": "weight None, bias None, offset 0",
    "--no-weight --bias": "weight None, bias bfloat16, offset 0",
    "--rounding early": f"{PLAIN}, rounding early",
    "--heads 6": f"{PLAIN}, 6 heads",
    "--heads 1": PLAIN,
    "--heads 6 --no-weight": "weight None, bias None, offset 0",
    "--op add_rms_norm": f"{PLAIN}, residual bfloat16",
    "--op add_layer_norm --residual-dtype float32": f"{PLAIN}, residual float32",
    "--op add_rms_norm --residuals 2": f"{PLAIN}, residual bfloat16, another residual bfloat16",
    "--op layer_norm_add --residual-dtype float32": f"{PLAIN}, residual float32 after the norm",
    "--op gated_rms_norm": f"{PLAIN}, gate bfloat16 after the norm, activation silu",
    "--op gated_rms_norm --activation sigmoid": (
        f"{PLAIN}, gate bfloat16 after the norm, activation sigmoid"
    ),
    "--op rms_norm_quantized --scaling block --layout column_tma --power-of-2 --return-output": (
        f"{PLAIN}, block scales powers of two float8_e4m3fn layout column_tma output"
    ),
    "--op rms_norm_quantized --fp8 float8_e5m2": f"{PLAIN}, row scales float8_e5m2 layout row",
    "--op gated_rms_norm --gate-first": f"{PLAIN}, gate bfloat16 before the norm, activation silu",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_explain_options(options, capsys):
    main(["explain", *FOR_H200, *options.split()])
    assert f"bfloat16 on sm_90 ({OPTIONS[options]})" in capsys.readouterr().out


def test_explain_a_refused_spec(capsys):
    assert main(["explain", "--arch", "sm_90", "--hidden", "262145"]) == 0
    out = capsys.readouterr().out
    assert "served by reference" in out
    assert "refused by cutile: normalized_shape holds 262145 elements" in out
