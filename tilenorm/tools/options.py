"""The options of the command line, and the specs and searches that they ask for."""

import argparse
from itertools import product
from pathlib import Path

from ..launch.toolchain import cache_problem
from ..ops.passes.registry import DTYPES, Device, refusals
from ..spec import FP8, GROUPS, LAYOUTS, MAX_TERMS, NormSpec, Quantization, Rotation
from ..table import (
    MODULATED_NORMS,
    MODULATION,
    NORMS,
    NOT_OF_ROWS,
    OPS,
    OPTIONS,
    QUANTIZED_NORMS,
    ROTATED_NORMS,
)
from .candidates import MOST_SPILLED, Search
from .explain import gpu, planned_device

TERMS = range(1, MAX_TERMS + 1)  # of dy


class RefusedError(Exception):
    """The command cannot run; the message says why."""


def check_cache() -> None:
    if problem := cache_problem():
        raise RefusedError(f"{problem}: nothing would be kept")


def tuned_device(asked: argparse.Namespace) -> Device:
    """This machine's GPU, or, in a dry run, a GPU of the architecture from --arch."""
    if not asked.hidden and not asked.shipped:
        raise RefusedError("--hidden: needs at least one size")
    if asked.dry_run and not asked.arch:
        raise RefusedError("--dry-run: needs --arch")
    if asked.arch and asked.hidden and not asked.dry_run:
        raise RefusedError("--arch: tune times on this GPU; only --dry-run takes an architecture")
    try:
        return planned_device(asked.arch) if asked.arch else gpu()
    except RuntimeError as error:
        raise RefusedError(str(error)) from error


def searches(asked: argparse.Namespace, device: Device) -> list[Search]:
    """The searches. Refuses specs that no table can serve."""
    directions = asked.direction
    if asked.out_dtype:
        raise RefusedError("--out-dtype: tables serve every output of a norm; tune without it")
    if asked.terms > 1:
        directions = [name for name in directions if name == "backward"]
        if not directions:
            raise RefusedError("--terms: the forward pass takes none; tune --direction backward")
    specs = served(asked, device)
    selected = [Search(s, device.target, d, asked.terms) for s, d in product(specs, directions)]
    try:
        for search in selected:
            search.key()
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return selected


def served(asked: argparse.Namespace, device: Device) -> list[NormSpec]:
    """The specs. Refuses specs that the kernels do not serve, and a cache that is off."""
    check_cache()
    specs = specs_of(asked)
    for spec in specs:
        if reason := refusals(spec, 1, device)["cutile"]:
            raise RefusedError(reason)
    return specs


def specs_of(asked: argparse.Namespace) -> list[NormSpec]:
    return [_spec(asked, *which) for which in product(asked.op, asked.hidden, asked.dtype)]


def _spec(asked: argparse.Namespace, op: str, hidden: int, dtype: str) -> NormSpec:
    added, after, gated = op.startswith("add_"), op.endswith("_add"), op.startswith("gated_")
    branches = added and op not in QUANTIZED_NORMS and asked.residuals == 1
    modulated, rotated = op in MODULATED_NORMS, op in ROTATED_NORMS
    residual = added or after or modulated
    rotation = asked.rotary_dim, asked.head_dim, asked.interleaved, asked.table_dtype
    rotation = any((*rotation, asked.half_tables, asked.positions))
    for name, given, taken, why in (
        ("--residual-dtype", asked.residual_dtype, residual, "takes no residual"),
        ("--group-dtype", asked.group_dtype, modulated, "takes nothing by group"),
        ("--rotary-dim, --head-dim and the like", rotation, rotated, "takes none"),
        ("--bias", asked.bias, not rotated, "takes none"),
        ("--residuals", asked.residuals > 1, added, "takes no residual"),
        ("--dropout-mask", asked.dropout_mask, branches, "takes none, or not with these options"),
        ("--layer-scale", asked.layer_scale, branches, "takes none, or not with these options"),
        ("--gate-first", asked.gate_first, gated, "takes no gate"),
        ("--activation", asked.activation, gated, "takes no gate"),
        ("--out-dtype", asked.out_dtype, "out_dtype" in OPS[op].options, "takes none"),
    ):
        if given and not taken:
            raise RefusedError(f"{name}: {op} {why}")
    parameter, affine = asked.weight_dtype or dtype, asked.bias or not asked.no_weight
    fields = {
        "weight": None if asked.no_weight else parameter,
        "bias": parameter if asked.bias else None,
        "offset": asked.offset,
        # As in a call: one head, or heads without parameters, count as no heads.
        "heads": asked.heads if asked.heads > 1 and affine else 0,
        "rounding": asked.rounding,
        "gate_first": asked.gate_first,
        "activation": asked.activation or "silu",
        "addend": dtype if asked.residuals > 1 else None,
        "dropout_mask": "bool" if asked.dropout_mask else None,
        "dropout_scale": asked.dropout_mask or 1.0,
        "layer_scale": parameter if asked.layer_scale else None,
        "out_dtype": None if asked.out_dtype == dtype else asked.out_dtype,
    }
    if asked.residual_dtype:
        fields["skip" if after else "residual"] = asked.residual_dtype
    if modulated:
        by_group = MODULATION if asked.residual_dtype else MODULATION[:2]
        fields |= dict.fromkeys(by_group, asked.group_dtype or dtype)
    if rotated:
        fields |= _rotation(asked, hidden, dtype, fields["weight"])
    if op in QUANTIZED_NORMS:
        fields["quantized"] = _quantization(asked, hidden)
    return NormSpec.of(op, hidden, dtype, **fields)


def _rotation(asked: argparse.Namespace, hidden: int, dtype: str, weight: str | None) -> dict:
    """The fields of a spec whose heads are rotated, with a key."""
    head = asked.head_dim or hidden
    table, full = asked.table_dtype or "float32", not asked.half_tables
    how = asked.rotary_dim or head, head, asked.interleaved, table, full, asked.positions
    keys = hidden if head != hidden else 0
    rotation = Rotation(*how)
    return {"rotation": rotation, "key": dtype, "key_weight": weight, "key_hidden": keys}


def _quantization(asked: argparse.Namespace, hidden: int) -> Quantization:
    scaling, group = asked.scaling, GROUPS[asked.scaling] or 1
    layout = asked.layout or LAYOUTS[scaling][0]
    if layout not in LAYOUTS[scaling]:
        takes = " or ".join(LAYOUTS[scaling])
        raise RefusedError(f"--layout: takes {takes} with --scaling {scaling}, got {layout}")
    if hidden % group:
        raise RefusedError(f"--hidden: takes a multiple of {group} with --scaling {scaling}")
    if asked.power_of_2 and scaling not in ("row", "block"):
        raise RefusedError("--power-of-2: takes --scaling row or block")
    return Quantization(scaling, asked.fp8, asked.power_of_2, layout, asked.return_output)


def add_spec(command: argparse.ArgumentParser, size: dict) -> None:
    """Add the options that describe specs. size: whether --hidden is required."""
    add = command.add_argument
    add("--op", nargs="+", default=["rms_norm"], choices=NORMS + QUANTIZED_NORMS + NOT_OF_ROWS)
    add("--hidden", type=_positive, nargs="+", metavar="N", **size)
    add("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    add("--weight-dtype", choices=DTYPES, help="default: --dtype")
    add("--no-weight", action="store_true")
    add("--bias", action="store_true", help="with a bias of the weight's dtype")
    add("--offset", type=float, default=0.0, help="added to the weight")
    add("--heads", type=_positive, default=0, help="each head has its own weight")
    add("--rounding", default="late", choices=OPTIONS["rounding"].words)
    add("--out-dtype", choices=DTYPES, help="of the output; default: --dtype")
    add("--residual-dtype", choices=DTYPES, help="default: --dtype; modulated norms: none, no gate")
    add("--group-dtype", choices=DTYPES, help="of scale, shift and gate; default: --dtype")
    add("--residuals", type=int, default=1, choices=(1, 2), help="how many are added to the input")
    add("--dropout-mask", type=float, metavar="S", help="the input is times a mask and times S")
    add("--layer-scale", action="store_true", help="the input is times a vector")
    add("--rotary-dim", type=_positive, metavar="R", help="elements of a head that are rotated")
    add("--head-dim", type=_positive, metavar="D", help="a norm spans N / D heads of a token")
    add("--interleaved", action="store_true", help="elements 2i and 2i + 1 are rotated")
    add("--table-dtype", choices=DTYPES, help="of cos and sin (float32)")
    add("--half-tables", action="store_true", help="of half as many columns")
    add("--positions", choices=("int32", "int64"), help="of the rows in the tables")
    add("--gate-first", action="store_true", help="gate, then normalise")
    add("--activation", choices=OPTIONS["activation"].words, help="of the gate (silu)")
    layouts = sorted({layout for layouts_of in LAYOUTS.values() for layout in layouts_of})
    add("--scaling", default="row", choices=GROUPS, help="of a quantised norm")
    add("--fp8", default="float8_e4m3fn", choices=FP8, help="what it writes")
    add("--power-of-2", action="store_true", help="its scales are powers of two")
    add("--layout", choices=layouts, help="of its scales")
    add("--return-output", action="store_true", help="it writes y too")


def add_aside(command: argparse.ArgumentParser) -> None:
    help = "let other processes go first, and do not try again what has failed before"
    command.add_argument("--aside", action="store_true", help=help)


def add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--processes", type=_positive, help="default: all cores")


def add_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rows", type=_positive, default=8192, metavar="M")


def add_terms(command: argparse.ArgumentParser) -> None:
    command.add_argument("--terms", type=int, default=1, choices=TERMS, help="of dy, backward (1)")


def add_calls(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    several = {"type": int, "nargs": "*", "choices": TERMS, "default": [1], "metavar": "K"}
    add("--terms", **several, help="terms of dy, for a compiled step; without K: 1 2 3")
    add("--output", action="store_true", help="also gradients that write y once more")


def add_tuning(command: argparse.ArgumentParser) -> None:
    add, both = command.add_argument, ("forward", "backward")
    add("--direction", nargs="+", default=both, choices=both)
    add("--rows", type=_positive, metavar="M", help="default: 64 Mi elements")
    add("--seconds", type=_positive, default=20, help="time for timing each spec and direction")
    add("--spills", type=int, default=MOST_SPILLED, help="bytes that each thread may spill")
    add("--out", type=Path, help="default: the table that plans read")
    add("--dry-run", action="store_true", help="list candidates; needs no GPU")
    add("--shipped", action="store_true", help="print the table as in launch/tuned/")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, takes a positive number")
    return value
