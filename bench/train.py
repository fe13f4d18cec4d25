"""``python -m bench train --pair A B`` compares two variants of a training step of a model.

The model is Llama 3 8B, or --model's. Both variants run in one process, over the same weights, with
their steps in turn. The command prints the median of the differences with its 95% interval,
tokens/s, the peak memory, and the kernels of each with their bytes. Losses and gradients are
compared first. The compilers' caches are those of the machine, so a second run compiles less. A
pair of a variant with itself shows what the bench sees where there is nothing to see.

Variants: eager is PyTorch. compile is torch.compile. patch is tilenorm.patch, and patch-add also
has it add the residual. patch-compile patches the model and gives it to torch.compile.
tilenorm-compile is tilenorm.compile, and -low with memory="low". A compiler compiles one layer for
all layers, as torchtitan does. With --whole it compiles the model as one graph, which takes minutes
for many layers. --layers takes fewer layers where the memory is short.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from bench import pair, provenance, record, report, train_arguments, worker
from bench.record import Pair
from bench.step import Settings
from bench.train_arguments import Asked

# The last steps, the kernels' profile and the end of the process come after --max-seconds.
GRACE_S = 60.0


def main(argv: list[str]) -> int:
    device = provenance.device()
    asked = train_arguments.parsed(argv, __doc__, device)
    made = provenance.describe_run(device, ["train", *argv], {})
    with record.writing(asked.out, made) as (found, emit):
        for line in _pairs(asked):
            emit(line)
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


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
