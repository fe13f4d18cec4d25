"""Drawn calls of every function whose results are floating-point numbers."""

from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tilenorm.table import MODULATED_NORMS, NORMS, OPS, ROTATED_NORMS

from . import layouts
from .calls import (
    CALLS,
    Form,
    assert_step,
    compare,
    expected_of,
    gradients_like,
    incoming_of,
    random,
    step,
    tensors_of,
)

B, H, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CHAINS = tuple(name for name, op in OPS.items() if op.calls)
FORMS = CALLS | {name: Form(name) for name in (*MODULATED_NORMS, *ROTATED_NORMS, *CHAINS)}
# Leading sizes and normalised sizes. Rows of one or two elements, all of whose terms cancel.
LEADS = ((), (1,), (7,), (37,), (2, 3), (0,), (2, 0))
SIZES = ((1,), (2,), (3,), (24,), (96,), (100,), (513,), (0,), (4, 6), (2, 3, 4))
# Of modulated rows: sizes of the input before a row, and of what lies by group.
GROUPS = (
    ((4, 6), ()),
    ((4, 6), (1, 1)),
    ((4, 6), (4,)),
    ((4, 6), (4, 1)),
    ((4, 6), (4, 3)),
    ((4, 6), (4, 3, 1)),
    ((4, 6), (4, 6)),
    ((1, 24), (1, 8)),
    ((24,), (6,)),
    ((2, 3, 4), (2, 3, 1)),
    ((0, 6), (0, 1)),
)
NO_GRADIENT = ("dropout_mask", "cos", "sin", "positions")
BEHIND = ("weight", "bias", "scale", "shift")  # of which the sum does not depend
BOUNDS = {B: 2e-2, H: 2e-2, F32: 1e-5, F64: 1e-12}  # of calls that no oracle serves


class Drawn(NamedTuple):
    """A step. incoming: a gradient for each output, None for one that is not used; or, in place of
    all, None. asked: the tensors whose gradients are asked for. options: of `step`.
    """

    tensors: dict[str, Tensor]
    incoming: list[Tensor | None] | None
    asked: list[str]
    options: dict


def draw(rng: Random, form: Form, dtype: torch.dtype, device: str) -> Drawn:
    kinds = dict.fromkeys(MODULATED_NORMS, modulated) | dict.fromkeys(CHAINS, chained)
    kinds |= dict.fromkeys(ROTATED_NORMS, rotated)
    tensors, options = kinds.get(form.op, plain)(rng, form, dtype)
    tensors = {name: t.to(device) for name, t in tensors.items()}
    names = [n for n in tensors if n not in NO_GRADIENT]
    if "out_dtype" in OPS[form.op].options and rng.random() < 0.4:
        options["out_dtype"] = rng.choice((F32, F64) if dtype == F64 else (B, H, F32, None))
    incoming = None
    if form.op not in ROTATED_NORMS:
        first = {"input": tensors["residual"]} if form.op in CHAINS else {}
        incoming = [*incoming_of(tensors | first, options.get("out_dtype"))]
        if len(incoming) == 2 and rng.random() < 0.4:
            incoming[rng.randrange(2)] = None
        if incoming[0] is None:
            behind = ("next_weight", "next_bias") if form.op in CHAINS else BEHIND
            names = [n for n in names if n not in behind]
    asked = rng.sample(names, rng.choice((1, len(names) - 1 or 1, len(names), len(names))))
    if form.op in NORMS:
        options["offset"] = rng.choice((0.0, 1.0, -0.5))
        options["rounding"] = rng.choice(("late", "late", "early"))
    return Drawn(tensors, incoming, asked, options)


def plain(rng: Random, form: Form, dtype: torch.dtype) -> tuple[dict, dict]:
    lead, size = rng.choice(LEADS), rng.choice(SIZES)
    heads = rng.choice((0, 0, 1, 6))
    others = (dtype, dtype, F32, B)
    if dtype == F64 or form.branch:
        others = (dtype, F32) if dtype != F64 or not form.branch else (F64,)
    tensors = tensors_of(
        form,
        *(*lead, *([heads] if heads else []), *size),
        dims=len(size),
        parameter_shape=(heads, *size) if heads else None,
        dtype=dtype,
        other=rng.choice(others),
        parameter=rng.choice((dtype, dtype, F32)),
    )
    if "addend" in tensors and rng.random() < 0.5:
        tensors["addend"] = tensors["addend"].to(dtype)
    for name in ("weight", "bias"):
        if rng.random() < 0.2:
            del tensors[name]
    return tensors, {"dims": len(size)}


def modulated(rng: Random, form: Form, dtype: torch.dtype) -> tuple[dict, dict]:
    """What lies by group are chunks of one tensor."""
    (leading, groups), hidden = rng.choice(GROUPS), rng.choice((7, 40, 96, 513))
    by_group = F64 if dtype == F64 else rng.choice((dtype, dtype, B, H, F32))
    chunks = random(*groups, 6 * hidden, dtype=by_group).chunk(6, -1)
    rows = [random(*leading, hidden, dtype=dtype, seed=1 + i) for i in range(2)]
    affine = [random(hidden, dtype=dtype, seed=3 + i) for i in range(2)]
    found = {"input": rows[0], "scale": chunks[0], "shift": chunks[1]}
    found |= {"weight": affine[0], "bias": affine[1], "residual": rows[1], "gate": chunks[4]}
    absent = {name for name in [*found][2:] if rng.random() < 0.3}
    absent |= {"gate"} if "residual" in absent else set()
    return {name: t for name, t in found.items() if name not in absent}, {}


def chained(rng: Random, form: Form, dtype: torch.dtype) -> tuple[dict, dict]:
    hidden = rng.choice((7, 40, 128, 1024, 2304))
    shape = rng.choice(((1, hidden), (5, hidden), (2, 3, hidden), (0, hidden)))
    other = F64 if dtype == F64 else rng.choice((dtype, dtype, F32))
    found = {"input": random(*shape, dtype=dtype), "residual": random(*shape, dtype=other, seed=1)}
    for seed, port in enumerate(OPS[form.op].takes[2:]):
        if rng.random() < 0.7:
            parameter = rng.choice((dtype, F32, F64 if dtype == F64 else H))
            found[port.name] = random(hidden, dtype=parameter, seed=7 + seed)
    options = {"offset": rng.choice((0.0, 1.0)), "rounding": rng.choice(("late", "early"))}
    return found, options | rng.choice(({}, {"eps": 1e-3}))


def heads_of(
    tokens=(2, 5), heads=(4, 2), head=16, columns=16, dtype=F32, weight=None, table=None
) -> dict[str, Tensor]:
    """The tensors of a rotated norm: queries and keys are views of one projection. heads: of
    queries and of keys, 0 without a key. columns: of the tables, whose rows are those of the last
    dimension of the tokens.
    """
    queries, keys = heads
    packed = random(*tokens, queries + 2 * keys, head, dtype=dtype)
    found = {"input": packed[..., :queries, :], "key": packed[..., queries : queries + keys, :]}
    for i, name in enumerate(("weight", "key_weight")):
        found[name] = random(head, dtype=weight or dtype, seed=1 + i)
    for i, name in enumerate(("cos", "sin")):
        found[name] = random(tokens[-1], columns, dtype=table or dtype, seed=3 + i)
    return {name: t for name, t in found.items() if keys or "key" not in name}


def rotated(rng: Random, form: Form, dtype: torch.dtype) -> tuple[dict, dict]:
    tokens = rng.choice(((1,), (9,), (2, 5), (3, 1), (2, 3, 3)))
    heads, head = rng.choice(((4, 2), (3, 0), (1, 1), (2, 3), (5, 1))), rng.choice((6, 16, 40, 64))
    dim = rng.choice((None, None, head // 4 * 2, 2))
    columns = (dim or head) // rng.choice((1, 2))
    weight, table = (F64 if dtype == F64 else rng.choice((B, H, F32)) for _ in range(2))
    given = heads_of(tokens, heads, head, columns, dtype, weight, table)
    options = {"rotary_dim": dim, "interleaved": rng.random() < 0.5}
    if rng.random() < 0.3:
        given = {name: t for name, t in given.items() if "weight" not in name}
    elif rng.random() < 0.3:
        options["offset"] = 1.0
    if rng.random() < 0.3 and heads != (1, 1):
        options["normalized_shape"] = heads[0], head
        for name, count in (("weight", heads[0]), ("key_weight", heads[1])):
            if name in given:
                given[name] = random(count, head, dtype=weight, seed=9)
    match rng.choice(("rows", "every row", "positions", "some positions")):
        case "every row":
            for i, name in enumerate(("cos", "sin")):
                given[name] = random(*tokens, columns, dtype=table, seed=11 + i)
        case "positions":
            kind = rng.choice((torch.int32, torch.int64))
            given["positions"] = torch.arange(tokens[-1]).flip(0).to(kind)
        case "some positions":
            last = (torch.arange(tokens[0]) % tokens[-1]).reshape(-1, *[1] * (len(tokens) - 1))
            given["positions"] = last
    if len(tokens) == 2:
        options["output_heads_first"] = rng.choice((None, False, True))
        if rng.random() < 0.5:
            options["heads_first"] = True
            given |= {n: given[n].transpose(1, 2) for n in ("input", "key") if n in given}
    return given, options


def laid_out(rng: Random, t: Tensor | None) -> Tensor | None:
    """The same numbers elsewhere in memory: apart, not aligned, in another order or broadcast."""
    if t is None or not t.dim() or not t.numel() or not t.is_floating_point():
        return t
    return layouts.draw(rng, tuple(t.shape), False).filled(t)


def check(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """What `step` gave is within the budget."""
    tensors, incoming, asked, options = drawn
    wanted = {n: (tensors[n].dtype, tensors[n].shape) for n in asked}
    assert {n: (t.dtype, t.shape) for n, t in found.items() if n in asked} == wanted
    if form.op in NORMS or form.op in MODULATED_NORMS:
        x = tensors["input"]
        if x.numel() or (form.op in NORMS and x.shape[-options["dims"] :].numel()):
            # A layer scale's gradient is made of rounded numbers: test_add.py holds it.
            names = found.keys() - ({"layer_scale"} if x.dtype.itemsize == 2 else set())
            assert_step(found, expected_of(form, tensors, incoming, **options), names)
        return
    outputs = [found[name] for name in ("output", "sum") if name in found]
    incoming = gradients_like(outputs) if incoming is None else incoming
    pairs, rounded = zip(outputs, incoming, strict=True), [*outputs, tensors["input"]]
    doubled = [(0 * y if dy is None else dy).cpu().double() for y, dy in pairs]
    exact = {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in tensors.items()}
    for name, true in step(form, exact, doubled, asked, **options).items():
        compare([found[name].cpu()], [true], max(BOUNDS[t.dtype] for t in rounded + [found[name]]))
