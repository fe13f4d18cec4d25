"""A training step on several processes: FSDP2 over one dimension of a mesh, and tensor parallelism
with sequence parallelism over the other. torchrun starts one process a GPU.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor import parallel as tp

from bench.models import Transformer
from bench.shapes import Shape

DIMENSIONS = ("fsdp", "tp")
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # that torchrun started
# What tensor parallelism leaves open: sizes, and where Qwen 3 and OLMo 2 have other norms.
FREE = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "eps", "theta", "batch", "length"]
FREE += ["qk_norm", "norm_after"]


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
        return "tp is for Llama 3 8B, Qwen3 8B and OLMo 2 7B"
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


def serve_cut_rows() -> None:
    """Have PyTorch's operations serve rows that are cut in the hidden dimension, for which there
    are no kernels. Whatever else the kernels do not serve still raises: see provenance.device.
    """
    from tilenorm import ReferenceWarning
    from tilenorm.ops.torch_ops.sharded_rows import SHARDED

    if os.environ.get("TILENORM_BACKEND") == "cutile":
        del os.environ["TILENORM_BACKEND"]
    warnings.filterwarnings("error", category=ReferenceWarning)
    warnings.filterwarnings("ignore", f".*: {SHARDED}", ReferenceWarning)


class ColumnParallel(tp.ParallelStyle):
    """A norm of rows of which each process has some columns: of x, of the output and of the weight.

    gathers: an nn.RMSNorm gets whole rows and the whole weight, and what it returns is cut again,
    because PyTorch has no norm of rows that are cut. tilenorm has.
    """

    def __init__(self, gathers: bool):
        self.gathers = gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = [Shard(-1)]

        def cut(_: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in norm.named_parameters(recurse=False):
                part = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
                norm.register_parameter(name, part)

        def taken(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            x = DTensor.from_local(inputs[0], mesh, columns, run_check=False)
            return x.redistribute(placements=[Replicate()]) if self.gathers else x

        def returned(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=columns).to_local()

        if self.gathers:
            module.forward = partial(_by_whole_weight, module)
        return distribute_module(module, device_mesh, cut, taken, returned)


def _by_whole_weight(norm: nn.RMSNorm, x: DTensor) -> DTensor:
    """The norm of whole rows. PyTorch 2.11's backward pass refuses a weight that is cut."""
    part: Any = norm.weight  # a DTensor
    weight = part.redistribute(placements=[Replicate()])
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def split(model: Transformer, mesh: DeviceMesh | None, gathers: bool) -> None:
    """Split a model over the dimension tp, by heads. The residual stream is cut in tokens.

    Every parameter becomes a DTensor. gathers: norms of a whole projection get whole rows.
    """
    if mesh is None or mesh["tp"].size() == 1:
        return
    rows, whole = Shard(1), Replicate()
    # A norm behind a part of a block returns what is added to the stream: this process's tokens.
    norm = tp.SequenceParallel(use_local_output=bool(model.shape.norm_after))
    heads: dict[str, tp.ParallelStyle] = {
        "head": tp.SequenceParallel(sequence_dim=2, use_local_output=True),  # (B, T, heads, D)
        "whole": ColumnParallel(gathers),
    }

    def gathered(*others: None) -> tp.PrepareModuleInput:
        before, wanted = (rows, *others), (whole, *others)
        return tp.PrepareModuleInput(input_layouts=before, desired_input_layouts=wanted)

    block = {
        "attention_norm": norm,
        "attention": gathered(None, None),
        **{f"attention.{name}": tp.ColwiseParallel() for name in "qkv"},
        "attention.output": tp.RowwiseParallel(output_layouts=rows),
        "ffn_norm": norm,
        "ffn": gathered(),
        **{f"ffn.{name}": tp.ColwiseParallel() for name in ("gate", "up")},
        "ffn.output": tp.RowwiseParallel(output_layouts=rows),
    }
    if model.shape.qk_norm:
        block |= {f"attention.{name}_norm": heads[model.shape.qk_norm] for name in "qk"}
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
