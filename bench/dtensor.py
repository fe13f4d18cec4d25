"""``python -m bench dtensor`` prints the host time of norms of DTensors, as a Markdown table.

It needs no GPU: one process is a mesh of one rank, and the tensors are so small that computing them
takes next to no time. The times are the thread's CPU time, medians, so that other processes change
them little. DTensor's share is a DTensor's time less a plain tensor's.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import tilenorm
from bench.provenance import processors

SHAPE = (4, 8, 64)
CALLS, SAMPLES, WARM_UP = 50, 21, 100
NORMS = {
    "rms_norm": {
        "PyTorch": lambda x, w: functional.rms_norm(x, SHAPE[-1:], w, 1e-6),
        "tilenorm": lambda x, w: tilenorm.rms_norm(x, SHAPE[-1:], w, 1e-6),
    },
    "layer_norm": {
        "PyTorch": lambda x, w: functional.layer_norm(x, SHAPE[-1:], w),
        "tilenorm": lambda x, w: tilenorm.layer_norm(x, SHAPE[-1:], w),
    },
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench dtensor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            print("\n".join(table()))
        finally:
            dist.destroy_process_group()
    return 0


def table() -> Iterator[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def on_mesh(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Replicate()])

    yield f"µs of CPU time a call, PyTorch {torch.__version__}, {processors()}."
    yield ""
    yield "| norm | by | direction | plain | DTensor | DTensor's share |"
    yield "| :-- | :-- | :-- | --: | --: | --: |"
    for norm, providers in NORMS.items():
        for direction, prepare in DIRECTIONS.items():
            for provider, function in providers.items():
                plain, cut = (
                    microseconds(prepare(function, *place(torch.randn(SHAPE), torch.ones(64))))
                    for place in (lambda *tensors: tensors, on_mesh)
                )
                cells = f"{plain:.0f} | {cut:.0f} | {cut - plain:.0f}"
                yield f"| {norm} | {provider} | {direction} | {cells} |"


def _inference(function: Callable, x: Tensor, w: Tensor) -> Callable:
    @torch.no_grad()
    def run():
        function(x, w)

    return run


def _both(function: Callable, x: Tensor, w: Tensor) -> Callable:
    x, w = x.requires_grad_(), w.requires_grad_()
    dy = torch.ones_like(x)
    return lambda: torch.autograd.grad(function(x, w), (x, w), dy)


DIRECTIONS = {"forward without grad": _inference, "forward and backward": _both}


def microseconds(call: Callable) -> float:
    for _ in range(WARM_UP):
        call()
    samples = []
    for _ in range(SAMPLES):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        samples.append((time.thread_time_ns() - start) / CALLS / 1000)
    return statistics.median(samples)
