"""Compiles what the checks of a case launch, in other processes and before the checks run.

A check compiles whatever is missing, which is for tensors in the layouts of `strided`, and says
what does not compile.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tilenorm.launch.calls import Call, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.tools import precompile

from .draw import Case


class Job(NamedTuple):
    """until: a time after which nothing more is compiled."""

    case: Case
    target: Target
    until: float


def compiled(cases: list[Case], target: Target, until: float) -> Iterator[Case]:
    """Each case in order, once its kernels are in cuTile's cache."""
    jobs = [Job(case, target, until) for case in cases]
    with precompile.compiling(compile_ahead, jobs, None) as done:
        yield from (case for case, _ in zip(cases, done, strict=True))


def compile_ahead(job: Job) -> None:
    with suppress(Exception):
        for call in calls_of(job.case, job.target):
            if time.time() > job.until:
                break
            precompile.compile_call(call, job.target.arch)


def calls_of(case: Case, target: Target) -> Iterator[Call]:
    spec, how = case.spec, case.how
    specs = [spec, *(replace(spec, quantized=how._replace(output=y)) for y in (False, True) if how)]
    plans = [plan_forward(spec, target, True), plan_backward(spec, target, every_gradient(spec))]
    plans += [plan_forward(each, target, False) for each in specs]
    for plan, count in product(plans, {case.rows, *map(len, case.picks().values())}):
        yield from precompile.calls_of(plan, count * (spec.heads or 1))
