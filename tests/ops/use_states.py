"""Each state in which users call tilenorm, as one table; and the steps in these states."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilenorm

from .cuda_helpers import capture
from .uses import Outputs, Use


class State(NamedTuple):
    """around: the context of the forward pass. autocast: its dtype. change: of the function.
    compiles: whether `change` compiles it. step: runs a whole step. pretends: whether CPU tensors
    that pretend to be CUDA's can be in it.
    """

    around: Callable[[], AbstractContextManager] = nullcontext
    autocast: torch.dtype | None = None
    change: Callable[[Callable], Callable] = lambda function: function
    compiles: bool = False
    step: Callable[[Callable[[], Outputs]], Outputs] = lambda run: run()
    pretends: bool = True

    @property
    def has_gradients(self) -> bool:
        return self.around is nullcontext


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast("cuda", dtype), which switches itself off where there is no CUDA."""
    if dtype is None or torch.cuda.is_available():
        with torch.autocast("cuda", dtype) if dtype else nullcontext():
            yield
        return
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def compiled(compile: Callable, function: Callable) -> Callable:
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return compile(function, fullgraph=True, backend=backend)


def captured(run: Callable[[], Outputs]) -> Outputs:
    """The results of a replay of a step that a CUDA graph holds."""
    graph, results = capture(run)
    for tensor in results.values():
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return results


_B, _BY_CHECKPOINT = torch.bfloat16, lambda f: partial(checkpoint, f, use_reentrant=False)
_BY_TORCH, _BY_TILENORM = (partial(compiled, c) for c in (torch.compile, tilenorm.compile))
STATES = {
    "plain": State(),
    "no_grad": State(torch.no_grad),
    "inference_mode": State(torch.inference_mode),
    "autocast float16": State(autocast=torch.float16),
    "autocast bfloat16": State(autocast=_B),
    "autocast and no_grad": State(torch.no_grad, _B),
    "checkpoint": State(change=_BY_CHECKPOINT),
    "torch.compile": State(change=_BY_TORCH, compiles=True),
    "tilenorm.compile": State(change=_BY_TILENORM, compiles=True),
    "CUDA graph": State(step=captured, pretends=False),
    # PyTorch asks the tensors' device whether autocast is on.
    "checkpoint and autocast": State(autocast=_B, change=_BY_CHECKPOINT, pretends=False),
    "torch.compile and autocast": State(nullcontext, _B, _BY_TORCH, True, pretends=False),
    "CUDA graph and autocast": State(autocast=_B, step=captured, pretends=False),
}


def step(function: Callable[[], Outputs], leaves: dict[str, Tensor], around=nullcontext) -> Outputs:
    """The outputs, and the gradients of the leaves where there are any."""
    with around():
        outputs = function()
    results = {name: t.detach() for name, t in outputs.items()}
    used = {name: t for name, t in outputs.items() if t.requires_grad}
    if used:
        # Clones, because a gradient may be what came in, and a graph's results are overwritten.
        incoming = [
            _gradient(n, tuple(t.shape), t.dtype, t.device).clone() for n, t in used.items()
        ]
        grads = torch.autograd.grad([*used.values()], [*leaves.values()], incoming)
        results |= {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}
    return results


@cache
def _gradient(name: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that each dtype has."""
    generator = torch.Generator().manual_seed(len(name))
    return (torch.randint(-8, 9, shape, generator=generator) / 4).to(device, dtype)


def results_of(use: Use, state: State, tensors: dict[str, Tensor]) -> Outputs:
    """Outputs and gradients by name."""
    function, rows = use.bound(tensors)
    function = state.change(function)

    @contextmanager
    def around():
        with state.around(), autocast(state.autocast):
            yield

    with use.around():
        return state.step(lambda: step(lambda: function(*rows), tensors, around))
