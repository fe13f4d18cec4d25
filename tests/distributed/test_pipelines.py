"""DDP, pipelines, local_map, and tensor parallelism where norms see plain tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tilenorm

from ..ops.helpers import ADD, call, incoming_of, random, step
from .modules import ALL, OURS, PYTORCHS, N, alone, block, rows_of, steps, trained
from .placing import P, alike, case, counted, placed
from .test_models import model as feed_forward
from .world import NAMES, device, mesh, on_every_rank

ONE = NAMES[0]


@pytest.mark.parametrize("static_graph", [False, True])
@on_every_rank
def test_ddp(static_graph):
    x = rows_of(dist.get_rank())

    def found(model):
        parallel = DistributedDataParallel(model, static_graph=static_graph)
        y, gradients, collectives = steps(parallel, x, 3)  # static_graph: the second is the first
        return y, {n.removeprefix("module."): g for n, g in gradients.items()}, collectives

    patched = block(PYTORCHS)
    tilenorm.patch(patched)
    *_, others = found(block(PYTORCHS))
    y, means = alone(block())
    for model in (block(), patched):
        other, gradients, collectives = found(model)
        assert torch.equal(other, y) and collectives == others
        torch.testing.assert_close(gradients, means)


# Schedules, and the stages that each of two ranks has.
SCHEDULES = {
    ScheduleGPipe: {0: (0,), 1: (1,)},
    Schedule1F1B: {0: (0,), 1: (1,)},
    ScheduleInterleavedZeroBubble: {0: (0, 2), 1: (1, 3)},
    ScheduleZBVZeroBubble: {0: (0, 3), 1: (1, 2)},
}
MICROBATCHES = 4


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(number)))


def loss(y, target):
    return (y - target).square().sum()


def run_schedule(cls, stages: list, x, target):
    """The output of the last stage on its rank, and None on the other."""
    options = {"loss_fn": loss, "scale_grads": False}
    given = stages[0] if cls in (ScheduleGPipe, Schedule1F1B) else stages
    schedule = cls(given, MICROBATCHES, **options)
    first, last = (any(getattr(s, f"is_{n}") for s in stages) for n in ("first", "last"))
    found = schedule.step(*([x] if first else []), **({"target": target} if last else {}))
    return found if last else None


def compare_stages(whole: nn.Module, modules: dict[str, nn.Module], y, x, target) -> None:
    """Outputs have the bits of one process; it adds up gradients of all microbatches at once."""
    expected = whole(x)
    loss(expected, target).backward()
    assert y is None or torch.equal(y, expected)
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            other = whole.get_parameter(f"{prefix}{name}")
            torch.testing.assert_close(parameter.grad, other.grad, msg=name)


@pytest.mark.parametrize("cls", SCHEDULES, ids=lambda cls: cls.__name__)
@on_every_rank
def test_schedules_of_two_ranks(cls):
    group = mesh(ONE).get_group()
    rank, places = dist.get_rank(group), SCHEDULES[cls]
    number = sum(map(len, places.values()))
    whole = blocks(number)
    x, target = (random(8, 6, N, device=device(), seed=s) for s in (1, 2))
    modules = {i: copy.deepcopy(whole[i]) for i in places[rank]}
    stages = [
        PipelineStage(m, i, number, torch.device(device()), group=group) for i, m in modules.items()
    ]
    y = run_schedule(cls, stages, x, target)
    compare_stages(whole, {f"{i}.": m for i, m in modules.items()}, y, x, target)


@pytest.mark.parametrize("patched", [False, True], ids=["tilenorm's modules", "patched"])
@on_every_rank
def test_a_traced_pipeline(patched):
    group = mesh(ONE).get_group()
    rank = dist.get_rank(group)
    whole = blocks(2)
    x, target = (random(8, 6, N, device=device(), seed=s) for s in (1, 2))
    model = nn.Sequential(*(block(PYTORCHS if patched else OURS) for _ in range(2)))
    if patched:
        assert len(tilenorm.patch(model).patched) == 4
    pipe = pipeline(
        model, mb_args=(x[: len(x) // MICROBATCHES],), split_spec={"1": SplitPoint.BEGINNING}
    )
    assert pipe.num_stages == 2
    stage = pipe.build_stage(rank, torch.device(device()), group)
    y = run_schedule(ScheduleGPipe, [stage], x, target)
    compare_stages(whole, {"": stage.submod}, y, x, target)


@pytest.mark.parametrize("name", NAMES)
@on_every_rank
def test_local_map(name):
    """The rows of each rank are a plain tensor inside."""
    given = case(ADD, 4, 8, N)
    rows = [Shard(1)] * mesh(name).ndim
    placements = alike(given, rows)
    sums = [P] * mesh(name).ndim
    names = [*given.tensors]

    def local(*tensors):
        assert all(type(t) is not torch.distributed.tensor.DTensor for t in tensors)
        return call(ADD, dict(zip(names, tensors, strict=True)))

    run = local_map(
        local,
        out_placements=(rows, rows),
        in_placements=tuple(placements[n] for n in names),
        in_grad_placements=tuple(sums if n in ("weight", "bias") else rows for n in names),
        device_mesh=mesh(name),
    )

    def function(form, tensors, **options):
        return run(*(tensors[n] for n in names))

    tensors = {n: placed(t, name, placements[n]) for n, t in given.tensors.items()}
    incoming = [placed(dy, name, rows) for dy in incoming_of(given.tensors)]
    found, collectives = counted(step, ADD, tensors, incoming, function=function)
    assert not collectives
    given.compare(found, given.alone())


@on_every_rank
def test_tensor_parallelism_without_sequence_parallelism():
    """The residual stream is whole on every rank, so that norms see plain tensors."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x = random(2, 6, N, device=device())

    def found(*kinds):
        model = parallelize_module(feed_forward(*kinds), mesh(ALL), plan)
        y, gradients, collectives = steps(model, x)
        return {"output": y} | gradients, collectives

    mine, collectives = found(*OURS)
    expected, others = found(*PYTORCHS)
    assert collectives == others
    torch.testing.assert_close(mine, expected)
    y, gradients = trained(feed_forward(*OURS), x)
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in mine.items()}
    torch.testing.assert_close(whole, {"output": y} | gradients)
