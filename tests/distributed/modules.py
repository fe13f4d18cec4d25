"""What the tests of FSDP2, DDP and pipelines share: a model of norms, and a step of one process.

Nothing but norms computes with more than one element, so that each row's bits must be those of one
process, whichever rank has the row.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilenorm

from ..ops.helpers import random
from .placing import counted
from .world import NAMES, device

N = 32
FLAT = [name for name in NAMES if "x" not in name]
ALL = FLAT[-1]  # a mesh of all ranks
OURS = tilenorm.RMSNorm, tilenorm.LayerNorm
PYTORCHS = nn.RMSNorm, nn.LayerNorm


class Block(nn.Module):
    def __init__(self, first=OURS[0], second=OURS[1], **factory):
        super().__init__()
        self.first, self.second = first(N, **factory), second(N, **factory)

    def forward(self, x):
        return self.second(x + nn.functional.silu(self.first(x)))


def block(kinds=OURS) -> Block:
    """A block whose parameters are random numbers, the same on every rank."""
    model = Block(*kinds)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return model.to(device())


def rows_of(rank: int | None = None, dtype=torch.float32) -> Tensor:
    """A rank's rows of the batch, or the whole batch: a row for each rank, of 6 x N."""
    x = random(dist.get_world_size(), 6, N, dtype=dtype, device=device())
    return x if rank is None else x[rank : rank + 1]


def loss_of(y: Tensor) -> Tensor:
    return (y.float() * random(6, N, device=y.device, seed=8)).square().sum()


def trained(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and gradients of a step."""
    y = model(x)
    loss_of(y).backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def steps(model: nn.Module, x: Tensor, number: int = 1):
    """What `trained` gives of the last of some steps, and its collectives."""
    for _ in range(number):
        model.zero_grad()
        found, collectives = counted(trained, model, x)
    return *found, collectives


def alone(model: nn.Module, dtype=torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    """What one process gives: this rank's rows of the whole batch's output, and the mean of the
    gradients of each rank's rows.
    """
    ranks = range(dist.get_world_size())
    found = []
    for rank in ranks:
        model.zero_grad()
        found.append(trained(model, rows_of(rank, dtype))[1])
    mean = {n: sum(f[n].float() for f in found) / len(found) for n in found[0]}
    rank = dist.get_rank()
    return model(rows_of(dtype=dtype))[rank : rank + 1].detach(), mean
