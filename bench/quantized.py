"""``python -m bench quantized`` measures norms whose output is 8-bit floats with scales.

Each provider computes the norm of bfloat16 rows and quantises it, by row, by blocks of 128 or with
the caller's scale ("tensor"); only the forward pass has codes. The bytes are those of the
mathematics: each input is read once, and the codes, the scales and the sum with the residual are
written once. ``torch`` and ``compile`` are PyTorch's norm followed by the operations of a cast.
``tilenorm+cast`` is tilenorm's norm followed by that cast under torch.compile. ``flashinfer``
writes the sum over the residual; its norm by blocks always writes y too, so that norm is measured
with ``--output``. What a provider returns is checked before it is timed.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import provenance, record, report, timing
from bench.lines import Cell, Copy
from bench.quantized_providers import PROVIDERS, SCALINGS, pytorch_norm
from bench.record import first_line

OPS = ("rms_norm_quantized", "add_rms_norm_quantized")
SIZES = (1024, 2048, 4096, 8192, 16384, 65536)
STATIC_SCALE = 1 / 64  # the largest code is 448 / 64 = 7, and y is smaller
ELEMENTS = 1 << 26
MOST_ERROR = 0.04  # of the norm of y: three bits of mantissa miss it by about 0.026
DIRECTION = "forward"  # without grad: the codes have no backward pass


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    device = provenance.device()
    made = provenance.describe_run(device, ["quantized", *argv], {})
    elements = args.elements
    if device == "cpu":
        print(report.CPU_NOTICE, file=sys.stderr)
        elements = min(elements, 1 << 14)
    # A CUDA graph cannot capture the default stream.
    stream = torch.cuda.Stream(device) if device != "cpu" else None
    with torch.cuda.stream(stream), record.writing(args.out, made) as (found, emit):
        for hidden in args.hidden:
            for line in measured(max(1, elements // hidden), hidden, args, device):
                emit(line)
    print(report.render(found, args.markdown))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench quantized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--hidden", nargs="+", type=int, default=SIZES, metavar="N")
    parser.add_argument("--scaling", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--provider", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--output", action="store_true", help="y is returned too")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="default: 64 Mi")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each time")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    args = parser.parse_args(argv)
    if any(n < 1 or n % 128 for n in args.hidden):
        parser.error("--hidden: takes multiples of 128")
    return args


def bytes_of(scaling: str, added: bool, output: bool, rows: int, hidden: int) -> int:
    """x, the weight and the codes; the residual and the sum; y where it is returned; the scales.

    The caller's scale is not written.
    """
    groups = 0 if scaling == "tensor" else hidden // (SCALINGS[scaling] or hidden)
    matrices = 2 + 1 + 4 * added + 2 * output
    return rows * hidden * matrices + 2 * hidden + 4 * rows * groups


def measured(
    rows: int, hidden: int, args: argparse.Namespace, device: str
) -> Iterator[Cell | Copy]:
    """The time of a copy, and a cell for each op, scaling and provider."""
    source = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device).normal_()
    moved = 2 * source.nbytes
    copies = [
        partial(torch.empty_like(source).copy_, source.clone())
        for _ in range(timing.rotating_sets(moved, device))
    ]
    found = timing.measure(copies, moved, device, args.budget)
    yield Copy(
        "bfloat16", rows, hidden, moved, found.median_us, found.spread, found.samples, found.kind
    )
    for added in (op == OPS[1] for op in OPS if op in args.op):
        for scaling in args.scaling:
            for name in args.provider:
                asked = (scaling, added, args.output)
                yield cell(name, asked, (rows, hidden, device, args.budget))


def inputs(rows: int, hidden: int, device: str, added: bool) -> list[Tensor]:
    """x, the residual if one is added, the weight, and the caller's scale."""
    make = torch.Generator(device).manual_seed(rows + hidden)
    like: dict[str, Any] = {"generator": make, "device": device}
    matrices = [torch.randn(rows, hidden, **like).bfloat16() for _ in range(1 + added)]
    weight = (0.25 + 0.5 * torch.rand(hidden, **like)).bfloat16()
    return [*matrices, weight, torch.full((1,), STATIC_SCALE, device=device)]


def cell(name: str, asked: tuple[str, bool, bool], how: tuple) -> Cell:
    scaling, added, output = asked
    rows, hidden, device, budget = how
    op = f"{OPS[added]} {scaling}{' + y' if output else ''}"
    nbytes = bytes_of(*asked, rows, hidden)
    line = {"op": op, "dtype": "bfloat16", "m": rows, "n": hidden, "direction": DIRECTION}
    line |= {"provider": name, "bytes": nbytes}
    try:
        run = PROVIDERS[name](*asked)
        if run is None:
            return Cell(**line, status="skipped", error=f"has no {op}")
        with torch.no_grad():
            given = inputs(rows, hidden, device, added)
            # A provider may overwrite its inputs.
            if (error := wrong_by(run(*map(torch.clone, given)), given, scaling)) > MOST_ERROR:
                why = f"the result is wrong by {error:.3g} of its norm"
                return Cell(**line, status="wrong", error=why)
            sets = timing.rotating_sets(nbytes, device)
            calls = [partial(run, *map(torch.clone, given)) for _ in range(sets)]
            found = timing.measure(calls, nbytes, device, budget)
    except Exception as error:  # the failure of a peer is a result
        _forget_failed_launch(device)
        return Cell(**line, status="failed", error=first_line(error))
    numbers = {"median_us": found.median_us, "spread": found.spread, "samples": found.samples}
    return Cell(**line, **numbers, timing=found.kind)


def _forget_failed_launch(device: str) -> None:
    """Launch something, which raises the error that a launch outside of PyTorch may have left."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def wrong_by(found: tuple, given: list[Tensor], scaling: str) -> float:
    """The error of the decoded rows, as a share of their norm; of the sum as well, if there is one.

    A NaN is an infinite error.
    """
    *rows, w, static = given
    y, *total = pytorch_norm(len(rows) > 1)(*rows, w)
    q, *written = found
    scale, *sums = [static, *written] if scaling == "tensor" else written
    decoded = q.float().unflatten(-1, (-1, SCALINGS[scaling] or q.shape[-1]))
    decoded = (decoded * scale.float().reshape(-1, decoded.shape[-2], 1)).flatten(-2)
    pairs = zip((decoded, *sums), (y, *total, y), strict=False)
    errors = [((got.float() - want.float()).norm() / want.float().norm()) for got, want in pairs]
    worst = max(errors).item() if not any(e.isnan() for e in errors) else float("inf")
    return worst
