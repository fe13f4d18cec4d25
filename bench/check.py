"""The check of a provider's outputs, which comes before any timing.

The error of a value is |actual - expected| / (|expected| + rms), in units in the last place (ulps)
of the output's dtype. rms is the root mean square of all expected values. The gradient of a weight
sums M terms, where M is the number of rows that share the weight. Its budget grows with √M, because
the error of the sum does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.cases import Op

FLOOR_ULPS = 4.0
OVER_EAGER = 4.0
_CHUNK = 1 << 22  # elements in float64 at a time


def as_tuple(value) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def oracle(op: Op, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]):
    """The expected results of each direction, in float64 and from the same rounded inputs.

    The results are outputs, gradients, or both, in the order of the op's fields.
    """
    n_rows = len(op.rows)
    shape = inputs[0].shape
    like: dict[str, Any] = {"dtype": torch.float64, "device": inputs[0].device}
    outputs = [torch.empty(shape, **like) for _ in op.outputs]
    row_grads = [torch.empty(shape, **like) for _ in op.rows]
    column_grads = [torch.zeros(x.shape, **like) for x in inputs[n_rows:]]
    for part in _chunks(len(inputs[0]), inputs[0][0].numel()):
        rows = [x[part] for x in inputs[:n_rows]]
        leaves = [x.detach().double().requires_grad_() for x in (*rows, *inputs[n_rows:])]
        results = as_tuple(op.reference(*leaves))
        found = torch.autograd.grad(results, leaves, [dy[part].double() for dy in grads])
        for whole, result in zip(outputs, results, strict=True):
            whole[part] = result.detach()
        for whole, grad in zip(row_grads, found[:n_rows], strict=True):
            whole[part] = grad
        for whole, grad in zip(column_grads, found[n_rows:], strict=True):
            whole += grad
    gradients = row_grads + column_grads
    return {
        "forward": outputs,
        "backward": gradients,
        "inference": outputs,
        "training": outputs + gradients,
    }


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error in ulps. It is infinite if a value is not finite or the shape is wrong."""
    if actual.shape != expected.shape:
        return float("inf")
    rms = torch.linalg.vector_norm(expected) / max(1, expected.numel()) ** 0.5
    worst = torch.zeros((), dtype=torch.float64, device=expected.device)
    actual, expected = actual.detach().reshape(-1), expected.reshape(-1)
    for part in _chunks(expected.numel(), 1):
        off = (actual[part].double() - expected[part]).abs() / (expected[part].abs() + rms)
        worst = torch.maximum(worst, off.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    return worst.item() / torch.finfo(actual.dtype).eps


def budgets(eager_errors: Sequence[float], dtype: torch.dtype, m: int, columns: int) -> list[float]:
    """The ulps that each output may be off: a multiple of eager PyTorch's own error, or a floor.

    The last ``columns`` outputs are float32 sums over M rows, and each provider adds in an order of
    its own. These outputs may be off by √M ulps of float32.
    """
    over_rows = m**0.5 * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    first_sum = len(eager_errors) - columns
    return [
        max(OVER_EAGER * ulps, FLOOR_ULPS, over_rows if i >= first_sum else 0.0)
        for i, ulps in enumerate(eager_errors)
    ]


def names(op: Op, direction: str) -> list[str]:
    """The names of a direction's results in messages."""
    if direction in ("forward", "inference"):
        return list(op.outputs)
    gradients = [f"d{name}" for name in (*op.rows, *op.columns)]
    return [*op.outputs, *gradients] if direction == "training" else gradients


def complaint(actual, expected, allowed, called) -> str | None:
    """A message that names each wrong result, or None if all are right."""
    wrong = []
    for got, want, budget, name in zip(actual, expected, allowed, called, strict=True):
        ulps = error(got, want)
        if not ulps <= budget:
            wrong.append(f"{name} is off by {ulps:.3g} ulps, {budget:.3g} are allowed")
    return "; ".join(wrong) or None


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Fill memory with NaN that the allocator will reuse for outputs of these sizes.

    Otherwise a kernel that writes nothing could get memory that still holds the right answer.
    """
    held = [torch.full_like(t, float("nan")) for t in tensors for _ in range(2)]
    del held


def _chunks(m: int, n: int) -> Iterator[slice]:
    step = max(1, _CHUNK // n)
    return (slice(start, start + step) for start in range(0, m, step))
