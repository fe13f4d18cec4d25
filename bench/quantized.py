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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import command, provenance, record, report, timing
from bench.cases import Case
from bench.formulas import EPS
from bench.lines import Cell, Copy
from bench.providers import compiled
from bench.record import first_line
from bench.run import copied

OPS = ("rms_norm_quantized", "add_rms_norm_quantized")
SIZES = (1024, 2048, 4096, 8192, 16384, 65536)
FP8, MOST = torch.float8_e4m3fn, 448.0
LEAST_PEAK = 1e-12  # a row of zeros has a finite scale, too
SCALINGS = {"row": 0, "block": 128, "tensor": 0}  # elements that share a scale; 0: all of a row
STATIC_SCALE = 1 / 64  # the largest code is 448 / 64 = 7, and y is smaller
ELEMENTS = 1 << 26
MOST_ERROR = 0.04  # of the norm of y: three bits of mantissa miss it by about 0.026


class Asked(NamedTuple):
    """A quantised norm: its scaling, whether a residual is added, and whether y is returned."""

    scaling: str
    added: bool
    output: bool

    @property
    def name(self) -> str:
        return f"{OPS[self.added]} {self.scaling}{' + y' if self.output else ''}"

    def bytes(self, rows: int, hidden: int) -> int:
        """x, the weight and the codes; the residual and the sum; y if returned; the scales.

        The caller's scale is not written.
        """
        groups = 0 if self.scaling == "tensor" else hidden // (SCALINGS[self.scaling] or hidden)
        matrices = 2 + 1 + 4 * self.added + 2 * self.output
        return rows * hidden * matrices + 2 * hidden + 4 * rows * groups


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
            for line in _measured(max(1, elements // hidden), hidden, args, device):
                emit(line)
    print(report.render(found, args.markdown))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command.parser("quantized", __doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--hidden", nargs="+", type=int, default=SIZES, metavar="N")
    parser.add_argument("--scaling", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--provider", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--output", action="store_true", help="y is returned too")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="default: 64 Mi")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each time")
    args = parser.parse_args(argv)
    if any(n < 1 or n % 128 for n in args.hidden):
        parser.error("--hidden: takes multiples of 128")
    return args


def _measured(
    rows: int, hidden: int, args: argparse.Namespace, device: str
) -> Iterator[Cell | Copy]:
    """The time of a copy, and a cell for each op, scaling and provider."""
    yield copied(Case("", "bfloat16", rows, hidden), torch.bfloat16, device, args.budget)
    for op in filter(args.op.__contains__, OPS):
        for scaling in args.scaling:
            asked = Asked(scaling, op == OPS[1], args.output)
            for name in args.provider:
                yield cell(name, asked, rows, hidden, device, args.budget)


def inputs(rows: int, hidden: int, device: str, added: bool) -> list[Tensor]:
    """x, the residual if one is added, the weight, and the caller's scale."""
    make = torch.Generator(device).manual_seed(rows + hidden)
    like: dict[str, Any] = {"generator": make, "device": device}
    matrices = [torch.randn(rows, hidden, **like).bfloat16() for _ in range(1 + added)]
    weight = (0.25 + 0.5 * torch.rand(hidden, **like)).bfloat16()
    return [*matrices, weight, torch.full((1,), STATIC_SCALE, device=device)]


def cell(name: str, asked: Asked, rows: int, hidden: int, device: str, budget: float) -> Cell:
    nbytes = asked.bytes(rows, hidden)
    line = {"op": asked.name, "dtype": "bfloat16", "m": rows, "n": hidden, "provider": name}
    line |= {"direction": "forward", "bytes": nbytes}  # without grad: the codes have no backward
    try:
        run = PROVIDERS[name](asked)
        if run is None:
            return Cell(**line, status="skipped", error=f"has no {asked.name}")
        with torch.no_grad():
            given = inputs(rows, hidden, device, asked.added)
            # A provider may overwrite its inputs.
            error = wrong_by(run(*map(torch.clone, given)), given, asked.scaling)
            if error > MOST_ERROR:
                why = f"the result is wrong by {error:.3g} of its norm"
                return Cell(**line, status="wrong", error=why)
            sets = timing.rotating_sets(nbytes, device)
            calls = [partial(run, *map(torch.clone, given)) for _ in range(sets)]
            found = timing.measure(calls, nbytes, device, budget)
    except Exception as error:  # the failure of a peer is a result
        with suppress(RuntimeError):  # a launch raises what a failed launch may have left
            torch.ones(1, device=device)
        return Cell(**line, status="failed", error=first_line(error))
    numbers = {"median_us": found.median_us, "spread": found.spread, "samples": found.samples}
    return Cell(**line, **numbers, timing=found.kind)


def wrong_by(found: tuple, given: list[Tensor], scaling: str) -> float:
    """The error of the decoded rows, as a share of their norm; of the sum as well, if there is one.

    A NaN is an infinite error.
    """
    *rows, w, static = given
    y, *total = _pytorch_norm(len(rows) > 1)(*rows, w)
    q, *written = found
    scale, *sums = [static, *written] if scaling == "tensor" else written
    decoded = q.float().unflatten(-1, (-1, SCALINGS[scaling] or q.shape[-1]))
    decoded = (decoded * scale.float().reshape(-1, decoded.shape[-2], 1)).flatten(-2)
    pairs = zip((decoded, *sums), (y, *total, y), strict=False)
    errors = [((got.float() - want.float()).norm() / want.float().norm()) for got, want in pairs]
    return max(errors).item() if not any(e.isnan() for e in errors) else float("inf")


def quantize(y: Tensor, static: Tensor, scaling: str) -> tuple[Tensor, ...]:
    """The codes and the decoding scales of rows, as training code in PyTorch computes them.

    With the caller's scale, ``static``, there are only codes.
    """
    if scaling == "tensor":
        return (_saturated(y.float() * static.reciprocal()),)
    groups = y.float().unflatten(-1, (-1, SCALINGS[scaling] or y.shape[-1]))
    factor = MOST / groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_PEAK)
    return _saturated(groups * factor).flatten(-2), factor.reciprocal().squeeze(-1)


def _saturated(scaled: Tensor) -> Tensor:
    """PyTorch's own cast does not saturate before 2.12."""
    return scaled.clamp(-MOST, MOST).to(FP8)


def _pytorch_norm(added: bool) -> Callable:
    """A function of x, the residual if one is added, and the weight: y, and the sum if any."""

    def norm(x, *rest):
        *residual, w = rest
        total = x + residual[0] if added else x
        return F.rms_norm(total, x.shape[-1:], w, EPS), *[total] * added

    return norm


def _composed(norm: Callable, casting: Callable, output: bool) -> Callable:
    def run(*tensors):
        *given, static = tensors
        y, *total = norm(*given)
        return *casting(y, static), *total, *[y] * output

    return run


# A provider is a function of what is asked. It returns a function of x, the residual if one is
# added, the weight, and the caller's scale, or None if the provider has no such norm. That function
# returns the codes, the decoding scales if it writes them, the sum if there is one, and y if it was
# asked for. A peer library is imported when it is first needed.


def _tilenorm(asked: Asked) -> Callable:
    import tilenorm as tn

    function: Callable = tn.add_rms_norm_quantized if asked.added else tn.rms_norm_quantized
    static = asked.scaling == "tensor"

    def run(*tensors):
        *rows, w, scale = tensors
        how = {"scaling": asked.scaling, "return_output": asked.output}
        found = function(*rows, w.shape, w, EPS, **how, scale=scale if static else None)
        last = (*[found.residual_out] * asked.added, *[found.output] * asked.output)
        return found.q, *[found.scale] * (not static), *last

    return run


def _torch(asked: Asked) -> Callable:
    casting = partial(quantize, scaling=asked.scaling)
    return _composed(_pytorch_norm(asked.added), casting, asked.output)


def _tilenorm_and_cast(asked: Asked) -> Callable:
    import tilenorm as tn

    def norm(*tensors):
        *rows, w = tensors
        function: Callable = tn.add_rms_norm if asked.added else tn.rms_norm
        found = function(*rows, w.shape, w, EPS)
        return found if asked.added else (found,)

    return _composed(norm, compiled(partial(quantize, scaling=asked.scaling)), asked.output)


def _flashinfer(asked: Asked) -> Callable | None:
    from flashinfer import norm

    def by_tensor(*tensors):
        x, *residual, w, scale = tensors
        q = torch.empty_like(x, dtype=FP8)
        function = norm.fused_add_rmsnorm_quant if asked.added else norm.rmsnorm_quant
        function(q, x, *residual, w, scale, EPS)
        return q, *residual

    def by_block(x, residual, w, scale):
        rows, groups = len(x), x.shape[-1] // SCALINGS["block"]
        q, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        scales = x.new_empty(groups, -(-rows // 4) * 4, dtype=torch.float32)
        norm.fused_add_rmsnorm_fp8_block_quant(q, scales, y, x, residual, w, EPS)
        return q, scales.T[:rows], residual, y

    if asked == ("block", True, True):  # y and the sum are always written
        return by_block
    return by_tensor if (asked.scaling, asked.output) == ("tensor", False) else None


PROVIDERS: dict[str, Callable[[Asked], Callable | None]] = {
    "tilenorm": _tilenorm,
    "torch": _torch,
    "compile": lambda asked: compiled(_torch(asked)),
    "tilenorm+cast": _tilenorm_and_cast,
    "flashinfer": _flashinfer,
}
