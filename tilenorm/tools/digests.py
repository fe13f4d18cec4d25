"""What the plans of an architecture compile to, so that a refactoring can show what it changes.

    python -m tilenorm digests --arch sm_90 > before.txt     # and after the change
    diff before.txt after.txt

A line is a launch: what is computed, and a digest of the machine code of its kernel. A digest does
not depend on a kernel's name, nor on how its parameters are grouped.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..launch.calls import Needs, every_gradient
from ..launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from ..launch.target import Target
from ..launch.tuned import TABLES
from ..spec import ITEM_BYTES, NormSpec
from .precompile import calls_of, compile_call, compiling

MANY, FEW = 65537, 33  # rows of a large batch and of a small one
DTYPES = ("bfloat16", "float32")
# Sizes of every kind of plan of the rules, and sizes that fill no vectors.
RULE_SIZES = (8, 37, 1000, 4096, 16384, 65537)
PART_SIZES = {"bfloat16": (37, 1001, 16391, 65537), "float32": (37, 1001)}
DIGITS = 32  # of a digest


class Case(NamedTuple):
    """A plan to compile: forward, saving statistics or not, or backward with these gradients."""

    spec: NormSpec
    target: Target
    rows: int
    save: bool = True
    needs: Needs | None = None

    @property
    def plan(self) -> ForwardPlan | BackwardPlan:
        if self.needs is None:
            return plan_forward(self.spec, self.target, self.save)
        return plan_backward(self.spec, self.target, self.needs)

    def __str__(self) -> str:
        spec = self.spec
        parts = [self.target.arch, "forward" if self.needs is None else "backward", spec.op]
        parts += [str(spec.hidden), spec.dtype]
        for name in ("weight", "bias", "residual", "gate"):
            if dtype := getattr(spec, name):
                parts.append(f"{name}:{dtype}")
        parts += ["gate_first"] * spec.gate_first + [spec.rounding] * (spec.rounding != "late")
        parts += [spec.activation] * (spec.activation != "silu")
        parts += [f"offset:{spec.offset:g}"] * bool(spec.offset)
        parts += [f"heads:{spec.heads}"] * bool(spec.heads)
        if self.needs is None:
            parts += ["saving"] * self.save
        else:
            asked = (name for name, needed in self.needs._asdict().items() if needed)
            parts.append("+".join(asked))
        return " ".join((*parts, f"rows:{self.rows}"))


def cases(arch: str) -> list[Case]:
    """Every configuration of the architecture's table, or of its rules, and what varies them."""
    target, found = Target.of(arch), []
    for spec in _specs(arch, "forward"):
        for save in (False, True):
            plan = plan_forward(spec, target, save)
            if plan.save == save:
                batches = (MANY, FEW) if plan.fetches else (MANY,)
                found += [Case(spec, target, rows * (spec.heads or 1), save) for rows in batches]
    for spec in _specs(arch, "backward"):
        every = every_gradient(spec)
        found.append(Case(spec, target, MANY * (spec.heads or 1), needs=every))
        if arch in TABLES and spec.hidden in (37, 1024) and not spec.heads:
            some = (every._replace(**{n: False}) for n in _gradients(every))
            found += [Case(spec, target, MANY, needs=needs) for needs in some]
    return found


def digests(arch: str, processes: int | None = None) -> Iterator[str]:
    """The lines of every case of an architecture. Needs no GPU.

    Raises cuda.tile.TileError when a kernel does not compile, RuntimeError when cuTile's cache is
    off.
    """
    work = cases(arch)
    with compiling(_codes, work, processes) as results:
        for case, codes in zip(work, results, strict=True):
            for number, code in enumerate(codes):
                yield f"{case} launch:{number} {code[:DIGITS]}"


def _codes(case: Case) -> list[str]:
    """In a worker: a kernel is not pickled, so calls are made where they are compiled."""
    calls = calls_of(case.plan, case.rows)
    return [compile_call(call, case.target.arch).code for call in calls]


def _gradients(needs: Needs) -> list[str]:
    return [n for n in ("dx", "dw", "db", "dresidual", "dgate") if getattr(needs, n)]


def _operations(dtype: str) -> dict[str, dict]:
    """Fields of a spec for each operation that a table has, by its name there."""
    rms = {"norm": "rms", "dtype": dtype, "weight": dtype}
    layer = rms | {"norm": "layer", "bias": dtype}
    return {
        "rms_norm": rms,
        "layer_norm": layer,
        "add_rms_norm": rms | {"residual": dtype},
        "add_layer_norm": layer | {"residual": dtype},
        "gated_rms_norm": rms | {"gate": dtype},
        "gate_first": rms | {"gate": dtype, "gate_first": True},
    }


def _specs(arch: str, direction: str) -> list[NormSpec]:
    found = []
    table = getattr(TABLES[arch], direction.upper()) if arch in TABLES else None
    for dtype in DTYPES:
        for op, fields in _operations(dtype).items():
            sizes = RULE_SIZES if dtype == "bfloat16" or op in ("rms_norm", "layer_norm") else ()
            if table is not None:
                sizes = [n for n, _ in table.get((op, ITEM_BYTES[dtype]), ())]
                sizes += PART_SIZES[dtype]
            found += [NormSpec(hidden=hidden, **fields) for hidden in sizes]
    return list(dict.fromkeys([*found, *(_variants() if table is not None else ())]))


def _variants() -> Iterator[NormSpec]:
    """What no table tells apart: weights by head, dtypes, offset, rounding, missing parameters."""
    b, f = "bfloat16", "float32"
    for hidden in (128, 1000):
        for fields in _operations(b).values():
            yield NormSpec(hidden=hidden, **fields, heads=24)
    for hidden in (1024, 4096, 37):
        yield NormSpec("rms", hidden, b)
        yield NormSpec("rms", hidden, b, b, offset=1.0)
        yield NormSpec("rms", hidden, b, b, rounding="early")
        yield NormSpec("rms", hidden, b, f, rounding="early")
        yield NormSpec("rms", hidden, b, b, b)
        yield NormSpec("layer", hidden, b)
        yield NormSpec("rms", hidden, b, f)
        yield NormSpec("rms", hidden, b, b, residual=f)
        yield NormSpec("layer", hidden, b, b, b, residual=f)
        yield NormSpec("rms", hidden, b, b, b, gate=b)
        yield NormSpec("rms", hidden, b, b, gate=f)
        yield NormSpec("rms", hidden, b, b, gate=b, rounding="early")
        yield NormSpec("rms", hidden, b, b, b, gate=f, gate_first=True)
