"""FSDP2 and DDP: each row has the bits that one process gives it.

Nothing but norms computes with more than one element, so that each row's bits must be those of one
process, whichever rank has the row.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support.calls import random

from .placing import counted
from .world import NAMES, NEEDS_COMPILER, device, mesh, on_every_rank, slow_but_first

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


BF16, F32 = torch.bfloat16, torch.float32
# The policy, and the dtypes of the activations and of the weights that a forward sees.
PRECISIONS = {
    "float32": (MixedPrecisionPolicy(), F32, F32),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32), BF16, BF16),
    "bfloat16, float32 weights": (MixedPrecisionPolicy(cast_forward_inputs=False), BF16, F32),
}


def sharded(model: Block, **options) -> Block:
    """The first norm is wrapped alone, the second with the rest."""
    options = {"mesh": mesh(ALL), **options}
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def full(gradients: dict) -> dict:
    return {n.replace("_orig_mod.", ""): g.full_tensor() for n, g in gradients.items()}


def compare(found, expected) -> None:
    """Rows have the bits of one process; the sum over the ranks of gradients has its own order."""
    (y, gradients, *_), (other, means) = found, expected
    assert torch.equal(y, other)
    torch.testing.assert_close(full(gradients), means)


@pytest.mark.parametrize(
    "precision, patched",
    slow_but_first([("float32", False), ("bfloat16", True), ("bfloat16, float32 weights", False)]),
)
@on_every_rank
def test_a_norm_wrapped_alone(precision, patched):
    """The bits of one process and the collectives of PyTorch's norms, resharded or not."""
    policy, dtype, seen = PRECISIONS[precision]
    x, expected = rows_of(dist.get_rank(), dtype), alone(block().to(seen), dtype)
    # PyTorch's LayerNorm of a GPU takes no parameters of another dtype.
    kinds, gathers = OURS if device() == "cuda" and seen != dtype else PYTORCHS, []
    for reshard in (True, False):
        options = {"mp_policy": policy, "reshard_after_forward": reshard}
        model = sharded(block(PYTORCHS if patched else OURS), **options)
        if patched:
            assert len(tilenorm.patch(model).patched) == 2
        found = steps(model, x, 2)
        compare(found, expected)
        *_, others = steps(sharded(block(kinds), **options), x, 2)
        assert found[2] == others and sum(others.values())
        gathers.append(sum(n for kind, n in others.items() if "gather" in kind))
    assert gathers[0] > gathers[1]


@on_every_rank
def test_deferred_initialisation_on_meta():
    kinds = [partial(kind, offset=1.0) for kind in OURS]
    with torch.device("meta"):
        model = sharded(Block(*kinds))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=device())
    for module in (model.first, model.second):
        module.reset_parameters()
    one = Block(*kinds).to(device())
    for name, parameter in one.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
    compare(steps(model, rows_of(dist.get_rank())), alone(one))


@on_every_rank
def test_activation_checkpointing():
    """Of a norm whose weight is gathered anew for its backward pass."""
    model = sharded(block())
    model.first.forward = partial(checkpoint, model.first.forward, use_reentrant=False)
    compare(steps(model, rows_of(dist.get_rank()).requires_grad_()), alone(block()))


@pytest.mark.slow
@NEEDS_COMPILER
@on_every_rank
def test_compiled_layers():
    """Patched, compiled and then sharded, each by layer: as torchtitan does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy, dtype, seen = PRECISIONS["bfloat16"]
    model, x = block(PYTORCHS), rows_of(dist.get_rank(), dtype)
    tilenorm.patch(model)
    model.first.compile(fullgraph=True)
    model.second.compile(fullgraph=True)
    sharded(model, mp_policy=policy)
    compare(trained(model, x), alone(block().to(seen), dtype))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@on_every_rank
def test_ddp():
    x = rows_of(dist.get_rank())

    def found(model):
        parallel = DistributedDataParallel(model, static_graph=True)
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
