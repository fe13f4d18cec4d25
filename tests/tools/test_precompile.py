"""Compiling ahead uses every CPU that the process may use, once for all specs."""

import os
from unittest.mock import patch

import pytest
from cuda.tile._cext import default_tile_context

from tests import cases
from tilenorm.__main__ import main
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools import precompile
from tilenorm.tools.pieces import piece_calls
from tilenorm.tools.signature import signature

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
    found = list(precompile.precompile(SPECS, Target.of("sm_90")))
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
        next(precompile.precompile(SPECS, Target.of("sm_90")))
    assert pools == []


@pytest.mark.parametrize("spec", PIECES, ids=cases.label)
def test_rows_in_pieces_compile_nothing_later(spec):
    target = Target.of("sm_90")

    def keys(calls) -> set[str]:
        return {f"{id(c.kernel)} {signature(c.kernel, c.arguments).symbol}" for c in calls}

    ahead = keys(precompile.piece_training_calls(spec, target))
    for rows in (1, 2, 15, 16, 17, 32, 127, 1000, 4096, 65536):
        assert keys(piece_calls(spec, target, rows * (spec.heads or 1))) <= ahead, rows


def test_the_command_takes_pieces(pools, capsys):
    arguments = ["precompile", "--arch", "sm_90", "--hidden", "128", "--processes", "1"]
    found = {}
    for more in ([], ["--pieces"]):
        with patch.object(precompile, "_compile_nth", compiled_kernel):
            assert main([*arguments, *more]) == 0
        found[bool(more)] = {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]}
    assert found[False] == {"row_forward", "norm_backward", "column_sum"}
    assert found[True] == {"row_sums", "row_apply", "grad_sums", "grad_apply", "column_sum"}


def compiled_kernel(item) -> precompile.Compiled:
    """As if a kernel were compiled."""
    spec, target, calls, number = item
    name = calls(spec, target)[number].kernel._pyfunc.__name__
    return precompile.Compiled(name, "", 0.0, 0, 0, 0, 0, "")
