"""Every kernel and plan the planner emits compiles, and those for tuned architectures do not spill.

Nothing needs a GPU. A kernel takes 0.1-1 s, so that sm_90 and sm_100 compile every regime, and the
other architectures one spec of each kind of plan. The quick cases compile one regime of each
schedule and of each op, and each kind of plan for one other architecture, forward or backward.
The slow cases are a third of the others, because all take ten minutes of two cores; `python -m
tilenorm digests` compiles every configuration of an architecture. Tests wait for their own results
only, which all cores produce from the moment the first test asks.
"""

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count, cycle, product
from multiprocessing import get_context

import pytest

from tests import cases
from tests.executors import backward_calls, forward_calls, with_arguments
from tilenorm.launch import heuristics
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.config import tile_width
from tilenorm.launch.plan import plan_forward
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.launch.tuned import TABLES
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import compile_call, piece_calls, training_calls
from tilenorm.tools.signature import ArrayLike

TUNED = ("sm_90", "sm_100")
ROWS = 65537
# One size of each kind of plan: rows a tile, a row a tile, TMA where there is, chunks; by vectors
# and by elements.
SIZES = (8, 37, 1000, 4096, 8192, 40000, 65537)
KINDS = [NormSpec("rms", n, "bfloat16", "bfloat16", "bfloat16", 1.0) for n in SIZES]
KINDS += [
    NormSpec("layer", n, "float16", "float16", "float16", residual="float32") for n in (37, 65537)
]
KINDS += [
    NormSpec("layer", 4096, "float16", "float16", "float16", residual="float32", addend="float16")
]
KINDS += [
    NormSpec(
        **{"norm": "layer", "hidden": n, "dtype": d, "weight": d, "bias": d, "residual": d},
        **{"dropout_mask": "bool", "dropout_scale": 1 / 0.9, "layer_scale": d},
    )
    for n, d in ((40000, "float32"), (1024, "bfloat16"))
]
KINDS += [NormSpec("rms", 1536, "float32", gate="bfloat16", gate_first=True)]
KINDS += [NormSpec("rms", 128, "bfloat16", "bfloat16", heads=24, rounding="early")]

MOST_SPILLED_BY_MORE = 16  # bytes a thread; backward_of_more of sm_90.json has what spilled more
PIECES = (37, 1024, 4096, 8192, 16384, 40000)  # columns of a row that one process holds


def regime_specs(direction: str, arch: str) -> list[NormSpec]:
    """A size of each regime for each operation that has a table, or what needs most registers."""
    specs = []
    turns = cycle((False, True))
    for dtype, aligned in (("bfloat16", True), ("float32", True), ("bfloat16", False)):
        seen = set()
        tables = getattr(TABLES.get(arch), direction, {}) if aligned else {}
        every = [
            NormSpec(**{"norm": "rms", "hidden": 0, "dtype": dtype, **fields})
            for fields in cases.tabled(dtype)
        ]
        tabled = [s for s in every if (stands_for(direction, s), s.widest_item) in tables]
        for first, last in cases.regimes(direction, arch, dtype, aligned):
            for operation in tabled or every[0::3]:
                spec = replace(operation, hidden=last)
                chosen = cases.config(direction, spec, Target.of(arch))
                # Blocks that share a row are the same whatever their number.
                shared = cases.shares(chosen, last)
                width = 0 if shared else tile_width(last)
                if (chosen, width, operation) not in seen:
                    seen.add((chosen, width, operation))
                    # Of a regime's sizes the last and the first, which is masked, take turns.
                    specs.append(replace(spec, hidden=first) if next(turns) else spec)
    specs = list(dict.fromkeys(specs))
    # sm_100 has the table of sm_90, which compiles all of them.
    return specs if arch == "sm_90" else specs[::3]


def stands_for(direction: str, spec: NormSpec) -> str | None:
    """The operation whose table serves a spec, in a direction."""
    op = heuristics.operation(spec, None if direction == "forward" else every_gradient(spec))
    return op and heuristics.shipped_op(spec, op)


def calls_of(direction: str, spec: NormSpec, arch: str):
    if direction == "forward":
        rows, few = ROWS * (spec.heads or 1), 33 * (spec.heads or 1)
        more = plan_forward(spec, Target.of(arch), True).fetches
        calls = forward_calls(spec, Target.of(arch), rows, True)
        return calls + forward_calls(spec, Target.of(arch), few, True) if more else calls
    return backward_calls(spec, Target.of(arch), ROWS * (spec.heads or 1), every_gradient(spec))


def calls_of_kind(spec: NormSpec, arch: str, needs: Needs, save: bool):
    """Forward and backward with these flags."""
    target = Target.of(arch)
    return forward_calls(spec, target, ROWS, save) + backward_calls(spec, target, ROWS, needs)


def calls_of_rows_apart(spec: NormSpec, arch: str):
    """Forward and backward of rows that are evenly spaced, but not contiguous."""
    x = ArrayLike(spec.dtype, (7, spec.hidden), (2 * spec.hidden, 1))
    return with_arguments(calls_of_kind(spec, arch, every_gradient(spec), True), X=x, DY=(x,))


def calls_of_pieces(spec: NormSpec, arch: str):
    return piece_calls(spec, Target.of(arch), ROWS * (spec.heads or 1))


def calls_of_training(spec: NormSpec, arch: str):
    return training_calls(spec, Target.of(arch))


def collect_seldom():
    """In a worker: looking for garbage is a fifth of the time that cuTile traces."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def compile_all(arch: str, make, arguments):
    """In a worker: a kernel is not pickled, so calls are made where they are compiled."""
    return [compile_call(call, arch) for call in make(*arguments)]


def param(job, quick: bool, name: str):
    return pytest.param(job, id=name, marks=() if quick else pytest.mark.slow)


def sampled(params):
    """The quick cases, and every third of the others."""
    slow = count()
    return [param for param in params if not param.marks or next(slow) % 3 == 0]


def regime_params():
    quick = set()
    for arch, direction in product(TUNED, cases.DIRECTIONS):
        for spec in regime_specs(direction, arch):
            chosen = cases.config(direction, spec, Target.of(arch))
            reaches = {(arch, direction, cases.schedule(chosen, spec.hidden)), (arch, spec.op)}
            job = (arch, calls_of, (direction, spec, arch))
            name = f"{arch}-{direction}-{cases.label(spec)}"
            yield param(job, not reaches <= quick, name)
            quick |= reaches


def kind_params():
    others = [arch for arch in MULTIPROCESSORS if arch not in TUNED]
    for (i, arch), (j, spec) in product(enumerate(others), enumerate(KINDS)):
        for direction in cases.DIRECTIONS:
            turns = KINDS[: len(others)] if direction == "forward" else KINDS[-len(others) :]
            job = (arch, calls_of, (direction, spec, arch))
            quick = spec in turns and j % len(others) == i
            yield param(job, quick, f"{arch}-{direction}-{cases.label(spec)}")


def flag_params():
    added = {"norm": "layer", "residual": "float32", "addend": "float32"}
    gated = {"norm": "rms", "gate": "float16"}
    forms = [(1000, gated), (1000, {"norm": "rms"}), (5120, added), (40000, added)]
    forms += [(1000, gated | {"norm": "layer", "gate_first": first}) for first in (False, True)]
    for hidden, fields in forms:
        spec = NormSpec(
            hidden=hidden, dtype="bfloat16", weight="bfloat16", bias="float32", **fields
        )
        for needs in cases.some_needs(spec):
            asked = "+".join(k for k, v in needs._asdict().items() if v)
            job = ("sm_90", calls_of_kind, (spec, "sm_90", needs, False))
            quick = hidden == 1000 and needs == cases.some_needs(spec)[0]
            yield param(job, quick, f"{cases.label(spec)}-{asked}")
        job = ("sm_90", calls_of_rows_apart, (spec, "sm_90"))
        yield param(job, hidden == 1000, f"{cases.label(spec)}-rows_apart")
    spec = NormSpec("rms", 1000, "bfloat16", "bfloat16")
    # test_main.py runs `precompile`, which compiles the same, so that this is not quick.
    yield param(("sm_90", calls_of_training, (spec, "sm_90")), False, "any_number_of_rows")


def several_params():
    """Each size of a table with several terms of dy, or with y, in turns, and each size that has a
    configuration of its own then.
    """
    turns = cycle(((2, False), (3, True), (3, False), (1, True)))
    for arch, table in TABLES.items():
        for (op, size), rows in table.backward.items():
            own = [row[:3] for row in table.more.get((op, size), ())]
            dtype = {2: "bfloat16", 4: "float32"}[size]
            every = [
                NormSpec(**{"norm": "rms", "hidden": 64, "dtype": dtype, **fields})
                for fields in cases.tabled(dtype)
            ]
            like = next(spec for spec in every if stands_for("backward", spec) == op)
            for hidden, config in rows:
                spec = replace(like, hidden=hidden)
                asked = [next(turns)] + [row[1:] for row in own if row[0] == hidden]
                asked += [(3, output) for _, output in asked]
                for terms, output in dict.fromkeys(asked) if config else ():
                    needs = every_gradient(spec)._replace(terms=terms)
                    needs = needs._replace(output=output and not spec.output_refused)
                    quick = hidden == 2048 and op == "rms_norm" and size == 2
                    job = (arch, backward_calls, (spec, Target.of(arch), ROWS, needs))
                    yield param(job, quick, f"{arch}-{cases.label(spec)}-{needs.label}")


def piece_params():
    """Of pieces of rows: each operation in each kind of plan, the architectures in turns. One of
    each architecture is quick.
    """
    archs = ("sm_80", "sm_90", "sm_100", "sm_120")
    for n, (hidden, dtype) in enumerate(product(PIECES, ("bfloat16", "float32"))):
        for i, fields in enumerate(cases.tabled(dtype)):
            arch = archs[(i + (hidden != 1024) * n) % len(archs)]
            spec = NormSpec(**{"norm": "rms", "hidden": hidden, "dtype": dtype, **fields})
            quick = hidden == 1024 and dtype == "bfloat16" and i == archs.index(arch)
            job = (arch, calls_of_pieces, (spec, arch))
            yield param(job, quick, f"{arch}-{cases.label(spec)}")


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """job -> its results, from workers that share a cache; those of all selected tests at once."""
    selected = [item for item in request.session.items if item.module is request.module]
    jobs = dict.fromkeys(i.callspec.params["job"] for i in selected if hasattr(i, "callspec"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path_factory.mktemp("cutile")))
        # Fork is not safe once threads are up.
        workers = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), collect_seldom)
        with workers:
            results = {job: workers.submit(compile_all, *job) for job in jobs}
            yield lambda job: results[job].result()
            workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", sampled([*kind_params(), *flag_params()]))
def test_compiles(compiled, job):
    assert compiled(job)


@pytest.mark.parametrize("job", sampled(regime_params()))
def test_every_regime_compiles_and_does_not_spill(compiled, job):
    results = compiled(job)
    arch, _, (direction, spec, _) = job
    spilled = {c.kernel: c.spill_bytes for c in results if c.spill_bytes}
    excess = {k: b for k, b in spilled.items() if b > allowed_spill(k, direction, spec, arch)}
    assert not excess, f"bytes a thread: {excess}"


@pytest.mark.parametrize("job", sampled(several_params()))
def test_several_terms_compile_and_hardly_spill(compiled, job):
    arch, _, (spec, _, _, needs) = job
    op = stands_for("backward", spec)
    owned = TABLES[arch].spills.get(("norm_backward", op, spec.widest_item, spec.hidden), 0)
    spilled = {c.kernel: c.spill_bytes for c in compiled(job)}
    assert max(spilled.values()) <= max(owned, MOST_SPILLED_BY_MORE), (spilled, needs)


@pytest.mark.parametrize("job", sampled(piece_params()))
def test_pieces_compile_and_do_not_spill(compiled, job):
    spilled = {c.kernel: c.spill_bytes for c in compiled(job) if c.spill_bytes}
    assert not spilled, f"bytes a thread: {spilled}"


def allowed_spill(kernel: str, direction: str, spec: NormSpec, arch: str) -> int:
    """Bytes that the table of an architecture owns up to for this configuration."""
    chosen = cases.config(direction, spec, Target.of(arch))
    alike = stands_for(direction, spec)
    spills = getattr(TABLES.get(arch), "spills", {})
    for (name, op, size, hidden), spilled in spills.items():
        edge = replace(spec, hidden=hidden)
        same = (name, op, size) == (kernel, alike, spec.widest_item) and spec.hidden <= hidden
        if same and cases.config(direction, edge, Target.of(arch)) == chosen:
            return spilled
    return 0
