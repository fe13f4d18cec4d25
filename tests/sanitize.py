"""A small batch through every schedule, whatever the tables say about this GPU, for NVIDIA's
compute-sanitizer:

    compute-sanitizer --tool racecheck python -m tests.sanitize

The tools are memcheck, initcheck, racecheck and synccheck. test_sanitize.py runs them all.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tests.support import cases
from tests.support.executors import EPS, Executor, Gpu, Inputs
from tilenorm.launch import forced
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.config import (
    Backward,
    Config,
    Hints,
    RowForward,
    Served,
    SharedForward,
    StreamForward,
)
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec

ROWS = 13  # tiles of four rows and one row that is left over


class Job(NamedTuple):
    name: str
    spec: NormSpec
    config: Config
    terms: int = 1  # of dy; with several the backward pass writes y once more


NARROW = NormSpec("rms", 100, "float32", "float32", "float32")
ALIGNED = NormSpec("layer", 1000, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16")
WEIGHTED = NormSpec("rms", 1024, "bfloat16", "bfloat16")
GATED = NormSpec("rms", 1000, "float16", "float32", gate="float32")
HEADS = NormSpec("rms", 72, "bfloat16", "bfloat16", heads=3)
SHARED_LAYER = NormSpec("layer", 3000, "bfloat16", "bfloat16", "bfloat16")
SHARED_ADD = NormSpec("rms", 3000, "float32", "float32", residual="bfloat16")

TWO, LOOP = Hints(2), Hints(1, 8)
JOBS = (
    Job("rows", NARROW, RowForward(4)),
    Job("rows, heads", HEADS, RowForward(4)),
    Job("rows, packed", ALIGNED, RowForward(packed=True)),
    Job("rows, fetched weights", WEIGHTED, RowForward(fetch=True)),
    Job("stream, gathered", GATED, StreamForward(2, TWO)),
    Job("stream, tile loads", WEIGHTED, StreamForward(hints=LOOP, tma=True)),
    Job("stream, tile loads and stores", ALIGNED, StreamForward(hints=LOOP, tma=True, store=True)),
    Job("shared", SHARED_LAYER, SharedForward(TWO, (1024,), packed=True)),
    Job("shared, sums alone", SHARED_ADD, SharedForward(TWO, (512, 512), together=2)),
    Job("backward, gathered", NARROW, Backward((128,), 4, hints=TWO)),
    Job("backward, heads", HEADS, Backward((128,), 4, hints=TWO)),
    Job("backward, gate", GATED, Backward((1024,), hints=TWO, reread=True)),
    Job("backward, tile loads", ALIGNED, Backward((1024,), tma=True, hints=LOOP)),
    Job("backward, tile loads and stores", WEIGHTED, Backward((1024,), 1, True, LOOP, True)),
    Job("backward, terms, gathered", NARROW, Backward((128,), 4, hints=TWO), 2),
    Job("backward, terms, tile loads", WEIGHTED, Backward((1024,), tma=True, hints=LOOP), 3),
    Job("backward, shared", SHARED_LAYER, Backward((1024,), hints=TWO, packed=True)),
    Job("backward, shared, sums alone", SHARED_ADD, Backward((1024,), hints=TWO)),
)


def refusal(job: Job, target: Target) -> str | None:
    """Why a job cannot run on a GPU: an architecture without TMA has no tile loads."""
    spec = job.spec
    return job.config.refusal(Served(spec.hidden, spec.widest_item, spec.aligned, target))


def run(executor: Executor) -> Iterator[tuple[Job, str | None]]:
    """Runs each job, or says why it is left out.

    The memory of results is not filled before the kernels write it: initcheck looks for that. Plans
    are for so few multiprocessors that the blocks of persistent grids take several tiles.
    """
    target = Target(executor.target.arch, cases.MULTIPROCESSORS)
    for job in JOBS:
        reason = refusal(job, target)
        if not reason:
            launch(job, Inputs.random(job.spec, ROWS, executor.device), target, executor.run())
        yield job, reason


def launch(job: Job, inputs: Inputs, target: Target, run) -> None:
    spec, config = job.spec, job.config
    if config.direction == "forward":
        with forced(config):
            plan = plan_forward(spec, target, True)
        cutile.bind_forward(plan, run)(inputs.tensors(spec), EPS)
        return
    needs = every_gradient(spec)._replace(terms=job.terms, output=job.terms > 1)
    with forced(config):
        plan = plan_backward(spec, target, needs)
    more = [torch.zeros_like(inputs.dy)] * (job.terms - 1)
    tensors = inputs.dy, inputs.dsum, *inputs.saved(spec), *more
    cutile.bind_backward(plan, spec.kernel_reads, run)(tensors, EPS)


if __name__ == "__main__":
    for job, reason in run(Gpu()):
        print(f"{job.name}: {reason or 'ran'}")
    torch.cuda.synchronize()
