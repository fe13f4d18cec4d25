"""``python -m bench first-call`` measures how long the first call of a spec takes, with compiling.

Each provider runs all specs in two processes. The first process starts with empty caches, and the
second process finds the caches that the first process left on the disk. The times do not contain
importing the provider, starting CUDA and PyTorch's first gradient. A compiler's own start is in the
time of the first spec, a small spec that is there for this purpose alone.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench import command, worker
from bench.cases import AROUND, OPS, PLAIN
from bench.op import DIRECTIONS, Case
from bench.providers import PROVIDERS
from bench.record import FirstCall, Precompile
from bench.run import repeatable_call
from bench.text import first_line

HIDDEN = (1024, 4096, 8192, 16384)
ROWS = 2048
OPENING = ("float16", 512)
TIMEOUT_S = 300.0


def main(argv: list[str]) -> int:
    shapes = {"dtype": ["bfloat16", "float32"], "hidden": HIDDEN}
    options = {"op": ["rms_norm"], "provider": None} | shapes
    args = command.parser("first-call", __doc__, (*PLAIN, *AROUND), **options).parse_args(argv)
    specs = [OPENING, *((dtype, n) for n in args.hidden for dtype in args.dtype)]
    with command.running(args, ["first-call", *argv], args.op) as run:
        for op, names in run.present.items():
            for name in names:
                if run.late():
                    continue
                command.told(f"{op} first calls of {name}")
                cases = [Case(op, dtype, ROWS, n) for dtype, n in specs]
                for line in _first_calls(cases, name, run.device):
                    run.emit(line)
            if run.device != "cpu" and "tilenorm" in names and not run.late():
                arch = run.record.runs[0]["capability"]
                run.emit(precompile(op, args.hidden, args.dtype, arch))
    return 0


def _first_calls(cases: list[Case], provider: str, device: str) -> Iterator[FirstCall]:
    """The first calls of one provider, from both processes."""
    arguments = {"cases": cases, "provider": provider, "device": device}
    with worker.temporary_folder() as folder:
        places = worker.caches(folder)
        try:
            cold, warm = (worker.run(measure, TIMEOUT_S, places, **arguments) for _ in range(2))
        except worker.WorkerError as error:  # one line, since it concerns all specs
            where = {**cases[0].shape, "direction": "forward", "provider": provider}
            yield FirstCall(**where, error=str(error))
            return
    for first, again in zip(cold, warm, strict=True):
        yield replace(first, warm_s=again.cold_s)


def measure(cases: list[Case], provider: str, device: str) -> list[FirstCall]:
    """Seconds of the first call of each case in each direction. Runs in a worker process."""
    one = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(one * one, one, torch.ones_like(one))  # the first gradient imports sympy
    wait: Callable = torch.cuda.synchronize if device != "cpu" else lambda: None
    found = []
    for case in cases:
        op = OPS[case.op]
        inputs, grads = op.made(case, device), op.output_grads(case, device)
        function = None
        for direction in DIRECTIONS:
            line = FirstCall(**case.shape, direction=direction, provider=provider)
            try:
                function = function or PROVIDERS[provider].load(op)
                call = repeatable_call(function, inputs, grads, direction)
                wait()
                start = time.perf_counter()
                call()
                wait()
                found.append(replace(line, cold_s=time.perf_counter() - start))
            except Exception as error:  # the failure of a peer is a result
                found.append(replace(line, error=first_line(error)))
    return found


def precompile(op: str, hidden: list[int], dtypes: list[str], arch: str) -> Precompile:
    """Seconds of ``python -m tilenorm precompile`` with an empty cache, including the process."""
    from tilenorm.__main__ import main as main_of_tilenorm

    shape = ["--hidden", *map(str, hidden), "--dtype", *dtypes]
    bias = ["--bias"] if "bias" in OPS[op].columns else []
    arguments = ["--arch", arch, "--op", op, *bias, *shape]
    found = {"op": op, "arguments": " ".join(arguments), "cores": os.cpu_count()}
    try:
        start = time.perf_counter()
        worker.run(main_of_tilenorm, TIMEOUT_S, argv=["precompile", *arguments])
        return Precompile(**found, seconds=time.perf_counter() - start)
    except worker.WorkerError as error:
        return Precompile(**found, error=str(error))
