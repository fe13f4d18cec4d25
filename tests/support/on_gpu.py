"""What the tests that need a GPU share. Importing it needs none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilenorm.launch.target import Target
from tilenorm.ops.passes.registry import device_of

from .calls import FAMILY, Form, call, step

OTHERS = [name for name in FAMILY if name != "rms_norm"]


def forms_and_widths(widths, others, also=()):
    """Parametrises with rms_norm over `widths`, and every other form over `others`: each new spec
    takes the compiler half a second. also: pairs of a form's name and a width.
    """
    pairs = [("rms_norm", n) for n in widths] + [(name, n) for name in OTHERS for n in others]
    return pytest.mark.parametrize(
        "form, n", [pytest.param(FAMILY[name], n, id=f"{name}-{n}") for name, n in (*pairs, *also)]
    )


def made(form: Form, rows: int, n: int, dtype=torch.bfloat16, other=None, device="cuda"):
    """The tensors of a form, made on the GPU, all of which require gradients; and incoming ones."""
    generator = torch.Generator(device).manual_seed(rows * 31 + n)

    def random(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    dtypes = {form.other: other or dtype}
    sizes = {"weight": (n,), "bias": (n,)}
    tensors = {
        name: random(*sizes.get(name, (rows, n)), dtype=dtypes.get(name, dtype)).requires_grad_()
        for name in form.names
    }
    outputs = [dtype] + ([dtypes["residual"]] if form.other == "residual" else [])
    return tensors, [random(rows, n, dtype=d) for d in outputs]


def train(
    form: Form, tensors: dict[str, Tensor], incoming: list[Tensor], function=call
) -> dict[str, Tensor]:
    """As `step`, with the gradients of the tensors that require one."""
    asked = [name for name, t in tensors.items() if t.requires_grad]
    return step(form, tensors, incoming, asked, function)


def capture(step: Callable[[], dict[str, Tensor]]) -> tuple[torch.cuda.CUDAGraph, dict]:
    """A CUDA graph of a step, and its results, which a replay fills."""
    stream = torch.cuda.Stream()  # the first step compiles, which a graph cannot hold
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def ops_seen(function) -> set[str]:
    """tilenorm's ops that the dispatcher called."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {e.name for e in profile.events() if e.name.startswith("tilenorm::")}


def target() -> Target:
    return device_of("cuda", 0).target
