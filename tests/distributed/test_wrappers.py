"""FSDP2, DDP and pipelines: each row has the bits that one process gives it.

Nothing but norms computes with more than one element, so that each row's bits must be those of one
process, whichever rank has the row.
"""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilenorm

from ..ops.helpers import TORCH, random, slow
from .placing import counted
from .world import INDUCTOR, NAMES, device, mesh, on_every_rank

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


def wrapped(precision: str, reshard: bool, offload: bool, patched: bool):
    policy, dtype, seen = PRECISIONS[precision]
    options = {"mp_policy": policy, "reshard_after_forward": reshard}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device() == "cuda")
    model = sharded(block(PYTORCHS if patched else OURS), **options)
    if patched:
        assert len(tilenorm.patch(model).patched) == 2
    x = rows_of(dist.get_rank(), dtype)
    found = steps(model, x, 2)
    one = block().to(seen)
    compare([found[0], {n: g.to(device()) for n, g in found[1].items()}], alone(one, dtype))
    # PyTorch's LayerNorm of a GPU takes no parameters of another dtype.
    kinds = OURS if device() == "cuda" and seen != dtype else PYTORCHS
    *_, others = steps(sharded(block(kinds), **options), x, 2)
    assert found[2] == others and sum(others.values())
    return others


WRAPPED = [("float32", True, False)]
WRAPPED += slow(*(p for p in product(PRECISIONS, [False], [False, True]) if p not in WRAPPED))


@pytest.mark.parametrize("precision, offload, patched", WRAPPED)
@on_every_rank
def test_a_norm_wrapped_alone(precision, offload, patched):
    """The bits of one process and the collectives of PyTorch's norms, resharded or not."""
    gathers = []
    for reshard in (True, False):
        kinds = wrapped(precision, reshard, offload, patched)
        gathers.append(sum(n for kind, n in kinds.items() if "gather" in kind))
    assert gathers[0] > gathers[1]


@pytest.mark.parametrize("offset", [1.0, *slow(0.0)])
@on_every_rank
def test_deferred_initialisation_on_meta(offset):
    kinds = [partial(kind, offset=offset) for kind in OURS]
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


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, *slow(True)])
@on_every_rank
def test_activation_checkpointing(reentrant):
    x = rows_of(dist.get_rank()).requires_grad_()
    model = sharded(block())
    y, gradients, _ = steps(Checkpointed(model, reentrant), x)
    gradients = {n.removeprefix("inner."): g for n, g in gradients.items()}
    compare((y, gradients), alone(block()))
    inside = sharded(block())
    inside.first.forward = partial(checkpoint, inside.first.forward, use_reentrant=reentrant)
    compare(steps(inside, x), alone(block()))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
@on_every_rank
def test_compiled_layers(backend, precision):
    """Patched, compiled and then sharded, each by layer: as torchtitan does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy, dtype, seen = PRECISIONS[precision]
    model, x = block(PYTORCHS), rows_of(dist.get_rank(), dtype)
    tilenorm.patch(model)
    model.first.compile(backend=backend, fullgraph=True)
    model.second.compile(backend=backend, fullgraph=True)
    sharded(model, mp_policy=policy)
    compare(trained(model, x), alone(block().to(seen), dtype))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


ONE = NAMES[0]


@pytest.mark.parametrize("static_graph", [True, *slow(False)])
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
# PyTorch 2.9 and 2.11 ask a function of autograd's in Python for what it does not have.
ZERO_BUBBLE = pytest.mark.skipif(TORCH < (2, 13), reason="PyTorch errs in zero-bubble schedules")
EACH_SCHEDULE = pytest.mark.parametrize(
    "cls",
    [pytest.param(c, marks=ZERO_BUBBLE if "Zero" in c.__name__ else ()) for c in SCHEDULES],
    ids=lambda cls: cls.__name__,
)


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


@EACH_SCHEDULE
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


@pytest.mark.parametrize("patched", [True, *slow(False)], ids=["patched", "tilenorm's modules"])
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
