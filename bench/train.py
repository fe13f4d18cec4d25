"""``python -m bench train`` measures a training step of a model: Llama 3 8B's shape, or --model's.

Every variant runs in its own process with empty caches. It starts from the same weights, and sees
the same batch at every step, so that the loss falls. The model has as many of its layers as fit in
the GPU's memory by an estimate, or --layers.

Variants: eager is PyTorch. compile is torch.compile. patch is tilenorm.patch, and patch-add also
has it add the residual. patch-compile patches the model and gives it to torch.compile.
tilenorm-compile is tilenorm.compile, and -low with memory="low". A compiler compiles one layer for
all layers, as torchtitan does. With --whole it compiles the model as one graph, which takes minutes
for many layers. The command also measures one norm alone, forward and backward, on 8 x 4096 tokens.

``--pair A B`` compares two variants: both in one process, over the same weights, with their steps
in turn. It prints the median of the differences with its 95% interval, tokens/s, the peak memory,
and the kernels of each with their bytes. Losses and gradients are compared first. The compilers'
caches are those of the machine, so a second run compiles less. A pair of a variant with itself
shows what the bench sees where there is nothing to see.

`torchrun --nproc-per-node N -m bench train --parallel fsdp`, or `tp`, measures the same step on N
GPUs, without the norm alone. With fsdp each rank has a batch of its own. With tp, which is tensor
and sequence parallelism, all ranks share one. Without GPUs the ranks are processes on the CPU.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from bench import pair, parallel, provenance, record, report, run, train_arguments, worker
from bench.cases import SUITES, Case
from bench.providers import attendance
from bench.record import Cell, Copy, Pair, Step
from bench.step import Settings, measure
from bench.train_arguments import Asked

LAYER_PROVIDERS = ("tilenorm", "torch", "compile")
CPU_ELEMENTS = 1 << 16
# The last steps, the kernels' profile and the end of the process come after --max-seconds.
GRACE_S = 60.0


def main(argv: list[str]) -> int:
    device = provenance.device()
    asked = train_arguments.parsed(argv, __doc__, device)
    made = provenance.describe_run(device, ["train", *argv], {})
    first = not asked.parallel or parallel.rank() == 0  # the others measure, and say nothing
    with record.writing(asked.out if first else None, made) as (found, emit):
        for line in _pairs(asked) if asked.pairs else _steps(asked, first):
            emit(line)
    if first:
        print(report.render(found, asked.markdown))
    return 0


def _pairs(asked: Asked) -> Iterator[Pair]:
    """Each model and pair in a process of its own, whose end frees the memory."""
    deadline = time.time() + asked.max_seconds
    for settings in asked.settings:
        for names in asked.pairs:
            _say(f"{names[0]} and {names[1]}: {settings.name}")
            found = _pair(settings, names, asked, deadline)
            _say(f"{len(found.pairs_us)} of {found.asked} pairs")
            yield found


def _pair(settings: Settings, names: tuple[str, str], asked: Asked, deadline: float) -> Pair:
    base, variant = names
    where = {"model": settings.name, "label": settings.label, "base": base, "variant": variant}
    where |= {"tokens": settings.tokens, "asked": asked.pair_count}
    left = deadline - time.time()
    if left <= 0:
        return Pair(**where, status="skipped", error="out of time")
    limit = min(asked.timeout, left + GRACE_S)
    arguments = {"names": names, "settings": asdict(settings), "pairs": asked.pair_count}
    arguments["deadline"] = deadline  # JSON as Python writes it has infinity
    try:
        return Pair(**where, **worker.run(pair.measure, limit, places={}, **arguments))
    except worker.WorkerError as error:
        return Pair(**where, status="failed", error=str(error))


def _steps(asked: Asked, says: bool) -> Iterator[Cell | Copy | Step]:
    """The norms of the models alone, and then the variants of each model."""
    alone = {}
    if not asked.parallel:
        alone = {(s.shape.norm, s.shape.hidden): s for s in asked.settings}
    for (norm, hidden), settings in alone.items():
        _say(f"a {norm} norm of {hidden} alone")
        yield from _isolated(settings, asked.timeout)
    for settings in asked.settings:
        for variant in asked.variants:
            if says:
                _say(f"{variant}: {settings.name}")
            yield _step(settings, variant, asked.timeout)


def _isolated(settings: Settings, timeout: float) -> list:
    """The lines of a norm's forward and backward without a model around it."""
    op = f"{settings.shape.norm}_norm"
    case = replace(SUITES["layer"][0], op=op, n=settings.shape.hidden)
    if settings.device == "cpu":
        case = case.shrunk(CPU_ELEMENTS)
    try:
        lines = worker.run(isolated, timeout, case=vars(case), device=settings.device)
    except worker.WorkerError as error:
        _say(f"the norm alone failed: {error}")
        return []
    return [record.from_json(line) for line in lines]


def isolated(case: dict, device: str) -> list[str]:
    """The lines of a record. Runs in a worker process."""
    lines, made = [], Case(**case)
    present, _ = attendance([made.op], LAYER_PROVIDERS, device)
    run.run([made], present, ("training",), device, lines.append)
    return [record.to_json(line) for line in lines if isinstance(line, Cell | Copy)]


def _step(settings: Settings, variant: str, timeout: float) -> Step:
    where = {"model": settings.name, "variant": variant, "tokens": settings.tokens}
    arguments = {"variant": variant, "settings": asdict(settings)}
    try:
        return Step(**where, **worker.run(measure, timeout, **arguments))
    except worker.WorkerError as error:
        return Step(**where, status="failed", error=str(error))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
