"""python -m tilenorm: info, explain, precompile, and what it says to wrong arguments."""

import re
import subprocess
import sys

import cuda.tile._compile as cutile_compiler
import pytest
import torch
from cuda.tile._cext import default_tile_context

from tilenorm import __version__
from tilenorm.__main__ import main
from tilenorm.launch.plan import Needs
from tilenorm.launch.precompile import backward_calls, forward_calls, training_calls
from tilenorm.launch.signature import signature
from tilenorm.launch.target import Target
from tilenorm.ops.explain import OPS
from tilenorm.spec import NormSpec

FOR_H200 = ["--arch", "sm_90", "--hidden", "256"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one whenever the compiler runs rather than the cache is read."""
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
    for word in ("python ", "cuda-tile ", "compiler ", "compile cache ", "rms_norm: "):
        assert word in out, word
    assert status == (1 if "wrong: " in out else 0)


def test_info_tells_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert main(["info"]) == 1
    assert "wrong: cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in capsys.readouterr().out


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


@pytest.mark.parametrize("op", OPS)
def test_explain(op, capsys):
    arguments = ["--op", op, "--arch", "sm_100", "--hidden", "64", "8192", "--rows", "77"]
    assert main(["explain", *arguments, "--dtype", "float16", "float32", "--bias"]) == 0
    out = capsys.readouterr().out
    for hidden in (64, 8192):
        for dtype in ("float16", "float32"):
            line = f"77 rows of {hidden} {dtype} on sm_100 (weight {dtype}, bias {dtype}, offset 0)"
            assert f"{op} of {line}" in out
    assert out.count("served by cutile") == 4


def test_explain_parameters(capsys):
    main(["explain", *FOR_H200, "--weight-dtype", "float32", "--offset", "1"])
    main(["explain", *FOR_H200, "--no-weight"])
    out = capsys.readouterr().out
    assert "bfloat16 on sm_90 (weight float32, bias None, offset 1)" in out
    assert "bfloat16 on sm_90 (weight None, bias None, offset 0)" in out


def test_explain_a_refused_spec(capsys):
    assert main(["explain", "--arch", "sm_90", "--hidden", "262145"]) == 0
    out = capsys.readouterr().out
    assert "served by reference" in out
    assert "refused by cutile: normalized_shape holds 262145 elements" in out


WRONG = {
    "no command": ([], "required"),
    "another command": (["tune"], "invalid choice: 'tune'"),
    "no architecture": (["explain", "--hidden", "64"], "--arch"),
    "another architecture": (["explain", "--arch", "sm_75", "--hidden", "64"], "'sm_75'"),
    "no hidden": (["explain", "--arch", "sm_90"], "--hidden"),
    "hidden 0": (["explain", "--arch", "sm_90", "--hidden", "0"], "got 0, takes a positive"),
    "hidden no number": (["explain", "--arch", "sm_90", "--hidden", "4k"], "got 4k, takes a pos"),
    "another op": (["explain", *FOR_H200, "--op", "softmax"], "'softmax'"),
    "another dtype": (["explain", *FOR_H200, "--dtype", "float64"], "'float64'"),
    "rows when compiling": (["precompile", *FOR_H200, "--rows", "5"], "--rows"),
    "compiling what is refused": (
        ["precompile", "--arch", "sm_90", "--hidden", "262145"],
        "normalized_shape holds 262145 elements; the kernels take 1 to 262144",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, capsys, cache):
    arguments, message = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_precompile_without_a_cache(capsys, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    with pytest.raises(SystemExit) as stopped:
        main(["precompile", *FOR_H200])
    assert stopped.value.code == 2
    assert "cuTile's cache is off (CUDA_TILE_CACHE_DIR)" in capsys.readouterr().err


def test_precompile_fills_the_cache(capsys, cache, compilations):
    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 0
    first, count = capsys.readouterr().out, len(compilations)
    calls = training_calls(NormSpec("rms", 256, "bfloat16", "bfloat16"), Target.of("sm_90"))
    assert 0 < count <= len(calls)
    rows = re.findall(r"^  (\w+) +occupancy=.*? +(\d+\.\d+) +(\S+) +(\S+) +(\S+)$", first, re.M)
    assert len(rows) == len(calls)
    assert {kernel for kernel, *_ in rows} == {"norm_forward", "norm_backward", "column_sum"}

    assert main(["precompile", *FOR_H200, "--processes", "1"]) == 0
    assert len(compilations) == count, "the second time, the compiler ran again"


def test_precompile_in_processes_fills_the_same_cache(cache, monkeypatch, compilations, capsys):
    # The workers are new processes, which read the folder's name from the environment.
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(cache))
    main(["precompile", "--arch", "sm_90", "--hidden", "64", "--processes", "2"])
    main(["precompile", "--arch", "sm_90", "--hidden", "64", "--processes", "1"])
    assert compilations == []


def keys(calls) -> set[str]:
    return {f"{id(c.kernel)} {signature(c.kernel, c.arguments).symbol}" for c in calls}


ROWS = (1, 2, 15, 16, 17, 32, 127, 1000, 4096, 5000, 65536)


@pytest.mark.parametrize("parameters", ["none", "weight", "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden", [1, 64, 256, 1000, 1001, 2048, 4096, 8192, 20480, 131072])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_training_step_compiles_nothing_new(arch, hidden, dtype, parameters):
    weight = None if parameters == "none" else dtype
    bias = dtype if parameters == "both" else None
    spec, target = NormSpec("rms", hidden, dtype, weight, bias), Target.of(arch)
    needs = Needs(True, weight is not None, bias is not None)
    ahead = keys(training_calls(spec, target))
    missing = [
        rows
        for rows in ROWS
        for calls in (
            forward_calls(spec, target, rows, False),
            forward_calls(spec, target, rows, True),
            backward_calls(spec, target, rows, needs),
        )
        if not keys(calls) <= ahead
    ]
    assert not missing, f"row counts that would compile in the first step: {missing}"
