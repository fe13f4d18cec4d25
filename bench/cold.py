"""A call in the cold: other work runs before each phase, as it does in a model's step.

A loop over one call keeps the code of the call in the CPU's caches, and measures less than the call
costs in a step.
"""

import json
import re
import textwrap
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench import timing
from bench.check import as_tuple

MEMORY = 8 << 20  # bytes, more than a core's own caches
SMALL = "abs argmax amax amin ceil clone cos cumsum erf exp expm1 flatten floor isnan log1p mean mm"
SMALL += " mul neg reciprocal relu round sigmoid sign sin softmax sqrt square std sum t tanh tril"
SMALL += " triu var"  # operations of PyTorch
ARGUMENTS = {"cumsum": (0,), "softmax": (0,)}


class Cold:
    """A call of a provider. Each sample has the microseconds of its phases.

    The whole is a forward and its backward with other work between them. The GPU is idle when a
    phase starts, so that the phase waits for nothing.
    """

    def __init__(self, provider: Callable, leaves: list[Tensor], grads: list[Tensor], device: str):
        self.provider, self.leaves, self.grads = provider, leaves, grads
        self.device = device
        self.memory, self.bytes = bytearray(MEMORY), bytes(MEMORY)
        self.little = torch.rand(32, 32, device=device)

    def __call__(self) -> dict[str, float]:
        for leaf in self.leaves:
            leaf.grad = None
        with torch.no_grad():
            _, alone = self._timed(self.provider, *self.leaves)
        outputs, forward = self._timed(self.provider, *self.leaves)
        _, backward = self._timed(torch.autograd.backward, as_tuple(outputs), self.grads)
        us = {"forward without grad": alone, "forward": forward, "backward": backward}
        return us | {"forward and backward": forward + backward}

    def _timed(self, call: Callable, *arguments):
        self._other_work()
        timing.idle(self.device)
        start = time.perf_counter()
        result = call(*arguments)
        return result, (time.perf_counter() - start) * 1e6

    def _other_work(self) -> None:
        self.memory[:] = self.bytes
        for name in SMALL.split():
            others = (self.little,) if name in ("mm", "mul") else ARGUMENTS.get(name, ())
            getattr(torch, name)(self.little, *others)
        text = json.dumps({"some": [1, 2.5, {"keys": None}], "others": "a text of some words " * 9})
        textwrap.fill(re.sub("[aeiou]+", "-", json.loads(text)["others"]), 20)
