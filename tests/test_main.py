"""The commands info, explain, precompile and tune, and the messages for wrong arguments.

tests/tools/test_tune.py tests how tune measures.
"""

import json
import re
from functools import partial

import cuda.tile._compile as cutile_compiler
import pytest
import torch
from cuda.tile._cext import default_tile_context

import tilenorm
from tests.support.stand_in_compiler import ERROR
from tilenorm.__main__ import main
from tilenorm.launch import heuristics, user_table
from tilenorm.launch.config import Backward, Hints, RowForward
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.table import NORMS
from tilenorm.tools import options, precompile
from tilenorm.tools import tune as tuning
from tilenorm.tools.candidates import Search
from tilenorm.tools.explain import planned_device
from tilenorm.tools.precompile import training_calls

FOR_H200 = ["--arch", "sm_90", "--hidden", "256"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one at each run of the compiler. Reading the cache adds nothing."""
    runs = []
    original = cutile_compiler.compile_cubin

    def counted(*args, **kwargs):
        runs.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(cutile_compiler, "compile_cubin", counted)
    return runs


def test_info(capsys):
    status = main(["info"])
    out = capsys.readouterr().out
    assert f"torch {torch.__version__.split('+')[0]}" in out
    words = ("python ", "cuda-tile ", "compiler ", "compile cache ", "RMSNorm of torch on CUDA: ")
    words = *words, "repeated calls: ", f"  fingerprint {tilenorm.fingerprint()}\n"
    assert all(word in out for word in words)
    for op in NORMS:
        assert f"  {op}: " in out
    assert status == (1 if "wrong: " in out else 0)
    if not torch.cuda.is_available():
        assert "no NVIDIA GPU or no driver: the reference implementation serves every op" in out
        assert "rms_norm: reference\n    cutile refuses: the input is on cpu" in out


def test_info_tells_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert main(["info"]) == 1
    assert "wrong: cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_is_named(capsys, compiler):
    compiler.breaks(row_forward=ERROR)
    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 1
    message = "its kernel row_forward does not compile for sm_90: Return code 5 out of registers"
    assert message in capsys.readouterr().err


EXPLAIN = "explain --arch sm_90 --hidden 256"
PRECOMPILE = EXPLAIN.replace("explain", "precompile")
DRY = "tune --dry-run --arch sm_90 --hidden 256"
WRONG = {
    "explain --arch sm_90 --hidden 4k": "got 4k, takes a pos",
    f"{EXPLAIN} --op gated_rms_norm --residual-dtype float32": (
        "--residual-dtype: gated_rms_norm takes no residual"
    ),
    f"{EXPLAIN} --group-dtype float32": "--group-dtype: rms_norm takes nothing by group",
    f"{EXPLAIN} --rotary-dim 64": "--rotary-dim, --head-dim and the like: rms_norm takes none",
    f"{EXPLAIN} --layer-scale": "--layer-scale: rms_norm takes none, or not with these options",
    f"{EXPLAIN} --op add_rms_norm --residuals 2 --dropout-mask 2": "--dropout-mask: add_rms_norm",
    f"{EXPLAIN} --op layer_norm --activation sigmoid": "--activation: layer_norm takes no gate",
    f"{EXPLAIN} --op rms_norm_add --out-dtype float32": "--out-dtype: rms_norm_add takes none",
    "tune --arch sm_90 --dry-run --hidden 64 --out-dtype float32": "--out-dtype: tables serve",
    "precompile --arch sm_90 --hidden 262145": (
        "normalized_shape holds 262145 elements; the kernels take 1 to 262144"
    ),
    # Of quantised norms.
    f"{EXPLAIN} --op rms_norm_quantized --scaling mx --layout column": (
        "--layout: takes row or swizzled with --scaling mx"
    ),
    f"{EXPLAIN} --op rms_norm_quantized --scaling block --hidden 1000": (
        "--hidden: takes a multiple of 128"
    ),
    f"{EXPLAIN} --op rms_norm_quantized --scaling mx --power-of-2": (
        "--power-of-2: takes --scaling row or block"
    ),
    "tune": "--hidden: needs at least one size",
    "tune --arch sm_90 --hidden 64": (
        "--arch: tune times on this GPU; only --dry-run takes an architecture"
    ),
    "tune --dry-run --hidden 64": "--dry-run: needs --arch",
    f"{DRY} --op gated_rms_norm --gate-first --bias": (
        "no table serves gated_rms_norm forward with a gate first, weight and bias"
    ),
    f"{DRY} --op rms_norm_rope --terms 2": "rms_norm_rope takes one term of dy",
    f"{DRY} --terms 2 --direction forward": "--terms: the forward pass takes none",
    f"{DRY} --op rms_norm_quantized": (
        "takes the configuration, and the bits, of rms_norm: tune that"
    ),
    "tune --arch sm_90 --shipped": "--shipped: [Errno 2]",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments(command, refused, cache, tables):
    assert WRONG[command] in refused(command.split())


def test_precompile_without_a_cache(refused, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert "cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in refused(["precompile", *FOR_H200])


@pytest.mark.slow
def test_precompile_fills_the_cache(capsys, cache, compilations):
    command = ["precompile", "--arch", "sm_90", "--hidden", "16", "--no-weight"]
    command += ["--processes", "1"]
    assert main(command) == 0
    first, count = capsys.readouterr().out, len(compilations)
    calls = training_calls(NormSpec("rms", 16, "bfloat16"), Target.of("sm_90"))
    assert 0 < count <= len(calls)
    rows = re.findall(r"^  (\w+) +occupancy=.*? +(\d+\.\d+) +(\S+) +(\S+) +(\S+)$", first, re.M)
    assert len(rows) == len(calls)
    assert {kernel for kernel, *_ in rows} == {"row_forward", "norm_backward"}

    assert main(command) == 0
    assert len(compilations) == count, "the second time, the compiler ran again"


# Options of precompile, what it compiles, and how.
STEPS = {
    "": (training_calls, {"terms": (1,), "output": False}),
    "--output --terms 2": (training_calls, {"terms": (2,), "output": True}),
    "--output --terms": (training_calls, {"terms": (1, 2, 3), "output": True}),
}


@pytest.mark.parametrize(
    "step, op", [*zip(STEPS, ("rms_norm", "add_layer_norm", "gated_rms_norm"), strict=True)]
)
def test_what_precompile_compiles(op, step, cache, monkeypatch, capsys):
    prepared = []
    monkeypatch.setattr(precompile, "precompile", lambda *a: prepared.append(a) or [[]])
    arguments = ["--op", op, "--heads", "6", "--rounding", "early", "--processes", "1"]
    assert main(["precompile", *FOR_H200, *arguments, *step.split()]) == 0
    spec = NormSpec.of(op, 256, "bfloat16", weight="bfloat16", heads=6, rounding="early")
    ((*what, calls),) = prepared
    assert what == [[spec], Target.of("sm_90"), 1]
    calls = partial(calls)  # of a function, or of a partial one
    assert (calls.func, calls.keywords) == STEPS[step]
    assert f"{op} 256 bfloat16 (weight bfloat16, " in capsys.readouterr().out


@pytest.mark.slow
def test_precompile_in_processes_fills_the_same_cache(cache, monkeypatch, compilations, capsys):
    # The workers are new processes. They read the cache's folder from the environment.
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(cache))
    command = ["precompile", "--arch", "sm_90", "--hidden", "16", "--no-weight", "--processes"]
    main([*command, "2"])
    main([*command, "1"])
    assert compilations == []


PLAIN = "weight bfloat16, bias None, offset 0"
# Options of explain, and the words of its output that show them.
OPTIONS = {
    "--weight-dtype float32 --offset 1": "weight float32, bias None, offset 1",
    "--no-weight --bias": "weight None, bias bfloat16, offset 0",
    "--heads 1": PLAIN,
    "--heads 6 --no-weight": "weight None, bias None, offset 0",
    "--op add_layer_norm --residual-dtype float32": f"{PLAIN}, residual float32",
    "--op add_rms_norm --residuals 2": f"{PLAIN}, residual bfloat16, another residual bfloat16",
    "--op add_rms_norm --dropout-mask 2 --layer-scale": (
        f"{PLAIN}, residual bfloat16, input masked, times 2, layer scale bfloat16"
    ),
    "--op layer_norm_add --residual-dtype float32": f"{PLAIN}, residual float32 after the norm",
    "--op rms_norm_quantized --scaling block --layout column_tma --power-of-2 --return-output": (
        f"{PLAIN}, block scales powers of two float8_e4m3fn layout column_tma output"
    ),
    "--op rms_norm_quantized --fp8 float8_e5m2": f"{PLAIN}, row scales float8_e5m2 layout row",
    "--op rms_norm_rope --rotary-dim 64 --interleaved --half-tables": (
        f"{PLAIN}, 64 of 256 elements rotated in pairs, tables float32 of 32, key weight bfloat16"
    ),
    "--op rms_norm_rope --head-dim 64 --table-dtype bfloat16 --positions int64": (
        f"{PLAIN}, 64 of 64 elements rotated by halves, tables bfloat16 of 64, positions int64, "
        "key weight bfloat16"
    ),
    "--op layer_norm --out-dtype float32": f"{PLAIN}, output float32",
    "--op layer_norm --out-dtype bfloat16": PLAIN,
    "--op gated_rms_norm --gate-first --activation sigmoid": (
        f"{PLAIN}, gate bfloat16 before the norm, activation sigmoid"
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_explain_options(options, capsys):
    main(["explain", *FOR_H200, *options.split()])
    assert f"bfloat16 on sm_90 ({OPTIONS[options]})" in capsys.readouterr().out


H200 = Target.of("sm_90")
BEST = {"forward": RowForward(2, Hints(8), (512, 512)), "backward": Backward((1024,), 2)}


@pytest.fixture
def measured(monkeypatch, tables):
    """A list of what was tuned, by a fake GPU that measures the same for every configuration."""
    found = []

    def tuned(search, how):
        found.append((search.spec, search.direction, how.rows, how.seconds))
        how.report("halfway")
        numbers = (67.125, 0.0031, 96, 4000.5, 16384, "a spec", {}, {}, "a GPU", "580", "a day")
        return user_table.Entry(search.key(), BEST[search.direction], *numbers)

    monkeypatch.setattr(tuning, "tune", tuned)
    monkeypatch.setattr(options, "gpu", lambda: planned_device("sm_90"))
    return found


def test_tune(measured, tables, capsys):
    assert main(["tune", "--hidden", "1024", "--seconds", "3", "--rows", "512"]) == 0
    spec = NormSpec("rms", 1024, "bfloat16", "bfloat16")
    assert measured == [(spec, "forward", 512, 3), (spec, "backward", 512, 3)]
    out, err = capsys.readouterr()
    title = "rms_norm 1024 bfloat16 (weight bfloat16, bias None, offset 0) forward"
    assert f"{title}: 67.125 µs, spread 0.31%, 4000.5 GB/s, 96 samples\n" in out
    assert "  RowForward(rows=2, hints=Hints(occupancy=8), widths=(512, 512))\n" in out
    assert f"written to {tables / 'sm_90.json'}\n" in out
    assert err.splitlines()[:2] == [title, "halfway"]
    assert heuristics.chosen(spec, H200) == BEST["forward"]


def test_several_terms_of_dy_into_a_file(measured, tables, tmp_path, capsys):
    path = tmp_path / "folder" / "mine.json"
    main(["tune", "--hidden", "1024", "--terms", "2", "--out", str(path)])
    (entry,) = user_table.read(path, "sm_90")
    assert (entry.key.direction, entry.key.terms) == ("backward", 2)
    assert f"written to {path}" in capsys.readouterr().out
    assert not tables.exists()


def test_as_a_shipped_table(measured, capsys):
    main(["tune", "--hidden", "1024", "--shipped"])
    text = capsys.readouterr().out
    assert '[1024, {"form": "Backward", "widths": [1024], "rows": 2}, "4000"]' in text
    main(["tune", "--arch", "sm_90", "--shipped"])
    again = capsys.readouterr().out
    assert again.startswith('{\n "versions": {"tileiras": ') and text.endswith(again)
    assert len(measured) == 2, "printing a table tunes nothing"


def test_info_lists_user_tables(measured, tables, capsys):
    main(["info"])
    assert "user table" not in capsys.readouterr().out
    main(["tune", "--hidden", "1024"])
    path = tables / "sm_90.json"
    main(["info"])
    assert f"user table {path}: 2 configurations\n" in capsys.readouterr().out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"arch": "sm_80"}))
    assert main(["info"]) == 1
    printed = capsys.readouterr().out
    assert f"wrong: the user table {path} is ignored: it is for sm_80, not for sm_90" in printed


def test_dry_run(tables, capsys, monkeypatch):
    some = {
        "forward": [RowForward(1, Hints(4), (1024,)), RowForward(1, Hints(), (1024,))],
        "backward": [Backward((1024,), hints=Hints(5)), Backward((1024,), 4, hints=Hints(5))],
    }
    monkeypatch.setattr(Search, "configs", property(lambda search: some[search.direction]))
    arguments = ["--arch", "sm_90", "--hidden", "1024", "--processes", "1", "--spills", "0"]
    assert main(["tune", "--dry-run", *arguments]) == 0
    out, err = capsys.readouterr()
    forward, backward = out.split("rms_norm 1024 bfloat16")[1:]
    assert "forward on sm_90: 1 of 2 to be timed\n" in forward
    assert "RowForward(widths=(1024,)): same code as RowForward(hints=Hints(occupancy=4)" in forward
    assert "backward on sm_90: 1 of 2 to be timed\n" in backward
    assert "rows=4, hints=Hints(occupancy=5)): spills" in backward
    assert err.count("compiled 2 of 2") == 2
    assert not tables.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(refused, tables):
    assert "there is no NVIDIA GPU, or no driver for it" in refused(["tune", "--hidden", "64"])
