"""``python -m bench accuracy`` measures the largest errors against float64 on difficult inputs.

Every provider gets the same inputs, and the true results are computed from them in float64. The
error of a value is counted in units in the last place (ulps) of the output's dtype, at the largest
true value of the same row; the gradient of a parameter is one row. A norm of a sum is compared with
the norm of the sum as it is rounded to its dtype.

The exit status is 1 if an error of tilenorm is more than twice that of PyTorch and more than a few
ulps. Without a GPU the reference implementation of tilenorm is measured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench import check, command
from bench.accuracy_table import worse
from bench.cases import AROUND, OPS, PLAIN
from bench.op import DTYPES, Case, Op
from bench.providers import PROVIDERS
from bench.record import Accuracy, first_line
from bench.run import repeatable_call

HIDDEN, HEAD_HIDDEN, ROWS = (4096,), (128,), 512
SERVED = (*PLAIN, *AROUND, "head_rms_norm")
# A mean as large as leaves the deviation of 1 a few bits in the dtype.
LARGE_MEAN = {torch.bfloat16: 60.0, torch.float16: 500.0, torch.float32: 1e4}
MAX_FLOAT32 = torch.finfo(torch.float32).max


def _near_overflow(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a row's squares is just below the largest float32, or values fill the dtype."""
    largest = min(torch.finfo(dtype).max / 4, (MAX_FLOAT32 / (8 * normal.shape[-1])) ** 0.5)
    return normal / normal.abs().max() * largest


def _one_huge(normal: Tensor, dtype: torch.dtype) -> Tensor:
    normal = normal.clone()
    normal[..., normal.shape[-1] // 2] = 1e4
    return normal


def _cancelling(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Each value has its negative beside it, so that a row's sum is almost 0."""
    pairs = normal.clone()
    even = pairs.shape[-1] // 2 * 2
    pairs[..., 1:even:2] = -pairs[..., 0:even:2]
    return 100 * pairs + 0.01 * normal.roll(1, -1)


def _some_zeros(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Every second row is zero."""
    rows = torch.arange(len(normal), device=normal.device) % 2
    return normal * rows.view(-1, *[1] * (normal.dim() - 1))


# Each makes float32 values of normal random numbers, for a dtype.
INPUTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "normal": lambda normal, dtype: normal,
    "large mean": lambda normal, dtype: normal + LARGE_MEAN[dtype],
    "tiny variance": lambda normal, dtype: 1 + 1e-3 * normal,
    "subnormal": lambda normal, dtype: normal * (torch.finfo(dtype).tiny / 8),
    "near overflow": _near_overflow,
    "one huge value": _one_huge,
    "cancelling": _cancelling,
    "zero rows": _some_zeros,
}


def main(argv: list[str]) -> int:
    options = {"op": SERVED, "dtype": list(DTYPES), "hidden": None, "provider": None}
    parser = command.parser("accuracy", __doc__, SERVED, **options)
    parser.add_argument("--rows", type=int, default=ROWS, metavar="M")
    args = parser.parse_args(argv)
    with command.running(args, ["accuracy", *argv], args.op) as run:
        for op in map(OPS.get, args.op):
            for dtype in args.dtype:
                for n in args.hidden or (HEAD_HIDDEN if op.heads else HIDDEN):
                    print(f"{op.name} {dtype} N = {n}", file=sys.stderr, flush=True)
                    case = op.shrunk(Case(op.name, dtype, args.rows, n), args.rows * n)
                    for line in measure(op, case, run.present[op.name], run.device):
                        run.emit(line)
    return 1 if worse(run.record.accuracies) else 0


def measure(op: Op, case: Case, names: Sequence[str], device: str) -> Iterator[Accuracy]:
    """The errors of each provider on each kind of inputs, at one shape."""
    loaded = {}
    for kind in INPUTS:
        inputs = difficult_inputs(op, kind, case, device)
        grads = op.output_grads(case, device)
        true = _true_results(op, case, inputs, grads)
        for name in names:
            line = case.shape | {"inputs": kind, "provider": name}
            try:
                loaded[name] = loaded.get(name) or PROVIDERS[name].load(op)
                call = repeatable_call(loaded[name], inputs, grads, "training")
                found = check.as_tuple(call())
            except Exception as error:  # the failure of a peer is a result
                yield Accuracy(**line, error=first_line(error))
                continue
            ulps = {}
            for result, got, want in zip(check.names(op, "training"), found, true, strict=True):
                of_rows = result.removeprefix("d") not in op.columns
                ulps[result] = error_in_ulps(got, want, of_rows)
            yield Accuracy(**line, ulps=ulps)


def difficult_inputs(op: Op, kind: str, case: Case, device: str) -> list[Tensor]:
    """The op's inputs, with the first one of a kind. A residual has the same kind of values.

    In the inputs that cancel, the residual is almost the negative of the input.
    """
    dtype = DTYPES[case.dtype]
    inputs = [x.detach() for x in op.made(replace(case, dtype="float32"), device)]
    rows, columns = inputs[: len(op.rows)], inputs[len(op.rows) :]
    values = {
        name: x if name == "gate" else INPUTS[kind](x, dtype)
        for name, x in zip(op.rows, rows, strict=True)
    }
    if kind == "cancelling" and "residual" in values:
        values["residual"] = 0.01 * rows[1] - values["x"]
    for x, value in zip(rows, values.values(), strict=True):
        x.copy_(value)
    return [_strided_copy(x, dtype) for x in (*rows, *columns)]


def _strided_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    return made.copy_(x).requires_grad_()


def _true_results(op: Op, case: Case, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    if "residual" in op.rows:
        x, residual, *columns = inputs
        total = (x + residual).detach().requires_grad_()
        inputs = [total, torch.zeros_like(total).requires_grad_(), *columns]
    return check.oracle(op, case, inputs, grads)["training"]


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
