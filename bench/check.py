"""The check of a provider's outputs, which comes before any timing.

The error of a value is |actual - expected| / (|expected| + rms), in units in the last place (ulps)
of the output's dtype. rms is the root mean square of all expected values. The gradient of a weight
sums M terms, where M is the number of rows that share the weight. Its budget grows with √M, because
the error of the sum does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.op import DTYPES, INFERENCE, Case, Op

FLOOR_ULPS = 4.0
OVER_EAGER = 4.0
_CHUNK = 1 << 22  # elements in float64 at a time


def as_tuple(value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def duplicate(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy with the same strides. clone() would remove the gaps between the rows."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=x.device)
    return made.copy_(x.detach()).requires_grad_(x.requires_grad)


def oracle(op: Op, case: Case, inputs: Sequence[Tensor], grads: Sequence[Tensor]):
    """The outputs or gradients of each direction, in float64 and from the same rounded inputs."""
    like: dict[str, Any] = {"dtype": torch.float64, "device": inputs[0].device}
    shapes = op.shapes(case)
    outputs = [torch.empty(shapes[name], **like) for name in op.outputs]
    gradients = [torch.zeros(shapes[name], **like) for name in op.trained]
    length = inputs[0].shape[op.axis]
    for start, count in _chunks(length, inputs[0].numel() // length):
        leaves = [
            op.cut(name, x, start, count).detach().double().requires_grad_(x.requires_grad)
            for name, x in zip(op.inputs, inputs, strict=True)
        ]
        results = as_tuple(op.reference(*leaves))
        for whole, result in zip(outputs, results, strict=True):
            whole.narrow(op.axis, start, count).copy_(result.detach())
        if op.trained:
            given = [dy.narrow(op.axis, start, count).double() for dy in grads]
            found = torch.autograd.grad(results, [x for x in leaves if x.requires_grad], given)
            for name, whole, grad in zip(op.trained, gradients, found, strict=True):
                op.cut(name, whole, start, count).add_(grad)
    return {"forward": outputs, "backward": gradients, INFERENCE: outputs}


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error in ulps. It is infinite if a value is not finite or the shape is wrong."""
    if actual.shape != expected.shape:
        return float("inf")
    rms = torch.linalg.vector_norm(expected) / max(1, expected.numel()) ** 0.5
    worst = torch.zeros((), dtype=torch.float64, device=expected.device)
    actual, expected = actual.detach().reshape(-1), expected.reshape(-1)
    for start, count in _chunks(expected.numel(), 1):
        part = slice(start, start + count)
        off = (actual[part].double() - expected[part]).abs() / (expected[part].abs() + rms)
        worst = torch.maximum(worst, off.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    return worst.item() / torch.finfo(actual.dtype).eps


def budgets(op: Op, case: Case, direction: str, eager_errors: Sequence[float]) -> list[float]:
    """The ulps that each result may be off: a multiple of eager PyTorch's own error, or a floor.

    The gradients of parameters are float32 sums over M rows, and each provider adds in an order of
    its own. They may be off by √M ulps of float32. ``op.coded`` is the budget of codes.
    """
    eps = torch.finfo(DTYPES[case.dtype]).eps
    shared = case.m // ((case.groups if op.by_group else 1) * (op.heads or 1))
    over_rows = shared**0.5 * torch.finfo(torch.float32).eps / eps
    sums = {f"d{name}" for name in op.trained if name not in op.rows}
    found = [
        max(OVER_EAGER * ulps, FLOOR_ULPS, over_rows if name in sums else 0.0)
        for name, ulps in zip(names(op, direction), eager_errors, strict=True)
    ]
    return found if op.coded is None else [op.coded, *found[1:]]


def names(op: Op, direction: str) -> list[str]:
    """The names of a direction's results in messages."""
    return [f"d{name}" for name in op.trained] if direction == "backward" else [*op.outputs]


def complaint(op: Op, direction: str, actual, expected, allowed) -> str | None:
    """A message that names each wrong result, or None if all are right."""
    wrong, found = [], (actual, expected, allowed, names(op, direction))
    for got, want, budget, name in zip(*found, strict=True):
        ulps = error(got, want)
        if not ulps <= budget:
            wrong.append(f"{name} is off by {ulps:.3g} ulps, {budget:.3g} are allowed")
    return "; ".join(wrong) or None


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill memory with NaN that the allocator will reuse for outputs of these sizes.

    Otherwise a kernel that writes nothing could get memory that still holds the right answer.
    """
    held = [torch.full_like(t, float("nan")) for t in tensors for _ in range(2)]
    del held


def _chunks(m: int, n: int) -> Iterator[tuple[int, int]]:
    """The start and the length of each chunk of M rows."""
    step = max(1, _CHUNK // n)
    return ((start, min(step, m - start)) for start in range(0, m, step))
