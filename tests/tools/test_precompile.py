"""Compiling ahead uses every CPU that the process may use, once for all specs."""

import os

import pytest
from cuda.tile._cext import default_tile_context

from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools import precompile

SPECS = [NormSpec("rms", n, "bfloat16") for n in (64, 128)]


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
