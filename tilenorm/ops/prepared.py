"""Calls that were checked before, and what serves them: found again by one guard of PyTorch's."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# It compares of each tensor the type, the dispatch keys, dtype, device, requires_grad and what is
# given of sizes and strides, in 0.15 µs. Keys come and go with a thread's state: those of autocast,
# inference mode and torch.func. It holds no tensor, and takes none twice.
_Guard = torch._C._dynamo.guards.TensorGuards

MOST_CALLS = 1024
MOST_GUARDS = 8  # for a call: dtypes, ranks, devices, which require gradients


class Prepared(NamedTuple):
    """What serves calls with tensors that `check` takes.

    Leading sizes may be any, and so may strides; but if `simple`, matrices have rows side by side,
    and parameters are vectors. differentiable: one of the tensors requires a gradient.
    """

    check: Callable[..., bool]
    plans: Any
    index: int
    hidden: int
    eps: float
    differentiable: bool
    simple: bool


@lru_cache(MOST_CALLS, typed=True)
def prepared(op: str, *arguments) -> list[Prepared]:
    """What was prepared for calls with these arguments beside the tensors, the last first.

    Raises TypeError if one is a tensor, which would be kept, or has no hash.
    """
    if any(isinstance(a, Tensor) for a in arguments):
        raise TypeError(f"{op}: a tensor where none is taken")
    return []


def prepare(
    known: list[Prepared],
    tensors: Sequence[Tensor],
    fixed: int,
    hidden: int,
    eps: float,
    plans: Any,
) -> None:
    """Let plans serve calls like one that they have served.

    tensors: that were given. fixed: how many trailing sizes of theirs stay.
    """
    strides = [t.stride() for t in tensors]
    simple = fixed == 1 and all(len(s) > 2 or s in ((hidden, 1), (1,)) for s in strides)
    check = _Guard(
        *tensors,
        dynamic_dims_sizes=[[*[None] * (t.dim() - fixed), *t.shape[-fixed:]] for t in tensors],
        dynamic_dims_strides=[[*s] if simple and len(s) < 3 else [None] * len(s) for s in strides],
    ).check
    if not check(*tensors):
        return
    index, differentiable = tensors[0].get_device(), any(t.requires_grad for t in tensors)
    known.insert(0, Prepared(check, plans, index, hidden, eps, differentiable, simple))
    del known[MOST_GUARDS:]
