"""What drawn plans launch is what launches.txt says: a digest of the kernels, grids, arrays and
constants of each plan.

Results alone do not tell it: a kernel that gets an array in another shape may give the same
numbers, and is then compiled twice. A change that is meant to change launches, as a new
configuration does, writes the file anew:

    python -m tests.tools.test_launches
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

import torch

from tests.support import cases, drawing
from tests.support.quantized import HOWS
from tilenorm.launch.calls import Sizes, every_gradient
from tilenorm.launch.plan import chain_refused, plan_backward, plan_forward
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.spec import GROUPS, NormSpec, Rotation
from tilenorm.table import OPS
from tilenorm.tools.precompile import calls_of

FILE = Path(__file__).parent / "launches.txt"
SEEDS_OF_AN_OP = 6
SEEDS_OF_OUT_DTYPE = 3  # behind them, of an op that has the option
ROWS = (0, 1, 16, 60, 4096)


def spec_of(rng: Random, op: str, target: Target) -> NormSpec | None:
    """A drawn spec of an op. None for a chain that a target's plans take norm by norm."""
    row, dtype = OPS[op], rng.choice(cases.DTYPES)
    if row.rotated:
        return rotated(rng, op, dtype)
    if row.calls:
        skip, after = (stage.op for stage in row.calls)
        hidden = drawing.hidden(rng, 8192)
        before = NormSpec.of(skip, hidden, dtype, weight=dtype)
        spec = NormSpec.chained(before, NormSpec.of(after, hidden, dtype, weight=dtype))
        return None if chain_refused(spec, target) else spec
    if not row.quantized:
        return drawing.spec(rng, op, dtype, drawing.hidden(rng, 32768))
    how = rng.choice(HOWS)
    group = GROUPS[how.scaling] or 8
    hidden = group * rng.randint(1, 16384 // group)
    weight = rng.choice((None, dtype))
    heads = rng.choice((0, 0, 2)) if weight else 0
    return NormSpec.of(op, hidden, dtype, weight=weight, heads=heads, quantized=how)


def rotated(rng: Random, op: str, dtype: str) -> NormSpec:
    head = rng.choice((24, 64, 128))
    weight, key = rng.choice((None, dtype)), rng.choice((None, dtype))
    fields = {"weight": weight, "key": key, "key_weight": key and weight}
    fields["rotation"] = Rotation(
        rng.choice((8, 16, head)),
        head,
        interleaved=rng.choice((False, True)),
        table=rng.choice((dtype, "float32")),
        full=rng.choice((False, True)),
        positions=rng.choice((None, "int32", "int64")),
        heads_first=rng.choice((False, True)),
    )
    if rng.choice((False, True)):  # all heads of a token are one row
        return NormSpec.of(op, 4 * head, dtype, key_hidden=2 * head if key else 0, **fields)
    return NormSpec.of(op, head, dtype, **fields)


def plans() -> Iterator[tuple[str, list]]:
    """A name, and the calls, of each drawn plan."""
    for op in OPS:
        end = SEEDS_OF_AN_OP + SEEDS_OF_OUT_DTYPE * ("out_dtype" in OPS[op].options)
        for seed in range(end):
            rng = Random(f"{op} {seed}")
            target = Target.of(list(MULTIPROCESSORS)[seed % len(MULTIPROCESSORS)])
            spec = spec_of(rng, op, target)
            if spec is None:
                continue
            other = "bfloat16" if spec.dtype == "float32" else "float32"
            spec = replace(spec, out_dtype=None if seed < SEEDS_OF_AN_OP else other)
            rows = rng.choice(ROWS) * (spec.heads or 1)
            groups = rng.choice((1, 2, 4)) if rows % 4 == 0 else 1
            sizes = None
            if spec.rotation:
                sizes = Sizes(2, rng.choice((0, 1, 8, 60)), 4, 2 if spec.key else 0)
            directions = [("inference", plan_forward(spec, target, False))]
            directions.append(("training", plan_forward(spec, target, True)))
            if spec.differentiable and not spec.inner:
                needs = drawn_needs(rng, spec)
                directions.append(("backward", plan_backward(spec, target, needs)))
            for direction, plan in directions:
                yield f"{op} {seed} {direction}", calls_of(plan, rows, groups, sizes)


def drawn_needs(rng: Random, spec: NormSpec):
    """Every gradient, or some of them, and y once more where the kernels can write it."""
    needs = every_gradient(spec)
    if not (spec.modulated or spec.rotation):
        needs = needs._replace(terms=rng.randint(1, 3))
        if not spec.output_refused:
            needs = needs._replace(output=rng.choice((False, True)))
    return needs._replace(dw=needs.dw and rng.choice((False, True)))


def described(value: object) -> object:
    """A tensor by its dtype, shape and strides, and anything else by what it prints."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), list(value.stride())
    if isinstance(value, tuple):
        return [*map(described, value)]
    return str(value)


def lines() -> list[str]:
    """A name and a digest of each drawn plan."""
    written = []
    for name, calls in plans():
        launches = [
            (call.kernel._pyfunc.__name__, call.grid, described(call.arguments), call.overlap)
            for call in calls
        ]
        written.append(f"{name} {sha256(json.dumps(launches).encode()).hexdigest()[:16]}")
    return written


def test_drawn_plans_launch_what_they_launched():
    expected = FILE.read_text().splitlines()
    assert len(expected) > 200
    assert lines() == expected


def test_an_array_of_another_shape_changes_a_digest():
    x = torch.empty(4, 8, device="meta")
    assert described((x, 1)) != described((x.view(32), 1))
    assert described((x,)) != described((x.t().contiguous().t().view(4, 8),))


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
