"""Runs functions on several ranks: a pool of processes with gloo, or, under torchrun, this one.

Under `torchrun --nproc-per-node 2 -m pytest tests/distributed` each rank is a run of pytest, and
the tests' functions run in it: with NCCL where there are GPUs. Otherwise four processes are started
once, and each test sends them its functions.
"""

import inspect
import os
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from functools import cache, update_wrapper
from importlib import import_module
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.calls import slow

RANKS = 4
SECONDS = 300  # for one function; a collective alone has COLLECTIVE
COLLECTIVE = timedelta(seconds=90)
PRELOADED = ["torch.distributed.tensor.parallel", "torch._dynamo.backends.debugging", "tilenorm"]
PRELOADED += ["transformers.models.qwen3.modeling_qwen3"]
TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
# Shapes of meshes, by the number of ranks. "2" is half of a mesh of four ranks.
MESHES = {
    4: {"2": (2, 2), "4": (4,), "2x2": (2, 2)},
    2: {"2": (2,), "2x1": (2, 1)},
    1: {"1": (1,), "1x1": (1, 1)},  # on a machine with one GPU
}
NAMES = tuple(MESHES[int(os.environ["WORLD_SIZE"])] if TORCHRUN else MESHES[RANKS])


NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs g++ on the CPU")
INDUCTOR = [pytest.mark.slow, NEEDS_COMPILER]


def slow_but_first(values: Iterable) -> list:
    """Parameters of which the quick run takes the first alone."""
    first, *others = values
    return [first, *slow(*others)]


def device() -> str:
    """The device type of this process's rank."""
    return "cuda" if TORCHRUN and torch.cuda.is_available() else "cpu"


def on_every_rank(body: Callable) -> Callable:
    """A test whose body runs on every rank."""

    def test(world, **arguments):
        world.run(_run_body, body.__module__, body.__name__, arguments)

    own = inspect.signature(body)
    fixture = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    update_wrapper(test, body)
    test.__signature__ = own.replace(parameters=[fixture, *own.parameters.values()])
    return test


def _run_body(module: str, name: str, arguments: dict) -> None:
    getattr(import_module(module), name).__wrapped__(**arguments)


@cache
def mesh(name: str) -> DeviceMesh:
    """A mesh that this rank is part of, by its name in MESHES."""
    shape = MESHES[dist.get_world_size()][name]
    names = tuple("ab"[: len(shape)])
    whole = init_device_mesh(device(), shape, mesh_dim_names=names)
    return whole["b"] if name == "2" and len(shape) == 2 else whole


def join(rank: int, size: int, **where) -> None:
    torch.set_num_threads(1)
    # PyTorch's caches of compiled code know the whole tensor's shape alone: with one folder, a rank
    # whose part is smaller than another's would run that one's code.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilenorm")
    if device() == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device() == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=COLLECTIVE, **where)


class Here:
    """This process is one rank of torchrun's."""

    def __init__(self):
        join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def run(self, function: Callable, *arguments) -> None:
        function(*arguments)

    def close(self) -> None:
        dist.destroy_process_group()


class Pool:
    """Processes, one a rank, that run the functions sent to them. A function that fails ends them
    all: a rank that left out a collective would be paired with other ranks' next one. The next call
    starts new ones.
    """

    def __init__(self):
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._ranks: list[ProcessPoolExecutor] = []

    def run(self, function: Callable, *arguments) -> None:
        """Run a function on every rank. Raises AssertionError with the first failed rank's trace,
        or TimeoutError.
        """
        if not self._ranks:
            store = f"file://{tempfile.mkdtemp(prefix='tilenorm')}/store"
            for rank in range(RANKS):
                given = {"mp_context": self._context, "initializer": _join_of_pool}
                self._ranks.append(ProcessPoolExecutor(1, initargs=(rank, store), **given))
        running = {pool.submit(function, *arguments): rank for rank, pool in enumerate(self._ranks)}
        done, late = wait(running, SECONDS, FIRST_EXCEPTION)
        failed = next((each for each in done if each.exception()), None)
        if failed:
            self.close()
            trace = "".join(traceback.format_exception(failed.exception()))
            raise AssertionError(f"rank {running[failed]}: {trace}")
        if late:
            self.close()
            ranks = ", ".join(str(running[each]) for each in late)
            raise TimeoutError(f"ranks {ranks} did not finish in {SECONDS} s")

    def close(self) -> None:
        for pool in self._ranks:
            for process in [*pool._processes.values()]:
                process.kill()
            pool.shutdown()
        self._ranks = []


def _join_of_pool(rank: int, store: str) -> None:
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name may be unknown
    join(rank, RANKS, init_method=store)
