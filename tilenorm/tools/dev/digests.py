"""Digests of the code of every plan, so that a refactoring can show that no code has changed.

    python -m tilenorm digests --arch sm_90 > before.txt     # and after the change
    diff before.txt after.txt

The first line says which compiler made the code. Each other line is a launch: the spec, and a
digest of the kernel's machine code. The digest does not depend on the kernel's name or on how its
parameters are grouped.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ...launch.calls import Call, Needs, every_gradient
from ...launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from ...launch.target import Target
from ...launch.tuned.tables import TABLES
from ...launch.user_table import versions
from ...spec import ITEM_BYTES, NormSpec, Quantization, Rotation
from ...table import OPS
from ..precompile import calls_of, compile_call, compiling
from ..specs import title, token_rows

LARGE, SMALL = 65537, 33  # rows of a large batch and of a small batch
DTYPES = ("bfloat16", "float32")
OPERATIONS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
OPERATIONS += ("gated_rms_norm", "gate_first")
# RULE_SIZES: for each kind of plan of the rules. PART_SIZES: rows that do not fill vectors.
RULE_SIZES = (8, 37, 1000, 4096, 16384, 65537)
PART_SIZES = {"bfloat16": (37, 1001, 16391, 65537), "float32": (37, 1001)}
# (terms of dy, whether y is written once more): what a compiled step asks of a table's sizes.
SEVERAL = ((2, False), (3, False), (1, True), (3, True))
SEVERAL_SIZES = (1024, 2048, 4096)
DIGITS = 32  # printed digits of a digest


class Case(NamedTuple):
    """A plan to compile. `needs` are the gradients of a backward pass; None is a forward pass.

    save: whether the forward pass writes mean and rstd.
    """

    spec: NormSpec
    target: Target
    rows: int
    save: bool = True
    needs: Needs | None = None

    @property
    def calls(self) -> list[Call]:
        return calls_of(self.plan, self.rows)

    @property
    def plan(self) -> ForwardPlan | BackwardPlan:
        if self.needs is None:
            return plan_forward(self.spec, self.target, self.save)
        return plan_backward(self.spec, self.target, self.needs)

    def __str__(self) -> str:
        done = "forward" if self.needs is None else "backward"
        asked = "saving " if self.save else ""
        asked = asked if self.needs is None else f"{self.needs.label} "
        return f"{self.target.name} {done} {title(self.spec)} {asked}rows:{self.rows}"


def cases(arch: str) -> list[Case]:
    """Cases for every configuration of an architecture's table or rules, and for spec variants."""
    target, selected = Target.of(arch), []
    for spec in _specs(arch, "forward"):
        for save in (False, True):
            plan = plan_forward(spec, target, save)
            if plan.save == save:
                batches = (LARGE, SMALL) if plan.for_small_batches else (LARGE,)
                selected += [Case(spec, target, rows * token_rows(spec), save) for rows in batches]
    for spec in _specs(arch, "backward"):
        if spec.quantized or spec.inner:
            continue  # those of the norms themselves
        every = every_gradient(spec)
        selected.append(Case(spec, target, LARGE * token_rows(spec), needs=every))
        if arch in TABLES and spec.hidden in (37, 1024) and not spec.heads:
            for name in ("dx", "dw", "db", "dresidual", "dgate"):
                if getattr(every, name):
                    selected.append(
                        Case(spec, target, LARGE, needs=every._replace(**{name: False}))
                    )
    for hidden, (terms, output) in product(SEVERAL_SIZES if arch in TABLES else (), SEVERAL):
        for op in ("rms_norm", "add_rms_norm", "layer_norm"):
            spec = spec_of(op, hidden, "bfloat16")
            needs = every_gradient(spec)._replace(terms=terms, output=output)
            selected.append(Case(spec, target, LARGE, needs=needs))
    return selected


def digests(arch: str, processes: int | None = None) -> Iterator[str]:
    """The compiler, and the lines of every case of an architecture. Needs no GPU.

    Raises CompileError when a kernel does not compile, RuntimeError when cuTile's cache is off.
    """
    yield " ".join(("#", *(f"{name} {version}" for name, version in versions().items())))
    work = cases(arch)
    with compiling(_codes, work, processes) as results:
        for case, codes in zip(work, results, strict=True):
            for number, code in enumerate(codes):
                yield f"{case} launch:{number} {code[:DIGITS]}"


def _codes(case: Case) -> list[str]:
    """Runs in a worker. Kernels cannot be pickled, so the worker makes the calls itself."""
    return [compile_call(call, case.target.arch).code for call in case.calls]


def spec_of(op: str, hidden: int, dtype: str, **fields) -> NormSpec:
    """A spec that the table of an operation serves."""
    bias = dtype if "layer" in op else None
    if op in OPS and OPS[op].calls:
        pair = (NormSpec(OPS[op].norm, hidden, dtype, dtype, bias, skip=s) for s in (dtype, None))
        return NormSpec.chained(*pair)
    if "modulated" in op:
        added = {"residual": dtype, "mod_gate": dtype} if op.startswith("add_") else {}
        return NormSpec(op.split("_")[-2], hidden, dtype, mod_scale=dtype, mod_shift=dtype, **added)
    if op == "gate_first":
        op, fields = "gated_rms_norm", fields | {"gate_first": True}
    return NormSpec.of(op, hidden, dtype, weight=dtype, bias=bias, **fields)


def _specs(arch: str, direction: str) -> list[NormSpec]:
    specs: list[NormSpec] = []
    table = getattr(TABLES[arch], direction) if arch in TABLES else None
    for dtype, op in product(DTYPES, OPERATIONS):
        sizes = RULE_SIZES if dtype == "bfloat16" or op in ("rms_norm", "layer_norm") else ()
        if table is not None:
            sizes = [n for n, _ in table.get((op, ITEM_BYTES[dtype]), ())]
            sizes += PART_SIZES[dtype]
        specs += [spec_of(op, hidden, dtype) for hidden in sizes]
    dtype_of = {ITEM_BYTES[dtype]: dtype for dtype in DTYPES}
    for (op, size), rows in (table or {}).items():
        if op not in OPERATIONS:
            specs += [spec_of(op, hidden, dtype_of[size]) for hidden, config in rows if config]
    uneven = getattr(TABLES[arch], f"{direction}_uneven") if arch in TABLES else {}
    for (op, size), rows in uneven.items():
        specs += [spec_of(op, hidden - 16 // size, dtype_of[size]) for hidden, _ in rows]
    return list(dict.fromkeys([*specs, *(_variants() if table is not None else ())]))


def rotations(dtype: str) -> Iterator[NormSpec]:
    """Heads that are rotated: of usual sizes, in part and in pairs, and whole tokens."""
    of_key = {"weight": dtype, "key": dtype, "key_weight": dtype}
    how = [Rotation(n, n) for n in (64, 80, 96, 128, 192, 256, 37 * 2)]
    how += [Rotation(64, 256), Rotation(32, 80), Rotation(128, 128, table=dtype)]
    how += [Rotation(128, 128, True), Rotation(64, 128, True, full=False, positions="int32")]
    for rotation in how:
        yield NormSpec("rms", rotation.head, dtype, rotation=rotation, **of_key)
    early = {"rounding": "early", "rotation": Rotation(128, 128, table=dtype)}
    yield NormSpec("rms", 128, dtype, **early, **of_key)
    for heads, key_heads in ((16, 16), (32, 32), (40, 8), (64, 64)):
        whole = {"rotation": Rotation(128, 128), "key_hidden": 128 * key_heads}
        yield NormSpec("rms", 128 * heads, dtype, **whole, **of_key)


def _variants() -> Iterator[NormSpec]:
    """Specs that differ in ways the tables ignore: heads, dtypes, offset, rounding, parameters."""
    b, f = "bfloat16", "float32"
    for hidden in (128, 1000):
        for op in OPERATIONS:
            yield spec_of(op, hidden, b, heads=24)
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
        yield NormSpec("rms", hidden, b, b, quantized=Quantization("row", amax=True))
        before = NormSpec("rms", hidden, b, b, skip=b)
        yield NormSpec.chained(before, NormSpec("rms", hidden, b, b))
    yield from rotations(b)
    yield NormSpec("rms", 128, f, f, rotation=Rotation(64, 128, True))
    for hidden in (1024, 4096):
        yield NormSpec("layer", hidden, b, mod_scale=b, mod_shift=b)
        yield NormSpec("rms", hidden, b, b, b, residual=b, mod_scale=f, mod_shift=f, mod_gate=f)
        block = Quantization("block", "float8_e5m2", True, "column_tma", output=True)
        yield NormSpec("layer", hidden, b, b, b, residual=b, quantized=block)
        yield NormSpec("rms", hidden, f, b, quantized=Quantization("mx", layout="swizzled"))
        yield NormSpec("rms", hidden, b, b, quantized=Quantization("tensor"))
