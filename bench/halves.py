"""``python -m bench halves`` counts the launches and the bytes of a backward in two halves.

A zero-bubble pipeline computes the gradients of a stage's inputs in one pass, and those of its
parameters in a later pass. The bytes are what the mathematics of each pass reads and writes. The
launches are those of tilenorm's plans for an architecture. The last column compares the two halves
with two whole passes, which is what halves cost if each computes every gradient.

This command needs no GPU and measures no time. ``python -m bench --direction backward
backward-inputs backward-parameters`` measures the times.
"""

import argparse

from bench.cases import DTYPES, HALVES, OPS, Case, Op
from bench.text import table
from tilenorm.launch.plan import plan_backward
from tilenorm.launch.target import MULTIPROCESSORS, Target
from tilenorm.ops.tensors import Tensors, asked_of_plain, merged_needs
from tilenorm.spec import NormSpec

PASSES = ("backward", *HALVES)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench halves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    served = [name for name, op in OPS.items() if op.heads is None]
    parser.add_argument("--op", nargs="+", choices=OPS, default=served)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--hidden", type=int, metavar="N", default=4096)
    parser.add_argument("--rows", type=int, metavar="M", default=8192)
    parser.add_argument("--arch", choices=MULTIPROCESSORS, default="sm_90")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args(argv)
    print(f"{args.rows} rows of {args.hidden} elements in {args.dtype}, {args.arch}\n")
    header = ["op", *PASSES, "bytes of two halves / of two whole passes"]
    print(table(header, [_row(OPS[name], args) for name in args.op], args.markdown))
    return 0


def _row(op: Op, args: argparse.Namespace) -> list[str]:
    heads = op.heads or 1
    case = Case(op.name, args.dtype, args.rows // heads * heads, args.hidden)
    shown, moved = [], []
    for direction in PASSES:
        count = launches(case, direction, Target.of(args.arch))
        moved.append(op.bytes(direction, case.m, case.n, DTYPES[case.dtype].itemsize))
        shown.append(f"{count} launch{'es' * (count > 1)}, {moved[-1] / 1e6:.0f} MB")
    return [op.name, *shown, f"{sum(moved[1:]) / (2 * moved[0]):.2f}"]


def launches(case: Case, direction: str, target: Target) -> int:
    """How many kernels tilenorm launches for a direction."""
    op = OPS[case.op]
    name, columns = case.op.removeprefix("head_"), dict.fromkeys(op.columns, case.dtype)
    spec = NormSpec.of(name, case.n, case.dtype, heads=op.heads or 0, **columns)
    asked = [{"x": "input"}.get(n, n) for n in (*op.rows, *op.columns)][op.gradients(direction)]
    mask = tuple(field in asked for field in Tensors._fields)
    needs = merged_needs(spec.dtypes, "sum" in op.outputs, asked_of_plain(spec.dtypes, mask))
    return len(plan_backward(spec, target, needs).launches(case.m))
