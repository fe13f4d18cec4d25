"""A training step on several processes: FSDP2 over one dimension of a mesh, and tensor parallelism
with sequence parallelism over the other. torchrun starts one process a GPU.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from bench.models import Transformer
from bench.shapes import Shape

DIMENSIONS = ("fsdp", "tp")
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # that torchrun started
# The sizes that tensor parallelism leaves open; the stages are those of Llama 3.
FREE = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "eps", "theta", "batch", "length"]


def sizes(text: str) -> dict[str, int]:
    """The value of --parallel: fsdp=4,tp=2, or one of the two."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    if not found or found.keys() - set(DIMENSIONS) or not all(n.isdigit() for n in found.values()):
        raise argparse.ArgumentTypeError(f"takes fsdp=N,tp=N or one of them, got {text}")
    return {name: int(found.get(name, 1)) for name in DIMENSIONS}


def unserved(shape: Shape, asked: dict[str, int], whole: bool) -> str | None:
    """Why a model is not trained so, or None."""
    size = asked["fsdp"] * asked["tp"]
    if size != PROCESSES:
        return f"start {size} processes: torchrun --nproc-per-node {size} -m bench train …"
    if whole:
        return "--whole is for one process"
    if asked["tp"] > 1 and Shape(**{name: vars(shape)[name] for name in FREE}) != shape:
        return "tp is for models of Llama 3's form"
    return None


@contextmanager
def joined(device: str) -> Iterator[int]:
    """The rank of this process among those of torchrun. CPU tensors are sent without the GPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name may be unknown
    if device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def split(model: Transformer, mesh: DeviceMesh | None) -> None:
    """Split a model of Llama 3's form over the dimension tp. The residual stream is cut in tokens.

    Every parameter becomes a DTensor.
    """
    if mesh is None or mesh["tp"].size() == 1:
        return
    rows, whole = Shard(1), Replicate()

    def gathered(*others: None) -> tp.PrepareModuleInput:
        before, wanted = (rows, *others), (whole, *others)
        return tp.PrepareModuleInput(input_layouts=before, desired_input_layouts=wanted)

    block = {
        "attention_norm": tp.SequenceParallel(),
        "attention": gathered(None, None),
        **{f"attention.{name}": tp.ColwiseParallel() for name in "qkv"},
        "attention.output": tp.RowwiseParallel(output_layouts=rows),
        "ffn_norm": tp.SequenceParallel(),
        "ffn": gathered(),
        **{f"ffn.{name}": tp.ColwiseParallel() for name in ("gate", "up")},
        "ffn.output": tp.RowwiseParallel(output_layouts=rows),
    }
    ends = {
        "embedding": tp.RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "head.norm": tp.SequenceParallel(),
        "head.output": tp.ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    for layer in model.blocks:
        tp.parallelize_module(layer, mesh["tp"], block)
    tp.parallelize_module(model, mesh["tp"], ends)


def sharded(model: Transformer, mesh: DeviceMesh | None) -> None:
    """Shard a model over the dimension fsdp, layer by layer. Sums of gradients are float32.

    Raises ValueError for a parameter that is not cut evenly: FSDP would pad it in each variant.
    """
    if mesh is None or (size := mesh["fsdp"].size()) == 1:
        return
    for name, parameter in model.named_parameters():
        if (rows := len(local(parameter))) % size:
            raise ValueError(f"{name} has {rows} rows, which fsdp={size} cuts unevenly")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["fsdp"], mp_policy=policy)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total(values: Tensor) -> Tensor:
    """The sum over all processes, or the values of the only one."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def agreed(answer: bool) -> bool:
    """What the first process answers: all go on, or none does."""
    if not dist.is_initialized():
        return answer
    sent = torch.tensor(answer)
    dist.broadcast(sent, 0)
    return bool(sent)


def of_all(value: Any) -> list:
    """The value of each process."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
