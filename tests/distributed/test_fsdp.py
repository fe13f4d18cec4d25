"""FSDP2: a norm wrapped alone, dtypes, resharding, offload, meta, recomputation and compile."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import tilenorm

from ..ops.helpers import slow
from .modules import ALL, OURS, PYTORCHS, Block, alone, block, rows_of, steps, trained
from .world import INDUCTOR, device, mesh, on_every_rank

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
    *_, others = steps(sharded(block(PYTORCHS), **options), x, 2)
    assert found[2] == others and sum(others.values())
    return others


WRAPPED = [("float32", True, False), ("bfloat16, float32 weights", False, True)]
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


@pytest.mark.parametrize("order", ["patched, sharded", *slow("sharded, patched")])
@on_every_rank
def test_unpatch(order):
    """The bits and collectives of a model that was never patched."""
    model, x = block(PYTORCHS), rows_of(dist.get_rank())
    for step in order.split(", "):
        {"patched": tilenorm.patch, "sharded": sharded}[step](model)
    steps(model, x)
    assert tilenorm.unpatch(model) == ("first", "second")
    y, gradients, collectives = steps(model, x)
    other, others, expected = steps(sharded(block(PYTORCHS)), x)
    assert torch.equal(y, other) and collectives == expected and sum(expected.values())
    assert all(map(torch.equal, full(gradients).values(), full(others).values()))


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
