"""The commands info and precompile, and the messages for wrong arguments.

test_main_explain.py tests the command explain, and test_main_tune.py the command tune.
"""

import re
import subprocess
import sys
from itertools import product

import cuda.tile._compile as cutile_compiler
import pytest
import torch
from cuda.tile._cext import default_tile_context

from tests.executors import backward_calls, forward_calls
from tests.stand_in_compiler import ERROR
from tilenorm import __version__
from tilenorm.__main__ import main
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import Target
from tilenorm.spec import OPS, NormSpec
from tilenorm.tools.precompile import training_calls
from tilenorm.tools.signature import signature

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
    for word in (
        "python ",
        "cuda-tile ",
        "compiler ",
        "compile cache ",
        "RMSNorm of torch on CUDA: ",
    ):
        assert word in out, word
    for op in OPS:
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


WRONG = {
    "no command": ([], "required"),
    "unknown command": (["time"], "invalid choice: 'time'"),
    "no architecture": (["explain", "--hidden", "64"], "--arch"),
    "unknown architecture": (["explain", "--arch", "sm_75", "--hidden", "64"], "'sm_75'"),
    "no hidden": (["explain", "--arch", "sm_90"], "--hidden"),
    "hidden 0": (["explain", "--arch", "sm_90", "--hidden", "0"], "got 0, takes a positive"),
    "hidden not a number": (
        ["explain", "--arch", "sm_90", "--hidden", "4k"],
        "got 4k, takes a pos",
    ),
    "unknown op": (["explain", *FOR_H200, "--op", "softmax"], "'softmax'"),
    "unknown dtype": (["explain", *FOR_H200, "--dtype", "float64"], "'float64'"),
    "unknown rounding": (["explain", *FOR_H200, "--rounding", "up"], "'up'"),
    "0 heads": (["explain", *FOR_H200, "--heads", "0"], "got 0, takes a positive"),
    "a residual dtype for an op without a residual": (
        ["explain", *FOR_H200, "--residual-dtype", "float32"],
        "--residual-dtype: rms_norm takes no residual",
    ),
    "a residual dtype for a gated op": (
        ["explain", *FOR_H200, "--op", "gated_rms_norm", "--residual-dtype", "float32"],
        "--residual-dtype: gated_rms_norm takes no residual",
    ),
    "two residuals for an op without one": (
        ["explain", *FOR_H200, "--residuals", "2"],
        "--residuals: rms_norm takes no residual",
    ),
    "an activation for an op without a gate": (
        ["explain", *FOR_H200, "--op", "layer_norm", "--activation", "sigmoid"],
        "--activation: layer_norm takes no gate",
    ),
    "gate first for an op without a gate": (
        ["precompile", *FOR_H200, "--op", "add_rms_norm", "--gate-first"],
        "--gate-first: add_rms_norm takes no gate",
    ),
    "rows for precompile": (["precompile", *FOR_H200, "--rows", "5"], "--rows"),
    "a size that the kernels refuse": (
        ["precompile", "--arch", "sm_90", "--hidden", "262145"],
        "normalized_shape holds 262145 elements; the kernels take 1 to 262144",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, refused, cache):
    arguments, message = WRONG[case]
    assert message in refused(arguments)


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


@pytest.mark.parametrize("op", [op for op in OPS if op != "rms_norm"])
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
    with pytest.raises(SystemExit):
        main(["precompile", *FOR_H200, "--pieces", "--terms", *given])


@pytest.mark.parametrize(
    "spec",
    [
        NormSpec("rms", 2048, "bfloat16", "bfloat16"),
        NormSpec("layer", 64, "float16", residual="float16"),
    ],
    ids=lambda spec: spec.op,
)
def test_a_compiled_step_compiles_nothing_new(spec):
    target, every = Target.of("sm_90"), every_gradient(spec)
    ahead = keys(training_calls(spec, target, (1, 2, 3), True))
    for rows, k, dsum, output in product(ROWS, (1, 2, 3), (False, True), (False, True)):
        needs = every._replace(terms=k, dsum=dsum, output=output)
        assert keys(backward_calls(spec, target, rows, needs)) <= ahead, (rows, needs)


def keys(calls) -> set[str]:
    return {f"{id(c.kernel)} {signature(c.kernel, c.arguments).symbol}" for c in calls}


ROWS = (1, 2, 15, 16, 17, 32, 127, 1000, 4096, 5000, 65536)


def check_training_step(arch, spec):
    target, needs = Target.of(arch), every_gradient(spec)
    ahead = keys(training_calls(spec, target))
    missing = [
        rows
        for rows in (rows * (spec.heads or 1) for rows in ROWS)
        for calls in (
            forward_calls(spec, target, rows, False),
            forward_calls(spec, target, rows, True),
            backward_calls(spec, target, rows, needs),
        )
        if not keys(calls) <= ahead
    ]
    assert not missing, f"row counts that would compile in the first step: {missing}"


@pytest.mark.parametrize("parameters", ["none", "weight", "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden", [1, 64, 256, 1000, 1001, 2048, 4096, 8192, 20480, 131072])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_training_step_compiles_nothing_new(arch, hidden, dtype, parameters):
    weight = None if parameters == "none" else dtype
    bias = dtype if parameters == "both" else None
    check_training_step(arch, NormSpec("rms", hidden, dtype, weight, bias))


OTHERS = {
    "layer_norm": {},
    "add_rms_norm": {},
    "add_layer_norm, float32": {"residual": "float32"},
    "gated_rms_norm": {},
    "gated_rms_norm, gate first": {"gate_first": True, "gate": "float32"},
    "gated_layer_norm": {},
    "gated_layer_norm, sigmoid": {"activation": "sigmoid"},
}


@pytest.mark.parametrize("hidden", [64, 1001, 4096, 131072])
@pytest.mark.parametrize("case", OTHERS)
def test_a_training_step_of_the_other_ops_compiles_nothing_new(case, hidden):
    parameters = {"weight": "bfloat16", "bias": "float32"}
    spec = NormSpec.of(case.split(",")[0], hidden, "bfloat16", **parameters, **OTHERS[case])
    check_training_step("sm_90", spec)


@pytest.mark.parametrize("heads", [2, 6])
def test_a_training_step_with_heads_compiles_nothing_new(heads):
    for arch in ("sm_80", "sm_100"):
        for hidden in (128, 1001, 4096):
            spec = NormSpec("rms", hidden, "bfloat16", "bfloat16", heads=heads)
            check_training_step(arch, spec)
