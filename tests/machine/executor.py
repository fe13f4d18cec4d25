"""Runs plans through the compiled code of their kernels, on CPU tensors."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilenorm.launch.calls import Needs, bound
from tilenorm.launch.config import StreamForward
from tilenorm.launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec

from ..executors import Executor, Inputs, with_arguments
from .run import launch

DISTINCT = 3  # different rows; each stands in many places
PLACES = 40  # rows of a batch, at least


class Compiled(Executor):
    """Compiles for `arch` and runs one block after another, as on a GPU with one multiprocessor.

    disturbs: every float32 operation disturbs its result (floats.disturbed).
    """

    device = "cpu"

    def __init__(self, arch: str, disturbs: bool = False):
        self.name, self.disturbs = f"compiled_{arch}", disturbs
        self.target = Target(arch, 1)

    def run(self, exchange: bool = True, **constants) -> Callable:
        def run(launches, arrays, index) -> None:
            for call in with_arguments(bound(launches, arrays), **constants):
                launch(call, self.target.arch, self.disturbs)

        return run


def runs(plan: ForwardPlan | BackwardPlan) -> bool:
    """Whether a Compiled executor can run a plan: it has no tile loads and no exchange of blocks.

    Those plans have one row in a tile, and a row that blocks share has a prescribed order.
    """
    reads_tiles = getattr(plan.config, "tma", False) or getattr(plan.config, "store", False)
    return plan.chunks == 1 and not reads_tiles


def moved(arch: str, spec: NormSpec, needs: Needs | None, **constants) -> dict[str, int]:
    """How many rows of each result differ from the same row in another place of the batch.

    needs: the gradients of a backward pass; None is a forward pass. The float32 operations disturb
    their results, so that a row that is added up in another order differs visibly.
    """
    executor = Compiled(arch, disturbs=True)
    if needs is None:
        plan = plan_forward(spec, executor.target, True)
        streams = isinstance(plan.config, StreamForward)
        tiles = 2 * plan.resident if streams else 2
    else:
        plan = plan_backward(spec, executor.target, needs)
        tiles = 2 * plan.blocks(1 << 30)
    if not runs(plan):
        raise ValueError(f"{plan.config} is not for the machine")
    rows = max(tiles * plan.config.rows + 1, PLACES)
    rows = rows // (spec.heads or 1) * (spec.heads or 1)
    order = torch.randint(DISTINCT, (rows,), generator=torch.Generator().manual_seed(rows))
    inputs = repeated(Inputs.random(spec, rows, "cpu"), spec, order)
    if needs is None:
        results = executor.forward(spec, inputs, **constants)
    else:
        results = executor.backward(spec, inputs, needs, **constants)
    results = {name: t for name, t in results.items() if name not in ("dw", "db")}
    return {name: _differing(t.reshape(rows, -1), order) for name, t in results.items()}


def repeated(inputs: Inputs, spec: NormSpec, order: Tensor) -> Inputs:
    """Inputs whose row i is row order[i] of the given ones. Every head has the same weight."""
    inputs = inputs.with_rows(lambda _, t: t.reshape(-1, spec.hidden)[order].reshape(t.shape))
    if spec.heads:
        one = {n: getattr(inputs, n) for n in ("weight", "bias")}
        one = {n: t[:1].expand(t.shape).contiguous() for n, t in one.items() if t is not None}
        inputs = replace(inputs, **one)
    return inputs


def _differing(results: Tensor, order: Tensor) -> int:
    """How many rows are not equal to the first row that had the same inputs."""
    first = torch.stack([results[(order == i).nonzero()[0, 0]] for i in range(DISTINCT)])
    return int((results != first[order]).any(1).sum())
