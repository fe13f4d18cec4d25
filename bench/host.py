"""``python -m bench host`` measures what a norm costs the host, on shapes that a GPU does at once.

Three ways: a call of (rows, N); a batch of (2, rows / 2, N), as in a model; and a step, which is
twelve norms with a product behind each, as one function. Norms with parameters by group take
(1, 1024, N) in a call. Compilers get the step whole: there a norm costs what is between two
providers, divided by twelve. Times are of the clock of the thread that calls, and of all threads of
the process.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench import command, timing
from bench.cases import AROUND, MODULATED, OPS, PLAIN
from bench.check import as_tuple
from bench.command import Run
from bench.op import Op
from bench.providers import PROVIDERS
from bench.record import Host
from bench.text import first_line

N, STEP_N, NORMS = 1024, 512, 12
WAYS = ("call", "batch", "step")
ROUNDS = 3
MEASURED = (*PLAIN, *AROUND, "head_rms_norm", *MODULATED)
# What computes a step as a whole, by the provider whose function is in it.
STEPS = {"torch": "compile", "tilenorm": "tilenorm-compile"}


def main(argv: list[str]) -> int:
    parser = command.parser("host", __doc__, op=MEASURED, provider=None)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args(argv)
    with command.running(args, ["host", *argv], args.op) as run:
        for op in map(OPS.get, args.op):
            for way in filter(op.ways.__contains__, args.way):
                names = run.present[op.name]
                if way == "step":
                    names = [name for pair in STEPS.items() if pair[0] in names for name in pair]
                for found in times(op, names, run, way, command.told):
                    run.emit(found)
    return 0


def line(op: Op, provider: str, way: str, **fields) -> Host:
    """A line of the record, by default without its numbers."""
    where = op.small(STEP_N if way == "step" else N).shape
    return Host(**where, provider=provider, way=way, **fields)


def times(op: Op, names: Sequence[str], course: Run, way: str, step: Callable) -> list[Host]:
    """The host times of all providers: each is the least median of several rounds.

    The providers take turns in every round, because the host of a virtual machine may be slow for
    seconds. What there was no time for is left out.
    """
    leaves, grads, load = _given(op, course.device, way)
    found, loaded = {name: {} for name in names}, {}
    for turn in range(ROUNDS):
        for name, least in found.items():
            if course.late() or "error" in least:
                continue
            if turn == 0:
                step(f"{op.name} host time of a {way} {name}")
            try:
                provider = loaded[name] = loaded.get(name) or load(name)
                calls = {"forward": _forward} | ({"forward_backward": _both} if op.trained else {})
                for field, call in calls.items():
                    taken = timing.host(partial(call, provider, leaves, grads), course.device)
                    for key, us in zip(("us", "cpu_us"), taken, strict=True):
                        least[f"{field}_{key}"] = min(us, least.get(f"{field}_{key}", us))
            except Exception as error:
                least["error"] = first_line(error)
    return [line(op, name, way, **least) for name, least in found.items() if least]


def _given(op: Op, device: str, way: str) -> tuple[list[Tensor], list[Tensor], Callable]:
    """The inputs, the gradients of the outputs, and what loads a provider by its name."""
    case = op.small(STEP_N if way == "step" else N)
    leaves, grads = op.made(case, device), op.output_grads(case, device)
    if way == "batch":
        grads = [dy.unflatten(0, (2, -1)) for dy in grads]
        for i in range(len(op.rows)):
            leaves[i] = leaves[i].detach().unflatten(0, (2, -1)).requires_grad_()
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


def _both(provider: Callable, leaves: list[Tensor], grads: list[Tensor]) -> None:
    """As in a training step. torch.autograd.grad would ask for a part of the graph."""
    for leaf in leaves:
        leaf.grad = None
    outputs = as_tuple(provider(*leaves))
    if not all(output.requires_grad for output in outputs):
        raise NotImplementedError("has a forward only")
    torch.autograd.backward(outputs, grads)
