"""Which compiled kernels depend on a row's place in the batch or on the batch, over drawn specs.

python -m tests.machine.survey --arch sm_90 --draws 100 --seed 1
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice

from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec

from ..sweep.draw import Limits, drawn
from .executor import moved, runs, specialized

LIMITS = Limits(1600, 40, 1 << 16)  # wider rows have a tile of their own


def asked(spec: NormSpec) -> list[Needs | None]:
    """Directions and gradients: forward; every gradient; no sum over rows; no gradient of a sum."""
    every = every_gradient(spec)
    kinds = [None, every, every._replace(dw=False, db=False), every._replace(dsum=False)]
    return list(dict.fromkeys(kinds))


def subjects(arch: str, seed: int) -> Iterator[tuple[NormSpec, Needs | None]]:
    """Drawn specs with what is asked of them, of which the machine can run the kernels."""
    target = Target(arch, 1)
    for case in drawn(seed, LIMITS):
        for needs in asked(case.spec):
            if needs is None:
                plan = plan_forward(case.spec, target, True)
            else:
                plan = plan_backward(case.spec, target, needs)
            if runs(plan):
                yield case.spec, needs


def fault(arch: str, spec: NormSpec, needs: Needs | None) -> str | None:
    """The results whose rows depend on their place, or on the variant of the kernel, or None."""
    for check in (moved, specialized):
        found = {name: count for name, count in check(arch, spec, needs).items() if count}
        if found:
            return f"{arch} {spec} {needs}: {check.__name__} {found}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machine.survey", description=__doc__)
    parser.add_argument("--arch", default="sm_90", choices=["sm_80", "sm_90"])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    faults = 0
    for number, subject in enumerate(islice(subjects(given.arch, given.seed), given.draws), 1):
        if told := fault(given.arch, *subject):
            faults += 1
            print(told, flush=True)
        if number % 50 == 0:
            print(f"{number} kernels, {faults} with faults", flush=True)
    print(f"{given.draws} kernels, {faults} with faults")
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
