"""``python -m bench host`` measures what a norm costs the host, on shapes that a GPU does at once.

call   a loop over one call, with its code in the CPU's caches: a forward without grad, a forward,
       and a forward with its backward, by the clock and of all threads
cold   the same phases of a call, each behind other work, in rounds in which providers take turns
step   twelve norms with a product behind each, as one function, which compilers get whole: a norm
       costs what is between two providers, divided by twelve
model  whole steps of models, in rounds in which the variants take turns: see bench train

The record says what served tilenorm's calls on the host. On a CPU the models are tiny.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from bench import command, provenance, steps, timing, turns
from bench.cases import AROUND, MODULATED, OPS, PLAIN
from bench.check import as_tuple
from bench.cold import Cold
from bench.command import Run
from bench.op import Op
from bench.pair import VARIANTS
from bench.providers import PROVIDERS
from bench.record import Host, Turns
from bench.shapes import MODELS
from bench.text import first_line

N, STEP_N, NORMS = 1024, 512, 12
WAYS = ("call", "cold", "step", "model")
ROUNDS, COLD_ROUNDS = 3, 200
MEASURED = (*PLAIN, *AROUND, "head_rms_norm", *MODULATED)
# What computes a step as a whole, by the provider whose function is in it.
STEPS = {"torch": "compile", "tilenorm": "tilenorm-compile"}


def main(argv: list[str]) -> int:
    peers = ("torch", "tilenorm", "liger")
    parser = command.parser("host", __doc__, ops=MEASURED, op=PLAIN, provider=peers)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=tuple(steps.SIZES))
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=steps.VARIANTS)
    text = f"of what takes turns; default: {COLD_ROUNDS} calls, {steps.ROUNDS} steps of a model"
    parser.add_argument("--rounds", type=int, help=text)
    args = parser.parse_args(argv)
    deadline = time.time() + args.max_seconds
    ways = [way for way in args.way if way != "model"]
    with command.running(args, ["host", *argv], args.op if ways else ()) as run:
        for op in map(OPS.get, args.op if ways else ()):
            for way in ways:
                names = run.present[op.name]
                if way == "step":
                    names = [name for pair in STEPS.items() if pair[0] in names for name in pair]
                if way == "cold":
                    lines = cold(op, names, run, args.rounds or COLD_ROUNDS)
                else:
                    lines = times(op, names, run, way, command.told)
                for found in lines:
                    run.emit(found)
        for found in steps.lines(args, run.device, deadline) if "model" in args.way else ():
            run.emit(found)
    return 0


def line(op: Op, provider: str, way: str, **fields) -> Host:
    """A line of the record, by default without its numbers."""
    where = op.small(STEP_N if way == "step" else N).shape
    return Host(**where, provider=provider, way=way, path=provenance.host_path(), **fields)


def cold(op: Op, names: Sequence[str], run: Run, rounds: int) -> Iterator[Turns]:
    """The phases of a call of each provider behind other work."""
    leaves, grads, load = _given(op, run.device, "cold")
    samplers = {name: Cold(load(name), leaves, grads, run.device) for name in names}
    case = op.small(N)
    command.told(label := f"{op.name}, {case.dtype}, {case.m} x {case.n}")
    for name, fields in turns.taken(samplers, rounds, run.late).items():
        yield Turns("cold", label, "torch", name, path=provenance.host_path(), **fields)


def times(op: Op, names: Sequence[str], course: Run, way: str, step: Callable) -> list[Host]:
    """The host times of all providers: each is the least median of several rounds.

    The providers take turns in every round, because the host of a virtual machine may be slow for
    seconds. What there was no time for is left out.
    """
    leaves, grads, load = _given(op, course.device, way)
    calls = {"forward": _forward}
    if op.trained:
        calls |= {"forward_grad": _forward_grad, "forward_backward": _both}
    found, loaded, errors = {name: {} for name in names}, {}, {}
    for turn in range(ROUNDS):
        for name, least in found.items():
            if course.late() or name in errors:
                continue
            if turn == 0:
                step(f"{op.name} host time of a {way} {name}")
            try:
                provider = loaded[name] = loaded.get(name) or load(name)
                for field, call in calls.items():
                    taken = timing.host(partial(call, provider, leaves, grads), course.device)
                    least[field] = min(taken, least.get(field, taken), key=itemgetter("us"))
            except Exception as error:
                errors[name] = first_line(error)
    return [
        line(op, name, way, error=errors.get(name, ""), **_fields(least))
        for name, least in found.items()
        if least or name in errors
    ]


def _fields(least: dict[str, dict[str, float]]) -> dict[str, float]:
    """Those of a Host, given what was measured of each kind of a call."""
    times = {f"{of}_{key}": us for of, taken in least.items() for key, us in taken.items()}
    spreads = [times.pop(f"{of}_spread") for of in least]
    return times | ({"spread": max(spreads)} if spreads else {})


def _given(op: Op, device: str, way: str) -> tuple[list[Tensor], list[Tensor], Callable]:
    """The inputs, the gradients of the outputs, and what loads a provider by its name."""
    case = op.small(STEP_N if way == "step" else N)
    leaves, grads = op.made(case, device), op.output_grads(case, device)
    if way != "step":
        return leaves, grads, lambda name: PROVIDERS[name].load(op)
    product = torch.randn(NORMS, STEP_N, STEP_N, device=device) * STEP_N**-0.5
    leaves.append(product.to(grads[0].dtype).requires_grad_())
    return leaves, grads[:1], partial(_step, op)


def _step(op: Op, name: str) -> Callable:
    """Norms with products behind them, by a provider's function, compiled or not."""
    inner = {compiled: plain for plain, compiled in STEPS.items()}.get(name, name)
    function = PROVIDERS[inner].load(op)

    def step(x: Tensor, *rest: Tensor) -> Tensor:
        *rest, products = rest
        for product in products.unbind():
            x = as_tuple(function(x, *rest))[0] @ product
        return x

    if inner == name:
        return step
    torch._dynamo.reset()
    return torch.compile(step, dynamic=False)


def _forward(provider: Callable, leaves: list[Tensor], grads: list[Tensor]) -> None:
    with torch.no_grad():
        provider(*leaves)


def _forward_grad(provider: Callable, leaves: list[Tensor], grads: list[Tensor]) -> None:
    """It saves what a backward needs."""
    provider(*leaves)


def _both(provider: Callable, leaves: list[Tensor], grads: list[Tensor]) -> None:
    """As in a training step. torch.autograd.grad would ask for a part of the graph."""
    for leaf in leaves:
        leaf.grad = None
    outputs = as_tuple(provider(*leaves))
    if not all(output.requires_grad for output in outputs):
        raise NotImplementedError("has a forward only")
    torch.autograd.backward(outputs, grads)
