"""``python -m bench gemm`` measures matrix multiplications of a layer that also add a tensor.

A sum of gradients, or a residual and the output of a projection, can be added inside the matrix
multiplication, which then reads the addend C as well. This command measures how much of that read
shows in the time, beside the multiplications alone and the addition in a kernel of its own. It
prints the share of a read of C that shows, and what that says: sums of gradients are worth building
into the multiplications below a share of 0.6, and residuals if 20 µs are saved.

The ways run in turn, on the sizes of a model's layer in bfloat16, each checked against float32
first. ``addmm_`` in place halves C at each call, so that C stays finite: the factor costs no time.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench import provenance, record, report
from bench.lines import Gemm
from bench.shapes import LLAMA, MODELS, Shape, tiny
from bench.timing import HEAD_START, Timer, summarize

CHECKED_ROWS = 64
MOST_ERROR = 0.02  # of the norm of the result in float32, which bfloat16 misses by about 0.002
DEVIATION = 0.02

# site -> the factors of its products, and the tensor C that may be added to their sum. Each name is
# a tensor of Operands.
SITES = {
    "gate, up": ((("dg", "wg"), ("du", "wu")), None),
    "q, k, v": ((("dq", "wq"), ("dk", "wk"), ("dv", "wv")), None),
    "down": ((("h", "wd"),), "s"),
    "o": ((("a", "wo"),), "x"),
    "C": ((), "s"),
}


@dataclass(frozen=True)
class Way:
    """One way to compute a site. ``beta`` is the factor of C in the result, 0 without C.

    ``addends`` is how often a multiplication reads a tensor that it adds to its product.
    """

    site: str
    name: str
    run: Callable[[SimpleNamespace], Tensor | tuple[Tensor, ...]]
    beta: float = 0.0
    addends: int = 0


def _in_turn(first: tuple[Tensor, Tensor], *others: tuple[Tensor, Tensor]) -> Tensor:
    total = first[0] @ first[1]
    for a, b in others:
        total.addmm_(a, b)
    return total


WAYS = (
    Way("gate, up", "2 mm", lambda t: (t.dg @ t.wg, t.du @ t.wu)),
    Way("gate, up", "mm, addmm_", lambda t: _in_turn((t.dg, t.wg), (t.du, t.wu)), addends=1),
    Way("q, k, v", "3 mm", lambda t: (t.dq @ t.wq, t.dk @ t.wk, t.dv @ t.wv)),
    Way(
        "q, k, v",
        "mm, 2 addmm_",
        lambda t: _in_turn((t.dq, t.wq), (t.dk, t.wk), (t.dv, t.wv)),
        addends=2,
    ),
    Way("q, k, v", "cat of weights, 1 mm", lambda t: t.dqkv @ torch.cat((t.wq, t.wk, t.wv))),
    Way("down", "mm", lambda t: t.h @ t.wd),
    Way("down", "mm + add", lambda t: (t.h @ t.wd) + t.s, beta=1.0),
    Way("down", "addmm", lambda t: torch.addmm(t.s, t.h, t.wd), beta=1.0, addends=1),
    Way("down", "addmm_", lambda t: t.s.addmm_(t.h, t.wd, beta=0.5), beta=0.5, addends=1),
    Way("o", "mm", lambda t: t.a @ t.wo),
    Way("o", "mm + add", lambda t: (t.a @ t.wo) + t.x, beta=1.0),
    Way("o", "addmm", lambda t: torch.addmm(t.x, t.a, t.wo), beta=1.0, addends=1),
    Way("o", "addmm_", lambda t: t.x.addmm_(t.a, t.wo, beta=0.5), beta=0.5, addends=1),
    Way("C", "copy", lambda t: t.copy.copy_(t.s), beta=1.0),
)


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    device = provenance.device()
    made = provenance.describe_run(device, ["gemm", *argv], {})
    shape, tokens = MODELS[args.model].shape, args.tokens
    if device == "cpu":
        print(report.CPU_NOTICE, file=sys.stderr)
        shape, tokens = tiny(MODELS[args.model]).shape, min(tokens, 2 * CHECKED_ROWS)
    with record.writing(args.out, made) as (found, emit):
        given = operands(shape, tokens, device)
        for line in measured(given, sizes(shape, tokens), Timer(device), args):
            emit(line)
    print(report.render(found, args.markdown))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench gemm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gated = [name for name, model in MODELS.items() if model.shape.gated]
    parser.add_argument("--model", choices=gated, default=LLAMA)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=60, help="of all ways in turn; default: 60")
    parser.add_argument("--warm-up", type=int, default=10, help="rounds before; default: 10")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="start no round after this time"
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args(argv)
    for name, least in (("tokens", 1), ("rounds", 2), ("warm_up", 0)):
        if vars(args)[name] < least:
            parser.error(f"--{name.replace('_', '-')}: takes at least {least}")
    return args


def sizes(shape: Shape, tokens: int) -> str:
    return f"{tokens} tokens, hidden {shape.hidden}, ffn {shape.ffn}, {shape.narrow} of k and v"


def operands(shape: Shape, tokens: int, device: str) -> SimpleNamespace:
    """The tensors of WAYS: gradients and activations (tokens, n), and weights (n, hidden)."""
    make = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int) -> Tensor:
        size, dtype = (rows, columns), torch.bfloat16
        return torch.randn(size, generator=make, device=device, dtype=dtype) * DEVIATION

    hidden, ffn, narrow = shape.hidden, shape.ffn, shape.narrow
    inner = {"g": ffn, "u": ffn, "q": hidden, "k": narrow, "v": narrow}
    found = {f"d{name}": random(tokens, size) for name, size in inner.items()}
    found |= {f"w{name}": random(size, hidden) for name, size in inner.items()}
    found |= {"h": random(tokens, ffn), "wd": random(ffn, hidden)}
    found |= {"a": random(tokens, hidden), "wo": random(hidden, hidden)}
    found |= {"x": random(tokens, hidden), "s": random(tokens, hidden)}
    found["dqkv"] = torch.cat((found["dq"], found["dk"], found["dv"]), 1)
    found["copy"] = torch.empty_like(found["s"])
    return SimpleNamespace(**found)


def measured(
    given: SimpleNamespace, named: str, timer: Timer, args: argparse.Namespace
) -> Iterator[Gemm]:
    """A line for each way. A way whose result is wrong is not timed."""
    right = []
    for way in WAYS:
        error = wrong_by(way, given)
        if error <= MOST_ERROR:
            right.append(way)
        else:
            why = f"the result is wrong by {error:.3g} of its norm"
            yield Gemm(named, way.site, way.name, way.addends, "wrong", error=why)
    deadline = time.monotonic() + args.max_seconds
    samples = timed(right, given, timer, (args.warm_up, args.rounds), deadline)
    for way, times in zip(right, samples, strict=True):
        line = Gemm(named, way.site, way.name, way.addends)
        if len(times) < 2:
            yield Gemm(**vars(line) | {"status": "skipped", "error": "out of time"})
            continue
        result = summarize(times, "")
        found = {"median_us": result.median_us, "spread": result.spread, "samples": result.samples}
        yield Gemm(**vars(line) | found)


def wrong_by(way: Way, given: SimpleNamespace) -> float:
    """The error of the first rows of a way's result, as a share of the norm of the right ones."""
    products, addend = SITES[way.site]
    expected: Any = 0.0
    for a, b in products:
        expected = expected + getattr(given, a)[:CHECKED_ROWS].float() @ getattr(given, b).float()
    if way.beta:
        expected = expected + way.beta * getattr(given, addend)[:CHECKED_ROWS].float()
    found = way.run(given)
    parts = found if isinstance(found, tuple) else (found,)
    total: Any = sum(part[:CHECKED_ROWS].float() for part in parts)
    error = (total - expected).norm() / expected.norm()
    return math.inf if error.isnan() else error.item()


def timed(
    ways: Sequence[Way],
    given: SimpleNamespace,
    timer: Timer,
    rounds: tuple[int, int],
    deadline: float,
) -> list[list[float]]:
    """The microseconds of each way in each round after the rounds that warm up.

    Every second round runs the ways backwards. No round starts after the deadline.
    """
    found = [[] for _ in ways]
    warm_up, count = rounds
    for i in range(warm_up + count):
        if time.monotonic() >= deadline:
            break
        if not timer.on_cpu:
            torch.cuda._sleep(HEAD_START)  # the host queues the round meanwhile
        order = range(len(ways)) if i % 2 == 0 else range(len(ways) - 1, -1, -1)
        marks = [timer.mark()]
        for which in order:
            ways[which].run(given)
            marks.append(timer.mark())
        timer.wait(marks[-1])
        if i >= warm_up:
            for which, start, end in zip(order, marks[:-1], marks[1:], strict=True):
                found[which].append(timer.between(start, end))
    return found
