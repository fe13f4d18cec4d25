"""Blocks with drawn forwards, in which what runs is seen: in which order, and what it changes."""

from random import Random

import torch
from torch import nn

from .norms import N

NAMES = "xab"


class Observed(nn.Module):
    """A block whose parts say in `log` when they run. Some of them change what others read."""

    def __init__(self):
        super().__init__()
        self.norm, self.last, self.f = nn.RMSNorm(N), nn.LayerNorm(N), Logging()
        self.log = self.f.log = []
        self.probe, self.odd = Probe(self), Odd(self)
        self.reset()

    def reset(self):
        self.flag, self.scale, self.held = True, 0.5, None
        self.norm.weight.data.fill_(1)
        self.last.weight.data.fill_(2)
        self.log.clear()

    @property
    def gain(self):
        self.log.append("gain")
        return 0.5

    @property
    def changes(self):
        """Changes the norms, and a tensor that the forward has stored."""
        self.log.append("changes")
        self.norm.weight.data.mul_(1.5)
        self.last.weight.data.mul_(1.5)
        if self.held is not None:
            self.held.data.mul_(0.5)
        return 1.5

    def method(self, x, y=0.0):
        self.log.append("method")
        self.flag = not self.flag
        return x + y

    def write(self, x):
        self.log.append("write")
        x.data.add_(1)
        return x


class Logging(nn.Module):
    def forward(self, x, y=0.0):
        self.log.append("f")
        return 0.5 * x - y


class Probe:
    def __init__(self, block):
        self.block = block

    def __getattr__(self, name):
        self.block.log.append(name)
        return 0.25


class Odd:
    """Its truth is asked: that is seen, and changes another attribute."""

    def __init__(self, block):
        self.block = block

    def __bool__(self):
        self.block.log.append("odd")
        self.block.flag = not self.block.flag
        return self.block.flag


class Drawing:
    """Draws the source of a forward."""

    def __init__(self, seed: int):
        self.rng = Random(seed)

    def source(self) -> str:
        lines = ["x, a, b = x * 1, a * 1, b * 1", "flag = self.flag", *self.block(3)]
        return "\n    ".join(["def forward(self, x, a, b):", *lines, "return x, a, b"])

    def block(self, depth: int) -> list[str]:
        drawn = self.rng.choices((self.sum, self.branch, self.other, self.loop), (6, 2, 2, 1), k=2)
        return [line for draw in drawn for line in draw(depth)]

    def sum(self, depth: int) -> list[str]:
        """A sum, what stands behind it, and perhaps a norm of it."""
        name = self.rng.choice(NAMES)
        lines = [f"{name} = {self.expression(1)} + {self.expression(1)}"]
        for draw in self.rng.choices((None, self.copy, self.branch), (4, 1, 1), k=2):
            lines += draw(depth, name) if draw else []
        return lines + self.norm(name)

    def norm(self, name: str) -> list[str]:
        norm = self.around(f"self.{self.rng.choice(('norm', 'last'))}({name})", 2)
        heads = [f"{self.rng.choice(NAMES)} = "] * 4 + [f"{name} += ", f"return {name}, a, "]
        return [self.rng.choice(heads) + norm]

    def copy(self, depth: int, name: str) -> list[str]:
        value = self.rng.choice((name, name, "self.flag", "self.gain", "self.odd", "None"))
        return [f"{self.rng.choice(NAMES) if value == name else 'flag'} = {value}"]

    def branch(self, depth: int, name: str = "x") -> list[str]:
        lines = [f"if {self.test()}:"]
        for _ in range(self.rng.choice((1, 2))):
            lines += ["else:"] if len(lines) > 1 else []
            draw = self.rng.choice((self.block, self.sum, None, None)) if depth else None
            inner = draw(depth - 1) if draw else self.rng.choice((["pass"], self.norm(name)))
            lines += ["    " + line for line in inner]
        return lines

    def loop(self, depth: int) -> list[str]:
        head = self.rng.choice(["for _ in range(2):", "with torch.enable_grad():"])
        return [head, *("    " + line for line in self.block(depth - 1))] if depth else []

    def other(self, depth: int) -> list[str]:
        name, other, third = (self.rng.choice(NAMES) for _ in range(3))
        statements = (
            f"{name} = {self.expression(3)}",
            f"{name}, {other} = {other}, {third}",
            f"self.held = {name}",
            f"self.write({name})",
            f"self.flag = {self.rng.choice(('True', 'False'))}",
            f"if {self.test()}: return {name}, {other}, {third}",
        )
        return [self.rng.choice(statements)]

    def test(self) -> str:
        tests = (
            "self.flag", "not self.flag", "flag", "not flag", "self.f is None", "self.odd",
            "self.f is not None", "x is a", "self.gain > 1", "self.f", "self.flag and self.odd",
            "flag is None", "not self.odd", "self.f is not None and flag is None",
            "self.probe.truth", "self.method(0.0)", "self.held is None",
        )  # fmt: skip
        return self.rng.choice(tests)

    def expression(self, depth: int) -> str:
        name = self.rng.choice(NAMES)
        if not depth or self.rng.random() < 0.3:
            return name
        if self.rng.random() < 0.2:
            return f"self.{self.rng.choice(('norm', 'last'))}({name})"
        return self.around(self.expression(depth - 1), 1)

    def around(self, inner: str, depth: int) -> str:
        """An expression with another one in it, evaluated first or behind others."""
        for _ in range(self.rng.randint(0, depth)):
            name = self.rng.choice(NAMES)
            inner = self.rng.choice(
                (
                    f"({name} + {inner})",
                    f"({inner} + {name})",
                    f"(self.scale * {inner})",
                    f"(self.gain * {inner})",
                    f"(self.changes * {inner})",
                    f"(self.probe.size * {inner})",
                    f"(-{inner})",
                    f"self.f({inner})",
                    f"self.f({name}, {inner})",
                    f"self.f({name}, y={inner})",
                    f"self.f(y={inner}, x=self.f({name}))",
                    f"self.f(x={name}, y={inner})",
                    f"self.method({inner})",
                    f"self.method({name}, {inner})",
                    f"[{name}, {inner}][1]",
                    f"(self.f({name}) + {inner})",
                    f"({inner} if self.flag else {name})",
                    f"self.norm({inner} + {name})",
                )
            )
        return inner


def ran(block: Observed, inputs: list[torch.Tensor]) -> tuple[list, list, list]:
    """Outputs, what was seen, and gradients if PyTorch has them: no tensor was written to."""
    block.reset()
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = block(*leaves)
    log = [*block.log, block.flag]
    if {"write", "changes"} & {*log[:-1]}:
        return outputs, log, []
    total = sum((y * (n + 1)).sum() for n, y in enumerate(outputs))
    given = [*leaves, *block.parameters()]
    try:
        return outputs, log, list(torch.autograd.grad(total, given, allow_unused=True))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return outputs, log, []
