"""Which cases are quick. All others get the marker `slow`.

A parameter of a quick case has a value that no quick case of the test before it has: each value is
tested, not each combination. Of tests/kernels, its rows also are narrow, or the narrowest for which
the test runs some schedule of the kernels, or anything on some architecture. A GPU runs wide rows
as fast as narrow ones, and nothing else runs its cases, so that all of them are quick.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tilenorm.spec import NormSpec

from . import cases
from .executed import executor_of, parameters

ARCH = "sm_80"  # for tests that have no parameter `executor`
# Tests whose quick cases have every form with every dtype.
PRODUCTS = {f"tests/ops/{file}.py::test_accuracy" for file in ("test_forward", "test_gradients")}


def spec_of(item: pytest.Item) -> NormSpec | None:
    """The spec of a case, or a spec of its size where the test makes the spec itself."""
    params = parameters(item)
    if "spec" in params:
        return params["spec"]
    return NormSpec("rms", params["hidden"], "bfloat16") if "hidden" in params else None


def name_of(item: pytest.Item) -> str:
    """The id of a test without the parameters of the case."""
    return item.nodeid.partition("[")[0]


def arch_of(item: pytest.Item) -> str:
    executor = executor_of(item) if "executor" in parameters(item) else ARCH
    return executor.removeprefix("interpreter_")


def directions_of(item: pytest.Item) -> tuple[str, ...]:
    """Those that the name of the test or of its file mentions, or both."""
    name = f"{item.path.stem} {item.originalname}"
    return tuple(d for d in cases.DIRECTIONS if d in name) or cases.DIRECTIONS


def schedules_of(item: pytest.Item) -> set[tuple[str, str]]:
    """(direction, schedule) of each kernel that a case runs."""
    spec, target = spec_of(item), cases.target(arch_of(item))
    chosen = {direction: cases.config(direction, spec, target) for direction in directions_of(item)}
    return {(d, cases.schedule(config, spec.hidden)) for d, config in chosen.items()}


def slow_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    items = [item for item in items if executor_of(item) != "gpu"]
    wide = list(_wide(item for item in items if item.path.parent.name == "kernels"))
    known = {*wide, *(item for item in items if item.get_closest_marker("slow"))}
    rest = (i for i in items if i not in known and name_of(i) not in PRODUCTS)
    return wide + list(_nothing_new(rest))


def _nothing_new(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of which every parameter's value was in a case of the same test before."""
    seen = defaultdict(set)
    for item in items:
        values = {(name, str(value)) for name, value in parameters(item).items()}
        if values and values <= seen[item.function]:
            yield item
        seen[item.function] |= values


def _wide(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Those whose rows are wide without need."""
    by_size = defaultdict(list)
    for item in items:
        if spec_of(item):
            hidden, arch = spec_of(item).hidden, cases.INTERPRETED.index(arch_of(item))
            by_size[hidden, arch, item.function].append(item)
    reached = defaultdict(set)
    for hidden, arch, function in sorted(by_size, key=lambda key: key[:2]):
        alike = by_size[hidden, arch, function]
        reaches = {arch}.union(*map(schedules_of, alike))
        if hidden > cases.NARROW and reaches <= reached[function]:
            yield from alike
        reached[function] |= reaches
