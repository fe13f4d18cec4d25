"""Pipelines: outputs have the bits of one process, also in zero-bubble schedules."""

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

import tilenorm
from tests.support.calls import TORCH, random

from .test_wrappers import PYTORCHS, N, block
from .world import NAMES, device, mesh, on_every_rank

ONE = NAMES[0]
# Schedules, and the stages that each of two ranks has.
SCHEDULES = {
    Schedule1F1B: {0: (0,), 1: (1,)},
    ScheduleInterleavedZeroBubble: {0: (0, 2), 1: (1, 3)},
    ScheduleZBVZeroBubble: {0: (0, 3), 1: (1, 2)},
}
MICROBATCHES = 4
loss = nn.MSELoss(reduction="sum")
# PyTorch 2.9 and 2.11 ask a function of autograd's in Python for what it does not have.
ZERO_BUBBLE = pytest.mark.skipif(TORCH < (2, 13), reason="PyTorch errs in zero-bubble schedules")
EACH = [pytest.param(c, marks=ZERO_BUBBLE if "Zero" in c.__name__ else ()) for c in SCHEDULES]


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(number)))


def run_schedule(cls, stages: list, x, target):
    """The output of the last stage on its rank, and None on the other."""
    given = stages[0] if cls in (ScheduleGPipe, Schedule1F1B) else stages
    schedule = cls(given, MICROBATCHES, loss_fn=loss, scale_grads=False)
    first, last = (any(getattr(s, f"is_{n}") for s in stages) for n in ("first", "last"))
    found = schedule.step(*([x] if first else []), **({"target": target} if last else {}))
    return found if last else None


def compare_stages(whole: nn.Module, modules: dict[str, nn.Module], y, x, target) -> None:
    """Outputs have the bits of one process; it adds up gradients of all microbatches at once.

    The gradients have both signs, so their sums may be far smaller than they are.
    """
    expected = whole(x)
    loss(expected, target).backward()
    assert y is None or torch.equal(y, expected)
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            other = whole.get_parameter(f"{prefix}{name}")
            largest = other.grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("cls", EACH, ids=lambda cls: cls.__name__)
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


@on_every_rank
def test_a_traced_pipeline():
    group = mesh(ONE).get_group()
    rank = dist.get_rank(group)
    whole = blocks(2)
    x, target = (random(8, 6, N, device=device(), seed=s) for s in (1, 2))
    model = nn.Sequential(*(block(PYTORCHS) for _ in range(2)))
    assert len(tilenorm.patch(model).patched) == 4
    pipe = pipeline(
        model, mb_args=(x[: len(x) // MICROBATCHES],), split_spec={"1": SplitPoint.BEGINNING}
    )
    assert pipe.num_stages == 2
    stage = pipe.build_stage(rank, torch.device(device()), group)
    y = run_schedule(ScheduleGPipe, [stage], x, target)
    compare_stages(whole, {"": stage.submod}, y, x, target)
