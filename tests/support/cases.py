"""The specs that the tests run: both ends of every regime of the planner.

A regime is a range of hidden sizes with one configuration and one tile width. The heuristics tell
the regimes, so that a new entry of a table is tested without an entry here.

The executors run different specs. The interpreter takes about a millisecond for a block. It plans
for a GPU with MULTIPROCESSORS multiprocessors, so that a small batch fills the grid. It skips specs
with the same plan on another architecture, and wide sizes of HIDDEN. A GPU uses its own plans, and
runs HIDDEN in each dtype and every size of the tables. The compiler compiles one spec of each
regime (test_compile.py).
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from itertools import chain, cycle, pairwise, product
from random import Random

from tilenorm.launch import heuristics
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.config import Backward, Config, tile_width
from tilenorm.launch.target import Target
from tilenorm.launch.tuned.tables import TABLES
from tilenorm.spec import NormSpec
from tilenorm.table import MODULATED_NORMS, NORMS

from . import drawing
from .drawing import DTYPES

MAX_HIDDEN = 262144
WIDEST_ROW = 32768  # no plan holds more of a row in registers
NARROW = 1100  # the widest row of HIDDEN that the interpreter runs
SHARED = 40000  # the widest shared row that the interpreter runs; wider ones only add blocks

# fmt: off
HIDDEN = (
    1, 2, 7, 8, 16, 31, 64, 96, 127, 128, 255, 256, 257, 511, 512, 1000, 1001, 1024, 1536, 2047,
    2048, 3072, 4096, 4100, 5120, 7168, 8192, 12288, 16384, 16392, 20480, 32768, 40000, 65544,
    131072, 262144,
)
# fmt: on

MULTIPROCESSORS = 2
# An architecture without TMA, one with a table, and one with TMA and without a table.
INTERPRETED = ("sm_80", "sm_90", "sm_100")
INTERPRETERS = tuple(f"interpreter_{arch}" for arch in INTERPRETED)
EXECUTORS = (*INTERPRETERS, "gpu")
DIRECTIONS = ("forward", "backward")
GRADIENTS = ("dx", "dresidual", "dgate", "dw", "db")  # in the order of their tensors
BY_GROUP = ("dscale", "dshift", "dmod_gate")  # behind them, of modulated rows
OF_KEY = ("dkey", "dkey_weight")  # behind them, of heads that are rotated


def config(direction: str, spec: NormSpec, target: Target):
    """The configuration that the planner chooses if every gradient is needed."""
    needs = None if direction == "forward" else every_gradient(spec)
    return heuristics.chosen(spec, target, needs)


def shares(chosen: Config, hidden: int) -> bool:
    """Whether blocks share rows of this size: the segments of a block do not span a row."""
    return chosen.widths is not None and sum(chosen.widths) < hidden


def schedule(chosen: Config, hidden: int) -> str:
    """The name of the schedule that a configuration selects for rows of this size."""
    if not isinstance(chosen, Backward):
        return type(chosen).__name__
    if shares(chosen, hidden):
        return "shared"
    return "tile loads" if chosen.tma else "gathered"


@cache
def variants(dtype: str, ops: tuple[str, ...] = NORMS, count: int = 15) -> list[dict]:
    """So many variants of each op besides size and dtype, as fields of a spec: drawn, and the ops
    take turns.
    """
    rng = Random(dtype)
    specs = [drawing.spec(rng, op, dtype, 64) for _ in range(count) for op in ops]
    own = {field.name for field in fields(NormSpec)} - {"hidden", "dtype"}
    return [{name: getattr(spec, name) for name in own} for spec in dict.fromkeys(specs)]


def modulations(dtype: str) -> list[dict]:
    """Variants of a norm whose rows are modulated, as fields of a spec."""
    return variants(dtype, MODULATED_NORMS, 8)


def target(arch: str) -> Target:
    """The target of the interpreter: so few multiprocessors that blocks take several rows."""
    return replace(Target.of(arch), multiprocessors=MULTIPROCESSORS)


def tabled(dtype: str) -> list[dict]:
    """Fields of a spec for each operation that the planner distinguishes."""
    norms = ({"weight": dtype}, {"norm": "layer", "weight": dtype, "bias": dtype})
    added = [{**fields, "residual": dtype} for fields in norms]
    gated = [{"weight": dtype, "gate": dtype, "gate_first": first} for first in (False, True)]
    after = [{**fields, "skip": dtype} for fields in norms]
    return [*norms, *added, *gated, {**gated[0], "bias": dtype}, *after]


@cache  # architectures and directions share specs, which remember what the planner derives
def _of_planner(hidden: int, dtype: str) -> list[NormSpec]:
    return [
        NormSpec(hidden=hidden, dtype=dtype, **{"norm": "rms", **more}) for more in tabled(dtype)
    ]


@cache
def regimes(direction: str, arch: str, dtype: str, aligned: bool) -> list[tuple[int, int]]:
    """(first, last) hidden size of each regime in ascending order: aligned sizes, or odd ones."""
    unit = 16 // NormSpec("rms", 1, dtype).item_bytes if aligned else 2

    def size(i: int) -> int:
        return i * unit if aligned else i * unit - 1

    on = target(arch)

    @cache  # bisection asks for the ends of an interval again
    def regime(i: int):
        specs = _of_planner(size(i), dtype)
        return *(config(direction, spec, on) for spec in specs), tile_width(size(i))

    count, points = MAX_HIDDEN // unit, [*range(1, 16 // unit)]
    # Two regimes that end within 8 elements would pass for one; of rows of 1024 elements and more,
    # two within 256, and of wide rows two within 4096.
    starts = (16, 1024, WIDEST_ROW, MAX_HIDDEN)
    for (first, last), apart in zip(pairwise(starts), (8, 256, 4096), strict=True):
        points += range(first // unit, last // unit, apart // unit)
    points.append(count)
    edges = [1]
    for low, high in pairwise(points):
        edges += _changes(regime, low, high)
    return [(size(a), size(b - 1)) for a, b in pairwise([*edges, count + 1])]


def _changes(regime: Callable, low: int, high: int) -> list[int]:
    """Where in (low, high] a new regime begins, by bisection: at most one is found."""
    if regime(low) == regime(high):
        return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if regime(middle) == regime(low) else (low, middle)
    return [high]


@cache
def ends(direction: str, arch: str) -> list[NormSpec]:
    """Both ends of every regime of an architecture. The variants take turns."""
    specs = []
    turns = {dtype: cycle(variants(dtype)) for dtype in DTYPES}
    for aligned in (True, False):
        # Plans depend only on the size of an element, so the 16-bit dtypes take turns.
        for dtypes in (("bfloat16", "float16"), ("float32", "float32")):
            for sizes in regimes(direction, arch, dtypes[0], aligned):
                for hidden, dtype in zip(sizes, dtypes, strict=True):
                    specs.append(NormSpec(hidden=hidden, dtype=dtype, **next(turns[dtype])))
    return list(dict.fromkeys(specs))


@cache
def listed() -> list[NormSpec]:
    """HIDDEN in every dtype. The variants take turns."""
    turns = {dtype: cycle(variants(dtype)) for dtype in DTYPES}
    return [
        NormSpec(hidden=n, dtype=dtype, **next(turns[dtype]))
        for n, dtype in product(HIDDEN, DTYPES)
    ]


def matrix(direction: str) -> list[tuple[str, NormSpec]]:
    """(executor, spec) of every regime."""
    pairs, seen = [], set()
    narrow = [spec for spec in listed() if spec.hidden <= NARROW]
    for arch in dict.fromkeys((*INTERPRETED, *TABLES)):
        for spec in chain(ends(direction, arch), narrow):
            chosen = config(direction, spec, target(arch))
            plan = chosen, spec.hidden, spec.dtype
            wide = spec.hidden > SHARED and shares(chosen, spec.hidden)
            if not wide and plan not in seen:
                seen.add(plan)
                pairs.append((f"interpreter_{arch}", spec))
    # The plans of a GPU are not known when tests are collected, and each spec costs a compile.
    # Regimes without a table end at powers of two, and HIDDEN has most of these.
    every = chain(listed(), *(ends(direction, arch) for arch in TABLES))
    return pairs + [("gpu", spec) for spec in dict.fromkeys(every)]


def some_needs(spec: NormSpec) -> list[Needs]:
    """Each gradient alone, all gradients, and all but one."""
    every = every_gradient(spec)
    names = [name for name in GRADIENTS if getattr(every, name)]
    nothing = every._replace(**dict.fromkeys(names, False))
    found = [nothing._replace(**{name: True}) for name in names]
    found += [every._replace(**{name: False}) for name in names] + [every]
    if spec.residual:
        found.append(every._replace(dsum=False))
    return list(
        dict.fromkeys(needs for needs in found if any(getattr(needs, n) for n in GRADIENTS))
    )


def alone(spec: NormSpec) -> list[Needs]:
    """The needs of each gradient by itself."""
    every, found = every_gradient(spec), []
    nothing = every._replace(**dict.fromkeys(GRADIENTS, False))
    groups = {"modulation": every.modulation, "of_key": every.of_key}
    nothing = nothing._replace(**{n: (False,) * len(asked) for n, asked in groups.items()})
    found += [nothing._replace(**{n: True}) for n in GRADIENTS if getattr(every, n)]
    for name, asked in groups.items():
        places = range(len(asked))
        one = [tuple(i == j for j in places) for i in places if asked[i]]
        found += [nothing._replace(**{name: only}) for only in one]
    return found


def label(value) -> str:
    """The id of a test, such as "layer-4096-bfloat16-weight:float32-offset:1.0"."""
    if not isinstance(value, NormSpec):
        return str(value)
    named = [(field, getattr(value, field.name)) for field in fields(NormSpec)]
    first, others = named[:3], named[3:]  # norm, hidden and dtype, which have no defaults
    parts = [str(own) for _, own in first]
    parts += [f"{field.name}:{own}" for field, own in others if own != field.default]
    return "-".join(parts)
