"""The test matrix as data: specs at both ends of every regime of the planner.

A regime is a run of hidden sizes that get one configuration and one tile width, found by asking the
heuristics, so that a new entry of a table is tested without being named here. The executors take
different parts. The interpreter costs about a millisecond a block: it plans for a GPU of
MULTIPROCESSORS multiprocessors, so that few rows fill its grid, skips what another architecture
plans alike, and takes of HIDDEN what is narrow. A GPU plans for itself, and runs HIDDEN in each
dtype and every size of the tables. The compiler takes one spec a regime (test_compile.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain, cycle, pairwise, product

from tilenorm.launch import heuristics
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.config import Backward, Config, tile_width
from tilenorm.launch.target import Target
from tilenorm.launch.tuned import TABLES
from tilenorm.spec import NormSpec

DTYPES = ("bfloat16", "float16", "float32")
MAX_HIDDEN = 262144
WIDEST_ROW = 32768  # no plan holds more of a row in registers
NARROW = 1100  # of HIDDEN, what the interpreter runs
SHARED = 40000  # of what blocks share; wider rows have more of the same blocks

# fmt: off
HIDDEN = (
    1, 2, 7, 8, 16, 31, 64, 96, 127, 128, 255, 256, 257, 511, 512, 1000, 1001, 1024, 1536, 2047,
    2048, 3072, 4096, 4100, 5120, 7168, 8192, 12288, 16384, 16392, 20480, 32768, 40000, 65544,
    131072, 262144,
)
# fmt: on

MULTIPROCESSORS = 2
# Without TMA, each architecture with a table, and TMA without a table.
INTERPRETED = tuple(dict.fromkeys(("sm_80", *TABLES, "sm_100")))
INTERPRETERS = tuple(f"interpreter_{arch}" for arch in INTERPRETED)
EXECUTORS = (*INTERPRETERS, "gpu")
DIRECTIONS = ("forward", "backward")
GRADIENTS = ("dx", "dresidual", "dgate", "dw", "db")  # in the order of their tensors


def config(direction: str, spec: NormSpec, target: Target):
    """What the planner chooses for a spec whose every gradient is needed."""
    if direction == "forward":
        return heuristics.forward(spec, target)
    return heuristics.backward(spec, target, every_gradient(spec))


def shares(chosen: Config, hidden: int) -> bool:
    """Whether blocks share rows of a size: no block has segments that span them."""
    return chosen.widths is not None and sum(chosen.widths) < hidden


def schedule(chosen: Config, hidden: int) -> str:
    """The name of the schedule that a configuration selects for rows of a size."""
    if not isinstance(chosen, Backward):
        return type(chosen).__name__
    if shares(chosen, hidden):
        return "shared"
    return "tile loads" if chosen.tma else "gathered"


def affine(dtype: str) -> list[dict]:
    """Every weight, bias and offset of an input dtype, as fields of a spec."""
    found = [{}] + [{"bias": bias} for bias in dict.fromkeys((dtype, "float32"))]
    for weight, offset in product(dict.fromkeys((dtype, "float32")), (0.0, 1.0)):
        found += [{"weight": weight, "bias": bias, "offset": offset} for bias in (None, weight)]
    return found


def variants(dtype: str) -> list[dict]:
    """What can be asked of each norm beyond its size and dtype, as fields of a spec."""
    other = "bfloat16" if dtype == "float32" else "float32"
    plain = [{"norm": norm, **more} for norm in ("rms", "layer") for more in affine(dtype)]
    weighted = ({}, {"weight": dtype}, {"weight": dtype, "bias": dtype, "offset": 1.0})
    both = product(("rms", "layer"), (dtype, other), weighted)
    added = [{"norm": norm, "residual": residual, **more} for norm, residual, more in both]
    orders = product((False, True), (dtype, other), weighted)
    gated = [{"norm": "rms", "gate": z, "gate_first": first, **more} for first, z, more in orders]
    gated += [{**fields, "activation": "sigmoid"} for fields in gated[:: len(weighted)]]
    gated += [{**fields, "norm": "layer"} for fields in gated]
    by_heads = [
        {**fields, "heads": heads, "weight": dtype, **more}
        for fields, heads in zip(
            ({"norm": "rms"}, {"norm": "layer"}, *added[::3], *gated[::3]), cycle((3, 2, 4))
        )
        for more in ({}, {"bias": dtype})
    ]
    early = [
        {**fields, "rounding": "early", "weight": weight}
        for fields in ({"norm": "rms"}, added[0], gated[0], gated[-1], {"norm": "layer"})
        for weight in dict.fromkeys((dtype, "float32"))
    ]
    return [*plain, *added, *gated, *by_heads, *early]


def every_variant(hidden: int) -> list[NormSpec]:
    """Every dtype and variant of one size."""
    specs = [NormSpec(hidden=hidden, dtype=d, **more) for d in DTYPES for more in variants(d)]
    return list(dict.fromkeys(specs))


def target(arch: str) -> Target:
    """What the interpreter plans for: so few multiprocessors that blocks take several rows."""
    return Target(arch, MULTIPROCESSORS)


def tabled(dtype: str) -> list[dict]:
    """Fields of a spec for each way in which the planner tells operations apart."""
    norms = ({"weight": dtype}, {"norm": "layer", "weight": dtype, "bias": dtype})
    added = [{**fields, "residual": dtype} for fields in norms]
    gated = [{"weight": dtype, "gate": dtype, "gate_first": first} for first in (False, True)]
    return [*norms, *added, *gated, {**gated[0], "bias": dtype}]


@cache
def regimes(direction: str, arch: str, dtype: str, aligned: bool) -> list[tuple[int, int]]:
    """(first, last) hidden size of each regime, over aligned sizes or over odd ones, ascending."""
    unit = 16 // NormSpec("rms", 1, dtype).item_bytes if aligned else 2

    def size(i: int) -> int:
        return i * unit if aligned else i * unit - 1

    @cache  # halving asks for the ends of an interval again
    def regime(i: int):
        spec = NormSpec("rms", size(i), dtype)
        chosen = [config(direction, replace(spec, **more), target(arch)) for more in tabled(dtype)]
        return *chosen, tile_width(spec.hidden)

    count = MAX_HIDDEN // unit
    fine = range(1, min(count, 1024 // unit))
    points = [*fine, *range(1024 // unit, count, 256 // unit), count]
    edges = [1]
    for low, high in pairwise(points):
        edges += _changes(regime, low, high)
    return [(size(a), size(b - 1)) for a, b in pairwise([*edges, count + 1])]


def _changes(regime: Callable, low: int, high: int) -> list[int]:
    """Where in (low, high] a regime begins, if one does: by halving, so one is taken to."""
    if regime(low) == regime(high):
        return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if regime(middle) == regime(low) else (low, middle)
    return [high]


@cache
def ends(direction: str, arch: str) -> list[NormSpec]:
    """Both ends of every regime of an architecture, the weights and biases taking turns."""
    specs = []
    turns = {dtype: cycle(variants(dtype)) for dtype in DTYPES}
    for aligned in (True, False):
        # Plans see the size of an element only, so the 16-bit dtypes take turns.
        for dtypes in (("bfloat16", "float16"), ("float32", "float32")):
            for sizes in regimes(direction, arch, dtypes[0], aligned):
                for hidden, dtype in zip(sizes, dtypes, strict=True):
                    specs.append(NormSpec(hidden=hidden, dtype=dtype, **next(turns[dtype])))
    return list(dict.fromkeys(specs))


@cache
def listed() -> list[NormSpec]:
    """HIDDEN in every dtype, the weights and biases taking turns."""
    turns = {dtype: cycle(variants(dtype)) for dtype in DTYPES}
    return [
        NormSpec(hidden=n, dtype=dtype, **next(turns[dtype]))
        for n, dtype in product(HIDDEN, DTYPES)
    ]


def matrix(direction: str, shared: bool) -> list[tuple[str, NormSpec]]:
    """(executor, spec): of plans whose blocks hold whole rows, or of those that share them."""
    pairs, seen = [], set()
    narrow = [spec for spec in listed() if spec.hidden <= NARROW]
    for executor, arch in zip(INTERPRETERS, INTERPRETED, strict=True):
        for spec in chain(ends(direction, arch), narrow):
            if shared and spec.hidden > SHARED:
                continue
            chosen = config(direction, spec, target(arch))
            size = (spec.hidden, spec.dtype)
            if shares(chosen, spec.hidden) == shared and (chosen, size) not in seen:
                seen.add((chosen, size))
                pairs.append((executor, spec))
    # Which plan a GPU will choose is not known when tests are collected, and each spec costs it a
    # compile: without a table the regimes end at powers of two, most of which HIDDEN has.
    every = chain(listed(), *(ends(direction, arch) for arch in TABLES))
    on_gpu = [s for s in dict.fromkeys(every) if (s.hidden > WIDEST_ROW) == shared]
    return pairs + [("gpu", spec) for spec in on_gpu]


def some_needs(spec: NormSpec) -> list[Needs]:
    """Every gradient alone, all of them, and all but one."""
    every = every_gradient(spec)
    asked = [name for name in GRADIENTS if getattr(every, name)]
    nothing = every._replace(**dict.fromkeys(asked, False))
    found = [nothing._replace(**{name: True}) for name in asked]
    found += [every._replace(**{name: False}) for name in asked] + [every]
    if spec.residual:
        found.append(every._replace(dsum=False))
    return list(
        dict.fromkeys(needs for needs in found if any(getattr(needs, n) for n in GRADIENTS))
    )


def label(value) -> str:
    """A test's id: "layer-4096-bf16-w32-b-o1"."""
    if not isinstance(value, NormSpec):
        return str(value)
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    parts = [] if value.norm == "rms" else [value.norm]
    parts += [str(value.hidden), short[value.dtype]]
    for name, dtype in (
        ("w", value.weight),
        ("b", value.bias),
        ("add", value.residual),
        ("first" if value.gate_first else "gate", value.gate),
    ):
        if dtype:
            parts.append(name if dtype == value.dtype else f"{name}{short[dtype][2:]}")
    parts += ["o1"] * bool(value.offset) + [f"h{value.heads}"] * bool(value.heads)
    parts += ["sigmoid"] * (value.activation == "sigmoid")
    return "-".join(parts + ["early"] * (value.rounding == "early"))
