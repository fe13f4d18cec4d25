"""``python -m bench accuracy`` measures the largest errors against float64 on difficult inputs.

Every provider gets the same inputs, and the true results are computed from them in float64. The
error of a value is counted in units in the last place (ulps) of the output's dtype, at the largest
true value of the same row; the gradient of a parameter is one row. A norm of a sum is compared with
the norm of the sum as it is rounded to its dtype.

The exit status is 1 if an error of tilenorm is more than twice that of PyTorch and more than a few
ulps. Without a GPU the reference implementation of tilenorm is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench import check, command
from bench.cases import AROUND, OPS, PLAIN
from bench.op import DIRECTIONS, DTYPES, Case, Op
from bench.providers import PROVIDERS
from bench.record import Accuracy
from bench.report import worse
from bench.run import repeatable_call
from bench.text import first_line

HIDDEN, HEAD_HIDDEN, ROWS = (4096,), (128,), 512
SERVED = (*PLAIN, *AROUND, "head_rms_norm")
# A mean as large as leaves the deviation of 1 a few bits in the dtype.
LARGE_MEAN = {torch.bfloat16: 60.0, torch.float16: 500.0, torch.float32: 1e4}
MAX_FLOAT32 = torch.finfo(torch.float32).max
INPUTS = ("normal", "large mean", "tiny variance", "subnormal", "near overflow", "one huge value")
INPUTS = (*INPUTS, "cancelling", "zero rows")


def values_of(kind: str, normal: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values of a kind of inputs for a dtype, made of normal random numbers."""
    made, n = normal.clone(), normal.shape[-1]
    match kind:
        case "large mean":
            made += LARGE_MEAN[dtype]
        case "tiny variance":
            made = 1 + 1e-3 * made
        case "subnormal":
            made *= torch.finfo(dtype).tiny / 8
        case "near overflow":  # of a row's sum of squares in float32, or else values fill the dtype
            largest = min(torch.finfo(dtype).max / 4, (MAX_FLOAT32 / (8 * n)) ** 0.5)
            made *= largest / made.abs().max()
        case "one huge value":
            made[..., n // 2] = 1e4
        case "cancelling":  # each value's negative is beside it: a row's sum is almost 0
            made[..., 1 : n // 2 * 2 : 2] = -made[..., 0 : n // 2 * 2 : 2]
            made = 100 * made + 0.01 * normal.roll(1, -1)
        case "zero rows":
            made[::2] = 0
    return made


def main(argv: list[str]) -> int:
    options = {"op": SERVED, "dtype": list(DTYPES), "hidden": None, "provider": None}
    parser = command.parser("accuracy", __doc__, SERVED, **options)
    parser.add_argument("--rows", type=int, default=ROWS, metavar="M")
    args = parser.parse_args(argv)
    with command.running(args, ["accuracy", *argv], args.op) as run:
        for op in map(OPS.get, args.op):
            for dtype in args.dtype:
                for n in args.hidden or (HEAD_HIDDEN if op.heads else HIDDEN):
                    if run.late():
                        continue
                    command.told(f"{op.name} {dtype} N = {n}")
                    case = op.shrunk(Case(op.name, dtype, args.rows, n), args.rows * n)
                    for line in measure(op, case, run.present[op.name], run.device):
                        run.emit(line)
    return 1 if worse(run.record.accuracies) else 0


def measure(op: Op, case: Case, names: Sequence[str], device: str) -> Iterator[Accuracy]:
    """The errors of each provider on each kind of inputs, at one shape."""
    loaded: dict = {}
    for kind in INPUTS:
        inputs = difficult_inputs(op, kind, case, device)
        grads = op.output_grads(case, device)
        given = inputs
        if "residual" in op.rows:
            x, residual, *columns = inputs
            total = (x + residual).detach().requires_grad_()
            given = [total, torch.zeros_like(total).requires_grad_(), *columns]
        true = check.oracle(op, case, given, grads)
        for name in names:
            line = case.shape | {"inputs": kind, "provider": name}
            ulps = {}
            try:
                loaded[name] = loaded.get(name) or PROVIDERS[name].load(op)
                for way in DIRECTIONS:
                    found = check.as_tuple(repeatable_call(loaded[name], inputs, grads, way)())
                    called = check.names(op, way)
                    for result, got, want in zip(called, found, true[way], strict=True):
                        of_rows = result.removeprefix("d") not in op.columns
                        ulps[result] = error_in_ulps(got, want, of_rows)
                yield Accuracy(**line, ulps=ulps)
            except Exception as error:  # the failure of a peer is a result
                yield Accuracy(**line, error=first_line(error))


def difficult_inputs(op: Op, kind: str, case: Case, device: str) -> list[Tensor]:
    """The op's inputs, with the first one of a kind. A residual has the same kind of values.

    In the inputs that cancel, the residual is almost the negative of the input.
    """
    dtype, made = DTYPES[case.dtype], op.made(replace(case, dtype="float32"), device)
    given = {name: x.detach() for name, x in zip(op.inputs, made, strict=True)}
    noise = 0.01 * given["x"]
    for name in filter(lambda name: name != "gate", op.rows):
        given[name].copy_(values_of(kind, given[name], dtype))
    if kind == "cancelling" and "residual" in given:
        given["residual"].copy_(noise - given["x"])
    return [check.duplicate(x, dtype).requires_grad_() for x in given.values()]


def error_in_ulps(actual: Tensor, true: Tensor, of_rows: bool) -> float:
    """The largest error in ulps at the largest true value of a row, or of all values.

    It is infinite where a value is not finite and the true value, rounded to the dtype, is.
    """
    info = torch.finfo(actual.dtype)
    finite = true.to(actual.dtype).isfinite()
    largest = torch.where(finite, true.abs(), 0.0)
    largest = largest.amax(-1, keepdim=True) if of_rows else largest.max()
    unit = torch.exp2(largest.clamp(info.tiny).log2().floor()) * info.eps
    off = ((actual.detach().double() - true) / unit).abs()
    off = off.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(finite, off, 0.0).max().item()
