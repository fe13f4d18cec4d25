"""Runs plans through the compiled code of their kernels, on CPU tensors."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilenorm.launch.calls import Needs, bound
from tilenorm.launch.config import StreamForward
from tilenorm.launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

from ..executors import Executor, Inputs, with_arguments
from .run import launch

DISTINCT = 3  # different rows; each stands in many places
PLACES = 40  # rows of a batch, at least
MULTIPLE = 16  # a number of rows that the compiler is told of
# The elements from row to row: a vector of 16 bytes more than a row has, an odd number more, and as
# many whole vectors as hold a row.
DISTANCES = (
    lambda t: t.shape[-1] + 16 // t.element_size(),
    lambda t: t.shape[-1] + 3,
    lambda t: -(-t.shape[-1] * t.element_size() // 16) * (16 // t.element_size()),
)


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
    plan = _plan(executor, spec, needs)
    if needs is None:
        streams = isinstance(plan.config, StreamForward)
        tiles = 2 * plan.resident if streams else 2
    else:
        tiles = 2 * plan.blocks(1 << 30)
    rows = max(tiles * plan.config.rows + 1, PLACES)
    rows = rows // (spec.heads or 1) * (spec.heads or 1)
    order = torch.randint(DISTINCT, (rows,), generator=torch.Generator().manual_seed(rows))
    inputs = repeated(Inputs.random(spec, rows, "cpu"), spec, order)
    results = _results(executor, spec, inputs, needs, **constants)
    return {name: _differing(t, order) for name, t in results.items()}


def specialized(arch: str, spec: NormSpec, needs: Needs | None) -> dict[str, int]:
    """How many rows of each result differ between the variants that cuTile compiles of a kernel.

    cuTile specialises a kernel on extents of 1, on extents that are multiples of 16, and on the
    distance of rows. needs: see `moved`.
    """
    executor, heads = Compiled(arch, disturbs=True), spec.heads or 1
    _plan(executor, spec, needs)
    inputs = Inputs.random(spec, MULTIPLE * heads, "cpu")
    expected = _results(executor, spec, inputs, needs)
    # Other distances have rows copied where they are whole vectors.
    rules = DISTANCES[:1] if spec.aligned else DISTANCES
    variants = [inputs.with_rows(lambda _, t: _apart(t, rule(t))) for rule in rules]  # noqa: B023
    variants += [inputs.with_rows(lambda _, t: t[:n]) for n in (1, 3)]  # noqa: B023
    found = {}
    for variant in variants:
        for name, rows in _results(executor, spec, variant, needs).items():
            differing = (rows != expected[name][: len(rows)]).any(1)
            found[name] = found.get(name, 0) + int(differing.sum())
    return found


def rewritten(arch: str, spec: NormSpec, needs: Needs) -> int:
    """How many elements of y differ from the forward pass where the backward pass writes y again.

    needs: with `output`. The further terms of dy are zeros.
    """
    executor = Compiled(arch, disturbs=True)
    forward, backward = _plan(executor, spec, None), _plan(executor, spec, needs)
    p, run = Inputs.random(spec, 5, "cpu"), executor.run()
    tensors = (p.x, p.residual, p.gate, p.weight, p.bias)
    y, total, mean, rstd = cutile.forward(forward, tensors, p.eps, run=run)
    saved = (p.x if total is None else total, *tensors[2:], mean, rstd)
    more = [torch.zeros_like(p.dy)] * (needs.terms - 1)
    dsum = p.dsum if needs.dsum else None
    *_, again = cutile.backward(backward, p.dy, dsum, saved, more=more, run=run)
    return int((again != y).sum())


def _apart(t: Tensor, distance: int) -> Tensor:
    """A tensor with the same values, whose rows are so many elements apart."""
    around = t.new_full((*t.shape[:-1], distance), torch.nan)
    return around[..., : t.shape[-1]].copy_(t)


def _plan(executor: Executor, spec: NormSpec, needs: Needs | None) -> ForwardPlan | BackwardPlan:
    if needs is None:
        plan = plan_forward(spec, executor.target, True)
    else:
        plan = plan_backward(spec, executor.target, needs)
    if not runs(plan):
        raise ValueError(f"{plan.config} is not for the machine")
    return plan


def _results(executor, spec: NormSpec, inputs: Inputs, needs: Needs | None, **constants):
    """The results that have rows, each as a matrix."""
    if needs is None:
        found = executor.forward(spec, inputs, **constants)
    else:
        found = executor.backward(spec, inputs, needs, **constants)
    rows = inputs.x.numel() // spec.hidden
    return {n: t.reshape(rows, -1) for n, t in found.items() if n not in ("dw", "db")}


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
