"""Kernels that start before the kernel before them has ended: a call reads what the call before has
written, and writes where that call has read, whatever kind of work lies between and wherever a
graph joins streams.
"""

from random import Random

import pytest
import torch
from torch import Tensor

import tilenorm
from tests.support.calls import NEEDS_GPU, random, same
from tests.support.on_gpu import capture
from tilenorm.launch.tuned.rules import MODULATED_ROW

pytestmark = NEEDS_GPU
STEPS, SEEDS, HEAD = 24, 16, 64
ROWS, HIDDEN = (1, 8, 128, 300, 512, 5000), (64, 1001, 1024, 4096, 8192, 16384, 65536)


class Chain:
    """Drawn steps, each of which takes what the one before has made, and frees it."""

    def __init__(self, seed: int):
        draw = Random(seed)
        self.rows, self.n = draw.choice(ROWS), draw.choice(HIDDEN)
        dtype = draw.choice((torch.bfloat16, torch.float32))
        shape = (self.rows, self.n)
        self.x, self.other, self.dy = (
            random(*shape, dtype=dtype, seed=s, device="cuda") for s in range(3)
        )
        self.weight = random(self.n, dtype=dtype, seed=3, device="cuda").requires_grad_()
        angles = random(self.rows, HEAD, dtype=dtype, seed=4, device="cuda")
        self.tables = angles.cos(), angles.sin()
        kinds = [self.norm, self.layer_norm, self.of_sum, self.gradient, self.copied, self.filled]
        kinds += [self.quantized] + [self.modulated] * (self.n <= MODULATED_ROW)
        kinds += [self.rotated] * (self.n % HEAD == 0)
        self.steps = [draw.choice(kinds) for _ in range(STEPS)]

    def norm(self, x: Tensor) -> Tensor:
        return tilenorm.rms_norm(x, (self.n,), self.weight.detach())

    def layer_norm(self, x: Tensor) -> Tensor:
        return tilenorm.layer_norm(x, (self.n,))

    def of_sum(self, x: Tensor) -> Tensor:
        y, total = tilenorm.add_rms_norm(x, self.other, (self.n,), self.weight.detach())
        return self.norm(y).add_(total)

    def gradient(self, x: Tensor) -> Tensor:
        """Of kernels that follow each other: forward, backward, and the sum of dW."""
        x = x.requires_grad_()
        y = tilenorm.rms_norm(x, (self.n,), self.weight)
        dx, dw = torch.autograd.grad(y, (x, self.weight), self.dy)
        return tilenorm.rms_norm(dx, (self.n,), dw)

    def modulated(self, x: Tensor) -> Tensor:
        """Of one group: forward, backward, and the sums of the group."""
        x = x.requires_grad_()
        scale = self.other[:1].clone().requires_grad_()
        y = tilenorm.modulated_rms_norm(x, (self.n,), scale, weight=self.weight)
        dx, dscale = torch.autograd.grad(y, (x, scale), self.dy)
        return tilenorm.rms_norm(dx, (self.n,), dscale[0])

    def rotated(self, x: Tensor) -> Tensor:
        """Of heads, and their backward pass."""
        heads = x.view(self.rows, -1, HEAD).requires_grad_()
        weight = self.weight.detach()[:HEAD].requires_grad_()
        y = tilenorm.rms_norm_rope(heads, (HEAD,), *self.tables, weight)
        dx, dw = torch.autograd.grad(y, (heads, weight), self.dy.view_as(y))
        return tilenorm.rms_norm(dx, (HEAD,), dw).view_as(x)

    def quantized(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()
        how = {"scaling": "row", "return_output": True}
        made = tilenorm.rms_norm_quantized(x, (self.n,), weight, **how)
        return self.norm(made.output) + made.q.to(x.dtype)

    def copied(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x)

    def filled(self, x: Tensor) -> Tensor:
        """What a norm has read is overwritten behind it."""
        y = self.norm(x)
        x.zero_()
        return y

    def run(self, waits: bool) -> dict[str, Tensor]:
        """The sum of what each step has made, and what the last one has."""
        x, made = self.x.clone(), {}
        for number, step in enumerate(self.steps):
            x = step(x.detach()).detach()
            made[f"{number} {step.__name__}"] = x.sum(dtype=torch.float32)
            if waits:
                torch.cuda.synchronize()
        return made | {"last": x}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_call_follows_another(seed):
    chain = Chain(seed)
    expected = chain.run(waits=True)
    for _ in range(3):
        assert same(chain.run(waits=False), expected)
    graph, found = capture(lambda: chain.run(waits=False))
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, expected)


@pytest.mark.parametrize("rows, n", [(8, 4096), (512, 4096), (4096, 1024), (64, 65536)])
def test_a_call_follows_several_streams(rows, n):
    """In a graph, a call whose streams join, and calls of several streams that read one tensor."""
    x, w = (random(*shape, seed=len(shape), device="cuda") for shape in ((rows, n), (n,)))
    host = torch.empty(rows, n, dtype=x.dtype, pin_memory=True).copy_(x.flip(0))

    def norm(x: Tensor) -> Tensor:
        return tilenorm.rms_norm(x, (n,), w)

    def step() -> dict[str, Tensor]:
        main, sides = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(3)]
        first, halves, from_host = norm(x), torch.empty_like(x), torch.empty_like(x)
        for side in sides:
            side.wait_stream(main)
        with torch.cuda.stream(sides[0]):
            second = norm(norm(first))
        with torch.cuda.stream(sides[1]):
            halves.zero_()
            halves.copy_(first)
            halves.mul_(0.5)
        with torch.cuda.stream(sides[2]):
            from_host.copy_(host, non_blocking=True)
        for side in sides:
            main.wait_stream(side)
        third, _ = tilenorm.add_rms_norm(second, halves, (n,), w)
        return {"third": third, "of host": norm(from_host), "last": norm(third)}

    expected = step()
    torch.cuda.synchronize()
    graph, found = capture(step)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, expected)
