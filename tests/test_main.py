"""The commands info and precompile, and the messages for wrong arguments.

test_main_explain.py tests the command explain, and test_main_tune.py the command tune.
"""

import re
import subprocess
import sys

import cuda.tile._compile as cutile_compiler
import pytest
import torch
from cuda.tile._cext import default_tile_context

from tests.stand_in_compiler import ERROR
from tilenorm import __version__
from tilenorm.__main__ import main
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.table import NORMS
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
    assert all(word in out for word in words)
    for op in NORMS:
        assert f"  {op}: " in out
    assert status == (1 if "wrong: " in out else 0)


def test_info_tells_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert main(["info"]) == 1
    assert "wrong: cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_is_named(capsys, compiler):
    compiler.breaks(row_forward=ERROR)
    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 1
    message = "its kernel row_forward does not compile for sm_90: Return code 5 out of registers"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_info_without_a_gpu(capsys):
    main(["info"])
    out = capsys.readouterr().out
    assert "no NVIDIA GPU or no driver: the reference implementation serves every op" in out
    assert "rms_norm: reference\n    cutile refuses: the input is on cpu" in out


def test_as_a_program():
    command = [sys.executable, "-m", "tilenorm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


EXPLAIN = "explain --arch sm_90 --hidden 256"
PRECOMPILE = EXPLAIN.replace("explain", "precompile")
WRONG = {
    "": "required",
    "time": "invalid choice: 'time'",
    "explain --hidden 64": "--arch",
    "explain --arch sm_75 --hidden 64": "'sm_75'",
    "explain --arch sm_90": "--hidden",
    "explain --arch sm_90 --hidden 0": "got 0, takes a positive",
    "explain --arch sm_90 --hidden 4k": "got 4k, takes a pos",
    f"{EXPLAIN} --op softmax": "'softmax'",
    f"{EXPLAIN} --dtype float64": "'float64'",
    f"{EXPLAIN} --rounding up": "'up'",
    f"{EXPLAIN} --heads 0": "got 0, takes a positive",
    f"{EXPLAIN} --residual-dtype float32": "--residual-dtype: rms_norm takes no residual",
    f"{EXPLAIN} --op gated_rms_norm --residual-dtype float32": (
        "--residual-dtype: gated_rms_norm takes no residual"
    ),
    f"{EXPLAIN} --residuals 2": "--residuals: rms_norm takes no residual",
    f"{EXPLAIN} --layer-scale": "--layer-scale: rms_norm takes none, or not with these options",
    f"{EXPLAIN} --op add_rms_norm --residuals 2 --dropout-mask 2": "--dropout-mask: add_rms_norm",
    f"{EXPLAIN} --op layer_norm --activation sigmoid": "--activation: layer_norm takes no gate",
    f"{PRECOMPILE} --op add_rms_norm --gate-first": "--gate-first: add_rms_norm takes no gate",
    f"{PRECOMPILE} --rows 5": "--rows",
    f"{PRECOMPILE} --pieces --terms 2": "--pieces: rows in pieces take one term of dy",
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
    "tune --dry-run --arch sm_90 --hidden 1024 --op rms_norm_quantized": (
        "takes the configuration, and the bits, of rms_norm: tune that"
    ),
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments(command, refused, cache):
    assert WRONG[command] in refused(command.split())


def test_precompile_without_a_cache(refused, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert "cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in refused(["precompile", *FOR_H200])


def test_precompile_fills_the_cache(capsys, cache, compilations):
    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 0
    first, count = capsys.readouterr().out, len(compilations)
    calls = training_calls(NormSpec("rms", 256, "bfloat16", "bfloat16"), Target.of("sm_90"))
    assert 0 < count <= len(calls)
    rows = re.findall(r"^  (\w+) +occupancy=.*? +(\d+\.\d+) +(\S+) +(\S+) +(\S+)$", first, re.M)
    assert len(rows) == len(calls)
    assert {kernel for kernel, *_ in rows} == {"row_forward", "norm_backward", "column_sum"}

    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 0
    assert len(compilations) == count, "the second time, the compiler ran again"


@pytest.mark.parametrize("op", [op for op in NORMS if op != "rms_norm"])
def test_precompile_of_the_other_ops(op, cache, monkeypatch, capsys):
    prepared = []
    monkeypatch.setattr(
        "tilenorm.tools.precompile.precompile", lambda *a: prepared.append(a) or [[]]
    )
    arguments = ["--op", op, "--heads", "6", "--rounding", "early", "--processes", "1"]
    assert main(["precompile", *FOR_H200, *arguments]) == 0
    spec = NormSpec.of(op, 256, "bfloat16", weight="bfloat16", heads=6, rounding="early")
    ((*what, calls),) = prepared
    assert what == [[spec], Target.of("sm_90"), 1]
    assert (calls.func, calls.keywords) == (training_calls, {"terms": (1,), "output": False})
    assert f"{op} 256 bfloat16 (weight bfloat16, " in capsys.readouterr().out


@pytest.mark.slow
def test_precompile_in_processes_fills_the_same_cache(cache, monkeypatch, compilations, capsys):
    # The workers are new processes. They read the cache's folder from the environment.
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(cache))
    main(["precompile", "--arch", "sm_90", "--hidden", "64", "--processes", "2"])
    main(["precompile", "--arch", "sm_90", "--hidden", "64", "--processes", "1"])
    assert compilations == []


@pytest.mark.parametrize("given, terms", [(["2"], (2,)), ([], (1, 2, 3))], ids=str)
def test_precompile_for_a_compiled_step(given, terms, cache, monkeypatch):
    prepared = []
    monkeypatch.setattr(
        "tilenorm.tools.precompile.precompile", lambda *a: prepared.append(a) or [[]]
    )
    assert main(["precompile", *FOR_H200, "--output", "--terms", *given]) == 0
    assert prepared[0][-1].keywords == {"terms": terms, "output": True}
