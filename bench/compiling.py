"""Compile what a run will measure, in several processes, before anything is timed.

The run then finds the code in the compilers' caches on the disk.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import NamedTuple

import torch

from bench.cases import OPS
from bench.command import told
from bench.op import Case
from bench.providers import PROVIDERS
from bench.record import Cell
from bench.run import repeatable_call
from bench.worker import PROCESSES


class Task(NamedTuple):
    """The directions of a case in which a process calls a provider once."""

    case: Case
    provider: str
    directions: tuple[str, ...]


def tasks(cells: dict[Case, Sequence[Cell]]) -> list[Task]:
    """What providers that can compile ahead have to compile, the last of a run first: the wide
    rows at its end take the longest.
    """
    found: dict[tuple[Case, str], list[str]] = {}
    for case, asked in cells.items():
        for cell in asked:
            if PROVIDERS[cell.provider].compiles_ahead:
                found.setdefault((case, cell.provider), []).append(cell.direction)
    return [Task(*key, tuple(ways)) for key, ways in reversed(found.items())]


def compile_all(cells: dict[Case, Sequence[Cell]], device: str, late: Callable[[], bool]) -> None:
    """Do all tasks in PROCESSES, until it is late. The run meets failures again, and tells them."""
    asked = tasks(cells)
    told(f"compiling for {len(asked)} providers' cases in {PROCESSES} processes")
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, task, device) for task in asked]
        for future in as_completed(futures):
            if late() or isinstance(future.exception(), BrokenProcessPool):
                pool.shutdown(cancel_futures=True)
                break
    told("compiled")


def compile_one(task: Task, device: str) -> None:
    """Call a provider once in each direction."""
    op = OPS[task.case.op]
    torch.set_num_threads(1)
    with suppress(Exception):  # the GPU may have too little memory for so many processes
        inputs, grads = op.made(task.case, device), op.output_grads(task.case, device)
        for direction in task.directions:
            with suppress(Exception):  # a provider may raise anything
                function = PROVIDERS[task.provider].load(op)
                repeatable_call(function, inputs, grads, direction)()
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the other processes
