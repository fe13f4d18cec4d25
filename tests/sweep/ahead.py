"""Compiles what the checks of a case launch, in other processes and before the checks run."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tilenorm.launch.calls import Call, bound, every_gradient
from tilenorm.launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.table import OPS
from tilenorm.tools import precompile
from tilenorm.tools.precompile import compile_call, compiling, signature

from ..layouts import Layout
from .checks import ROWS
from .draw import Case

INCOMING = ("incoming 0", "incoming 1")  # the gradients of the outputs


class Job(NamedTuple):
    """until: a time after which nothing more is compiled."""

    case: Case
    target: Target
    until: float


def compiled(cases: list[Case], target: Target, until: float) -> Iterator[tuple[Case, str]]:
    """Each case in order once its kernels are in cuTile's cache, and an error message or "".

    The processes compile the cases behind it while the caller looks at one. The caller needs the
    cache anyway: a check compiles whatever is missing there.
    """
    jobs = [Job(case, target, until) for case in cases]
    with compiling(compile_ahead, jobs, None) as messages:
        yield from zip(cases, messages, strict=True)


def compile_ahead(job: Job) -> str:
    try:
        for call in calls_of(job.case, job.target):
            if time.time() > job.until:
                break
            compile_call(call, job.target.arch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def calls_of(case: Case, target: Target) -> list[Call]:
    """The kernel calls of the checks of a case, once each."""
    spec, heads = case.spec, case.spec.heads or 1
    both = plan_forward(spec, target, True), plan_backward(spec, target, every_gradient(spec))
    calls = _calls_in_layouts(case, *both)
    for plan, count in product(both, {case.rows, *map(len, case.picks().values())}):
        calls += precompile.calls_of(plan, count * heads)
    alone = [plan_forward(spec, target, False)]
    for output in (False, True) if case.how else ():
        asked = replace(spec, quantized=case.how._replace(output=output))
        plan = plan_forward(asked, target, False)
        alone += [plan] * (plan.spec.quantized is not None)  # else the plain norm's kernels run
    for plan in alone:
        calls += precompile.calls_of(plan, case.rows * heads)
    return list({key_of(call): call for call in calls}.values())


def _calls_in_layouts(case: Case, forward: ForwardPlan, backward: BackwardPlan) -> list[Call]:
    """The calls for tensors in the layouts of a case. None is written to, so none takes memory."""
    spec, calls = case.spec, []

    def collect(launches, arrays, index) -> None:
        calls.extend(bound(launches, arrays))

    def empty(name: str, dtype: str | None) -> Tensor | None:
        if dtype is None:
            return None
        shape = case.row_shape[-1:] if name == "layer_scale" else case.row_shape
        layout = case.layout(name) if name in (*ROWS, *INCOMING) else Layout.contiguous(*shape)
        return layout.view(torch.empty(layout.size, dtype=getattr(torch, dtype)))

    given = {role: empty(role, spec.dtype_of(role)) for role in OPS[spec.op].roles}
    given["x"] = empty("input", spec.dtype)
    found = cutile.bind_forward(forward, collect)(tuple(given.values()), 1e-6)
    made = dict(zip(OPS[spec.op].made, found, strict=True))
    kept = given | made | {"x": made.get("sum", given["x"])}
    dy = empty(INCOMING[0], spec.skip or spec.dtype)
    dsum = empty(INCOMING[1], spec.residual)
    saved = tuple(kept[role] for role in spec.kept)
    cutile.bind_backward(backward, spec.kept, collect)(dy, dsum, saved)
    return calls


def key_of(call: Call) -> str:
    return f"{id(call.kernel)} {signature(call.kernel, call.arguments).symbol}"
