"""The Llama step on several ranks, one GPU a rank: FSDP2, or tensor and sequence parallelism.

`torchrun --nproc-per-node 2 -m bench train --parallel fsdp` starts the ranks. Each rank runs each
variant in a worker process of its own, and these workers form a process group: NCCL's on GPUs, and
gloo's without.
"""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.models import Transformer

KINDS = ("fsdp", "tp")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def group(name: str, device: str, timeout_s: float) -> Iterator[str]:
    """A process group of the workers that have this name, and this worker's device.

    All groups of a run use torchrun's one store, in which the name keeps them apart.
    """
    if device != "cpu":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_s)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=serves, timeout=timeout)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.PrefixStore(name, store),
        rank=rank(),
        world_size=ranks(),
        timeout=timeout,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def cut_layers(model: Transformer, kind: str, device: str) -> None:
    """What has to happen before the norms are patched and the layers compiled: TP + SP."""
    if kind == "tp":
        _tensor_parallel(model, _mesh(device))


def shard(model: Transformer, kind: str, device: str) -> None:
    """What has to happen after that: FSDP2, of each layer and of the rest."""
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (*model.blocks, model.head):
            fully_shard(layer, mesh=_mesh(device))
        fully_shard(model, mesh=_mesh(device))


def of_each_rank(found: dict) -> list[dict]:
    """What each rank found, on every rank."""
    every: list[Any] = [None] * ranks()
    dist.all_gather_object(every, found)
    return every


def resident_peak() -> int:
    """The most bytes that this process had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _mesh(device: str):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(device).type, (ranks(),))


def _tensor_parallel(model: Transformer, mesh) -> None:
    """The residual stream is cut in the sequence. Norms are SequenceParallel, as in torchtitan."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows, whole = Shard(1), Replicate()

    def gathered(others: int) -> PrepareModuleInput:
        rest = (None,) * others
        return PrepareModuleInput(input_layouts=(rows, *rest), desired_input_layouts=(whole, *rest))

    for block in model.blocks:
        plan: dict[str, Any] = {"attention": gathered(2), "ffn": gathered(0)}
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        columns = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")
        plan |= {name: ColwiseParallel() for name in columns}
        for name in ("attention.output", "ffn.output"):
            plan[name] = RowwiseParallel(output_layouts=rows)
        parallelize_module(block, mesh, plan)
    plan = {"embedding": RowwiseParallel(input_layouts=whole, output_layouts=rows)}
    plan |= {"head.norm": SequenceParallel()}
    plan |= {"head.output": ColwiseParallel(input_layouts=rows, output_layouts=whole)}
    parallelize_module(model, mesh, plan)
    # What RowwiseParallel returns has not arrived yet. PyTorch 2.13's compiled layers give no
    # gradient to such an input, so the first layer gets a copy.
    model.embedding.register_forward_hook(lambda module, given, x: x.clone())
