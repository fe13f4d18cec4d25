"""Draws cases and checks them until the time is up; exits with 1 if a check fails.

python -m tests.sweep --seconds 900 --seed 7
python -m tests.sweep --case "Case(spec=NormSpec('rms', 64, 'float32'), rows=5, seed=3)"
"""

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, nullcontext

import torch

from tests.support.cases import EXECUTORS
from tests.support.pretended import pretended_gpu
from tilenorm.ops.passes.registry import device_of

from . import ahead, checks, draw
from .draw import Case

NAMES = [check.__name__ for check in checks.CHECKS]
SHOWN = 50  # specs between two lines of progress
PLAIN = "plain call"  # the name of a failure before any check


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.sweep", description=__doc__.split("\n")[0])
    own = "gpu" if torch.cuda.is_available() else "interpreter_sm_90"
    parser.add_argument("--seconds", type=float, default=900.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--specs", type=int, default=3000, help="the most; default: %(default)s")
    parser.add_argument("--executor", choices=EXECUTORS, default=own, help="default: %(default)s")
    parser.add_argument("--case", type=Case.parse, help="check this case alone, as it was printed")
    parser.add_argument("--check", choices=NAMES, help="run this check alone")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    started = time.time()
    until = started + asked.seconds
    ran = failed = 0
    arch = asked.executor.removeprefix("interpreter_")
    place = nullcontext() if arch == "gpu" else pretended_gpu(arch)
    with place, closing(ready(asked, until)) as cases:
        for case in cases:
            if ran and time.time() > until:
                break
            ran += 1
            for name, difference in failures(case, asked):
                failed += 1
                print(f"FAILED {name}: {difference}")
                print(f"    {reproducer(case, name, asked)}", flush=True)
            if ran % SHOWN == 0:
                print(f"{ran} specs so far, {failed} failures", flush=True)
        # The processes that compile ahead may take a while to end.
        print(f"{ran} specs, {failed} failures, {time.time() - started:.0f} s", flush=True)
    return 1 if failed else 0


def ready(asked: argparse.Namespace, until: float) -> Iterator[Case]:
    """Each case, compiled where it runs on a GPU."""
    if asked.case:
        yield asked.case
    elif asked.executor == "gpu":
        target = device_of("cuda", torch.cuda.current_device()).target
        yield from ahead.compiled(draw.drawn(asked.specs, asked.seed, draw.GPU), target, until)
    else:
        yield from draw.drawn(asked.specs, asked.seed, draw.INTERPRETER)


def failures(case: Case, asked: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(check, what is wrong) of each failure. An exception is a failure too."""
    device = "cuda" if asked.executor == "gpu" else "cpu"
    name = PLAIN
    try:
        subject = checks.Subject(case, device)
        for check in checks.CHECKS:
            name = check.__name__
            if asked.check not in (None, name):
                continue
            for difference in check(subject):
                yield name, difference
    except Exception as error:
        yield name, "".join(traceback.format_exception(error)).strip()
        if device == "cuda":
            torch.cuda.synchronize()  # raises where no later call can work, and so ends the sweep


def reproducer(case: Case, name: str, asked: argparse.Namespace) -> str:
    words = ["python", "-m", "tests.sweep", "--executor", asked.executor, "--case", str(case)]
    return shlex.join(words + (["--check", name] if name in NAMES else []))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
