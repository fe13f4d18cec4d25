"""Compiling ahead uses every CPU that the process may use, and leaves nothing for a first step."""

import os
from itertools import product

import pytest
from cuda.tile._cext import default_tile_context

from tests import cases
from tests.executors import backward_calls, forward_calls
from tilenorm.__main__ import main
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools import precompile
from tilenorm.tools.precompile import piece_calls, training_calls
from tilenorm.tools.signature import signature

H200 = Target.of("sm_90")
ROWS = (1, 2, 15, 16, 17, 32, 127, 1000, 4096, 5000, 65536)
SPECS = [NormSpec("rms", n, "bfloat16") for n in (64, 128)]
PIECES = [
    NormSpec("rms", 1000, "bfloat16", "bfloat16"),
    NormSpec("layer", 40000, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 64, "bfloat16", "bfloat16", heads=24),
]


@pytest.fixture
def pools(monkeypatch):
    """How many processes were asked for, at each start of some; they run in this one."""
    started = []

    class Pool:
        def __init__(self, processes, *_):
            started.append(processes)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        map = staticmethod(map)

    monkeypatch.setattr(precompile, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(precompile, "_compile_nth", lambda item: item[0].hidden)
    return started


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
@pytest.mark.parametrize("cpus", [2, 3, 7])
def test_all_cpus_at_once(cpus, pools, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    found = list(precompile.precompile(SPECS, H200))
    assert pools == [cpus]
    assert [set(kernels) for kernels in found] == [{64}, {128}]


def test_no_more_processes_than_work(pools):
    with precompile.compiling(abs, [-1, 2], 50) as results:
        assert list(results) == [1, 2]
    with precompile.compiling(abs, [-1], 50) as results:
        assert list(results) == [1]
    assert pools == [2]


def test_nothing_is_compiled_for_no_cache(pools, monkeypatch):
    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    with pytest.raises(RuntimeError, match="cuTile's cache is off"):
        next(precompile.precompile(SPECS, H200))
    assert pools == []


def test_the_command_takes_pieces(capsys, monkeypatch):
    def compiled_kernel(item) -> precompile.Compiled:
        """As if a kernel were compiled."""
        spec, target, calls, number = item
        name = calls(spec, target)[number].kernel._pyfunc.__name__
        return precompile.Compiled(0, 0, 0, 0, "", name, "", 0.0)

    monkeypatch.setattr(precompile, "_compile_nth", compiled_kernel)
    command = ["precompile", "--arch", "sm_90", "--hidden", "128", "--processes", "1", "--pieces"]
    assert main(command) == 0
    found = {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]}
    assert found == {"row_sums", "row_apply", "grad_sums", "grad_apply", "column_sum"}


def keys(calls) -> set[str]:
    return {f"{id(c.kernel)} {signature(c.kernel, c.arguments).symbol}" for c in calls}


@pytest.mark.parametrize("spec", PIECES, ids=cases.label)
def test_rows_in_pieces_compile_nothing_later(spec):
    ahead = keys(precompile.piece_training_calls(spec, H200))
    for rows in ROWS:
        assert keys(piece_calls(spec, H200, rows * (spec.heads or 1))) <= ahead, rows


@pytest.mark.parametrize(
    "spec",
    [
        NormSpec("rms", 2048, "bfloat16", "bfloat16"),
        NormSpec("layer", 64, "float16", residual="float16"),
    ],
    ids=lambda spec: spec.op,
)
def test_a_compiled_step_compiles_nothing_new(spec):
    every = every_gradient(spec)
    ahead = keys(training_calls(spec, H200, (1, 2, 3), True))
    for rows, k, dsum, output in product(ROWS, (1, 2, 3), (False, True), (False, True)):
        needs = every._replace(terms=k, dsum=dsum, output=output)
        assert keys(backward_calls(spec, H200, rows, needs)) <= ahead, (rows, needs)


def check_training_step(arch, spec):
    target, needs = Target.of(arch), every_gradient(spec)
    ahead = keys(training_calls(spec, target))
    for rows in (rows * (spec.heads or 1) for rows in ROWS):
        for save in (False, True):
            assert keys(forward_calls(spec, target, rows, save)) <= ahead, rows
        assert keys(backward_calls(spec, target, rows, needs)) <= ahead, rows


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


@pytest.mark.parametrize("hidden", [128, 1001, 4096])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("heads", [2, 6])
def test_a_training_step_with_heads_compiles_nothing_new(heads, arch, hidden):
    check_training_step(arch, NormSpec("rms", hidden, "bfloat16", "bfloat16", heads=heads))
