"""Samples of several variants that take turns, so that a drift of the machine is in all alike."""

import gc
from collections.abc import Callable, Sequence

from bench.text import first_line

WARM_UP = 6  # rounds; tilenorm prepares what repeats a call in the first ones

Sampler = Callable[[], dict[str, float]]


def order(names: Sequence, number: int) -> list:
    """The names in a round's order: every one is first in every so many rounds."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def taken(samplers: dict[str, Sampler], rounds: int, late: Callable[[], bool]) -> dict[str, dict]:
    """The samples of each variant by the phase, one a round, as fields of a record's Turns.

    No round starts when it is late. A variant that fails takes no further part, and has no samples.
    """
    found: dict[str, dict] = {name: {"us": {}} for name in samplers}
    gc.collect()
    gc.disable()
    try:
        for number in range(-WARM_UP, rounds):
            if late():
                break
            for name in order([*samplers], number):
                if "error" in found[name]:
                    continue
                try:
                    sample = samplers[name]()
                except Exception as error:  # providers raise many types
                    found[name] = {"error": first_line(error)}
                    continue
                for phase, us in sample.items() if number >= 0 else ():
                    found[name]["us"].setdefault(phase, []).append(round(us, 2))
    finally:
        gc.enable()
    return found
