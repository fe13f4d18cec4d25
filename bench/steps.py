"""Whole steps of small models, in which the host takes about as long as the GPU.

All variants run in one process, over the same weights, and take turns in every round. Losses and
gradients are compared with those of the first variant before anything is timed.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import nn

from bench import pair, provenance, timing, turns, worker
from bench.command import told
from bench.pair import Settings, Training
from bench.record import Turns
from bench.shapes import MODELS, tiny
from bench.text import first_line

VARIANTS = ("eager", "modules", "patch", "patch-add", "compile", "liger")
# The models, and what differs from the sizes of each.
SIZES: dict[str, dict] = {
    "BERT-base": {},
    "ViT-L": {},
    "GPT-2": {},
    "Llama 3.2 1B": {"batch": 1, "length": 2048},
}
PHASES = ("forward", "backward", "optimizer")
ROUNDS = 40


def lines(args: argparse.Namespace, device: str, deadline: float) -> Iterator[Turns]:
    """Each model in a process of its own, whose end frees the memory. A CPU gets tiny models."""
    missing = {name: why for name in args.variant if (why := pair.absent(name))}
    names = [name for name in args.variant if name not in missing]
    for model in args.model:
        shape = replace(MODELS[model], **SIZES.get(model, {}))
        given = Settings(tiny(shape) if device == "cpu" else shape, model, device=device)
        told(f"steps of {given.label}")
        asked = {"names": names, "given": given, "rounds": args.rounds or ROUNDS}
        try:
            found = worker.until(deadline, measure, **asked) if names else {}
        except worker.WorkerError as error:
            found = {name: {"error": str(error)} for name in names}
        path = {"path": next((fields["path"] for fields in found.values() if "path" in fields), "")}
        found |= {name: {"error": f"absent: {why}"} for name, why in missing.items()}
        for name in args.variant:
            yield Turns("model", given.label, args.variant[0], name, **path | found[name])


def measure(names: Sequence[str], given: Settings, rounds: int, deadline: float) -> dict[str, dict]:
    """The fields of a record's Turns, by the variant. No round starts after the deadline."""
    training, both = pair.built(given, names)
    calls = {name: call for name, (call, _) in zip(names, both, strict=True)}
    samplers, found = {}, {}
    for name, call in calls.items():
        try:
            if time.time() > deadline:
                raise TimeoutError("out of time")
            if wrong := pair.complaint(pair.compared(training, [calls[names[0]], call])):
                raise ValueError(wrong)
            samplers[name] = partial(sample, training, call, given.device)
        except Exception as error:  # compilers raise many types
            found[name] = {"error": first_line(error)}
    found |= turns.taken(samplers, rounds, lambda: time.time() > deadline)
    norms = sum(isinstance(m, (nn.RMSNorm, nn.LayerNorm)) for m in training.model.modules())
    same = {"norms": norms, "path": provenance.host_path()}
    return {name: fields | same for name, fields in found.items()}


def sample(training: Training, call: Callable, device: str) -> dict[str, float]:
    """The microseconds that the host needs for each phase, and all until the GPU is done."""
    timing.idle(device)
    marks = [time.perf_counter()]
    training.step(call, lambda: marks.append(time.perf_counter()))
    timing.idle(device)
    marks.append(time.perf_counter())
    took = [(end - start) * 1e6 for start, end in pairwise(marks)]
    return dict(zip((*PHASES, "step"), (*took[:-1], sum(took)), strict=True))
