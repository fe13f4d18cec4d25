"""Where a plan runs in the tests: the interpreter on CPU tensors, or the GPU that is here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tilenorm.launch.plan import Needs, plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

from . import cases, interpreter, oracle

EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """What a norm takes. rstd is the oracle's, so that the backward pass is tested alone."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor
    eps: float = EPS

    @classmethod
    def random(cls, spec: NormSpec, rows: int, device: str, seed: int = 0) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)

        def normal(dtype: str | None, *shape: int) -> Tensor | None:
            if dtype is None:
                return None
            values = torch.randn(shape, generator=generator)
            return values.to(getattr(torch, dtype)).to(device)

        x, dy = (normal(spec.dtype, rows, spec.hidden) for _ in range(2))
        return cls(x, normal(spec.weight, spec.hidden), normal(spec.bias, spec.hidden), dy)

    def truth(self, spec: NormSpec) -> dict[str, oracle.Truth]:
        return oracle.rms_norm(*self._arguments(spec))

    def own(self, spec: NormSpec) -> dict[str, Tensor]:
        return oracle.torch_own(*self._arguments(spec))

    def rstd(self, spec: NormSpec) -> Tensor:
        rows = self.x.reshape(-1, spec.hidden).double()
        return (rows.square().mean(1) + self.eps).rsqrt().float()

    def _arguments(self, spec: NormSpec) -> tuple:
        return self.x, self.weight, self.bias, spec.hidden, self.eps, spec.offset, self.dy


class Executor:
    """Plans for `target`, allocates on `device` and runs through tilenorm.ops.cutile."""

    name: str
    device: str
    target: Target

    def run(self, **how) -> Callable:
        """A function that runs a plan's calls."""
        raise NotImplementedError

    def forward(self, spec: NormSpec, inputs: Inputs, save: bool = True, **how):
        """y and rstd; memory that the kernels did not write is NaN."""
        plan = plan_forward(spec, self.target, save)
        run = self.run(**how)
        with _poisoned():
            return cutile.forward(plan, inputs.x, inputs.weight, inputs.bias, inputs.eps, run=run)

    def backward(
        self, spec: NormSpec, inputs: Inputs, needs: Needs | None = None, **how
    ) -> dict[str, Tensor]:
        """Those of dx, dw, db that are needed (by default all there are), by name."""
        plan = plan_backward(spec, self.target, needs or every_gradient(spec))
        run = self.run(**how)
        rstd = inputs.rstd(spec)
        with _poisoned():
            found = cutile.backward(
                plan, inputs.dy, inputs.x, inputs.weight, inputs.bias, rstd, run=run
            )
        names = ("dx", "dw", "db")
        return {name: t for name, t in zip(names, found, strict=True) if t is not None}

    def rows_beyond_grid(self, spec: NormSpec, direction: str) -> int:
        """So many rows that every block of a looping kernel takes two tiles, and some a part."""
        if direction == "forward":
            return 2 * getattr(plan_forward(spec, self.target, True).config, "rows", 1) + 1
        plan = plan_backward(spec, self.target, every_gradient(spec))
        return 2 * plan.blocks(1 << 30) * getattr(plan.config, "rows", 1) + 3


class Interpreter(Executor):
    """The function under each kernel, block by block, on CPU tensors."""

    device = "cpu"

    def __init__(self, arch: str):
        self.name = f"interpreter_{arch}"
        self.target = cases.target(arch)

    def run(self, fill: float = float("nan"), order=None) -> Callable:
        """fill: what undefined padding reads as. order: of the blocks, as interpreter.launch."""

        def run(calls, index) -> None:
            for kernel, grid, arguments in calls:
                interpreter.launch(grid, kernel, arguments, fill=fill, order=order)

        return run


class Gpu(Executor):
    """The current GPU, with the plans it would get outside the tests."""

    name = "gpu"
    device = "cuda"

    def __init__(self):
        from tilenorm.ops.registry import device_of

        self.target = device_of("cuda", torch.cuda.current_device()).target

    def run(self) -> Callable:
        return cutile.on_device


def every_gradient(spec: NormSpec) -> Needs:
    return Needs(True, spec.weight is not None, spec.bias is not None)


@contextmanager
def _poisoned() -> Iterator[None]:
    """torch.empty gives NaN: PyTorch's own switch, which reaches every way of allocating."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
