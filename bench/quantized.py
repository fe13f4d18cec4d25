"""``python -m bench quantized`` measures norms whose output is 8-bit floats with scales.

Each provider computes the norm of bfloat16 rows and quantises it, by row or by blocks of 128; only
the forward pass has codes. The bytes are those of the mathematics: each input is read once, and the
codes, the scales and the sum with the residual are written once. ``torch`` and ``compile`` are
PyTorch's norm followed by the operations of a cast by row or by block, and ``tilenorm+cast`` is
tilenorm's norm followed by that cast under torch.compile. What a provider returns is checked before
it is timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import provenance, record, report, timing
from bench.formulas import EPS
from bench.lines import Cell, Copy
from bench.providers import compiled
from bench.record import first_line
from bench.rows import FP8, cast

SCALINGS = {"row": 0, "block": 128}
SIZES = (1024, 2048, 4096, 8192, 16384, 65536)
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
    with record.writing(args.out, made) as (found, emit):
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


def norm_of(norm: Callable, add_norm: Callable, added: bool) -> Callable:
    """A function of x, the residual if one is added, and the weight: y and the sum if there is one.

    norm, add_norm: of these tensors, as tilenorm's.
    """

    def plain(x, w):
        return (norm(x, x.shape[-1:], w, EPS),)

    def with_residual(x, r, w):
        return add_norm(x, r, x.shape[-1:], w, EPS)

    return with_residual if added else plain


def pytorch_norm(added: bool) -> Callable:
    def add_norm(x, r, shape, w, eps):
        total = x + r
        return F.rms_norm(total, shape, w, eps), total

    return norm_of(F.rms_norm, add_norm, added)


def composed(norm: Callable, casting: Callable, output: bool) -> Callable:
    def run(*tensors):
        y, *total = norm(*tensors)
        return *casting(y), *total, *[y] * output

    return run


def _tilenorm(scaling: str, added: bool, output: bool) -> Callable:
    import tilenorm as tn

    def run(*tensors):
        *rows, w = tensors
        function = tn.add_rms_norm_quantized if added else tn.rms_norm_quantized
        shape = w.shape
        found = function(*rows, shape, w, EPS, scaling=scaling, return_output=output)
        last = (*[found.residual_out] * added, *[found.output] * output)
        return found.q, found.scale, *last

    return run


def _torch(scaling: str, added: bool, output: bool) -> Callable:
    return composed(pytorch_norm(added), partial(cast, group=SCALINGS[scaling]), output)


def _compile(scaling: str, added: bool, output: bool) -> Callable:
    return compiled(_torch(scaling, added, output))


def _tilenorm_and_cast(scaling: str, added: bool, output: bool) -> Callable:
    import tilenorm as tn

    norm = norm_of(tn.rms_norm, tn.add_rms_norm, added)
    return composed(norm, compiled(partial(cast, group=SCALINGS[scaling])), output)


def _vllm(scaling: str, added: bool, output: bool) -> Callable | None:
    from vllm import _custom_ops

    if scaling != "row" or added or output:  # its residual is overwritten
        return None
    return lambda x, w: _custom_ops.rms_norm_dynamic_per_token_quant(x, w, EPS, FP8)


PROVIDERS = {
    "tilenorm": _tilenorm,
    "torch": _torch,
    "compile": _compile,
    "tilenorm+cast": _tilenorm_and_cast,
    "vllm": _vllm,
}


def bytes_of(scaling: str, added: bool, output: bool, rows: int, hidden: int) -> int:
    """x, the weight and the codes; the residual and the sum; y where it is returned; the scales."""
    groups = hidden // (SCALINGS[scaling] or hidden)
    matrices = 2 + 1 + 4 * added + 2 * output
    return rows * hidden * matrices + 2 * hidden + 4 * rows * groups


def measured(
    rows: int, hidden: int, args: argparse.Namespace, device: str
) -> Iterator[Cell | Copy]:
    """The time of a copy, and a cell for each norm, scaling and provider."""
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
    for added in (False, True):
        for scaling in args.scaling:
            for name in args.provider:
                asked = (scaling, added, args.output)
                yield cell(name, asked, (rows, hidden, device, args.budget))


def inputs(rows: int, hidden: int, device: str, added: bool) -> list[Tensor]:
    make = torch.Generator(device).manual_seed(rows + hidden)
    like = {"generator": make, "device": device}
    matrices = [torch.randn(rows, hidden, **like).bfloat16() for _ in range(1 + added)]
    return [*matrices, (0.25 + 0.5 * torch.rand(hidden, **like)).bfloat16()]


def cell(name: str, asked: tuple[str, bool, bool], how: tuple) -> Cell:
    scaling, added, output = asked
    rows, hidden, device, budget = how
    op = f"{'add_' if added else ''}rms_norm_quantized {scaling}{' + y' if output else ''}"
    nbytes = bytes_of(*asked, rows, hidden)
    line = {"op": op, "dtype": "bfloat16", "m": rows, "n": hidden, "direction": DIRECTION}
    line |= {"provider": name, "bytes": nbytes}
    try:
        run = PROVIDERS[name](*asked)
        if run is None:
            return Cell(**line, status="skipped", error=f"has no {op}")
        with torch.no_grad():
            given = inputs(rows, hidden, device, added)
            if (error := wrong_by(run(*given), given, scaling)) > MOST_ERROR:
                why = f"the result is wrong by {error:.3g} of its norm"
                return Cell(**line, status="wrong", error=why)
            sets = timing.rotating_sets(nbytes, device)
            calls = [partial(run, *map(torch.clone, given)) for _ in range(sets)]
            found = timing.measure(calls, nbytes, device, budget)
    except Exception as error:  # the failure of a peer is a result
        return Cell(**line, status="failed", error=first_line(error))
    numbers = {"median_us": found.median_us, "spread": found.spread, "samples": found.samples}
    return Cell(**line, **numbers, timing=found.kind)


def wrong_by(found: tuple, given: list[Tensor], scaling: str) -> float:
    """The error of the decoded rows, as a share of their norm; of the sum as well, if there is one.

    A NaN is an infinite error.
    """
    *rows, w = given
    y, *total = pytorch_norm(len(rows) > 1)(*rows, w)
    q, scale, *sums = found
    decoded = q.float().unflatten(-1, (-1, SCALINGS[scaling] or q.shape[-1]))
    decoded = (decoded * scale.float().reshape(*q.shape[:-1], -1)[..., None]).flatten(-2)
    pairs = zip((decoded, *sums), (y, *total, y), strict=False)
    errors = [((got.float() - want.float()).norm() / want.float().norm()) for got, want in pairs]
    worst = max(errors).item() if not any(e.isnan() for e in errors) else float("inf")
    return worst
