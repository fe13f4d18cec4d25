"""The gradients of two variants of a training step, compared over the same weights."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.step import Training

# A larger change of a gradient is an error. In Llama 3's form with 32 layers of 512 on a CPU, with
# weights of Llama's gain, bfloat16's gradients differ from float32's by up to 0.13. One term that
# is left out of one layer's sum of gradients changes one of them by at least 0.5.
MOST_CHANGE = 0.4
# A gradient whose elements are smaller than this share of the mean is compared with the share: the
# gradient of the bias of k is 0, and what is computed for it is rounding alone.
LEAST_SIZE = 0.1
Call = Callable[..., Tensor]


def compared(training: Training, calls: Sequence[Call], seed: int) -> dict:
    """Both losses, and the largest change of a gradient, from the same weights."""
    losses, gradients = [], []
    for call in calls:
        torch.manual_seed(seed)
        loss = call(*training.inputs)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in training.model.named_parameters()})
        training.optimizer.zero_grad(set_to_none=True)
    return {"losses": losses} | _worst(changes_of(*gradients))


def changes_of(base: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """‖other - base‖ / ‖base‖ of each gradient. See LEAST_SIZE for gradients of about 0."""
    norms = {name: gradient.float().norm().item() for name, gradient in base.items()}
    elements = sum(gradient.numel() for gradient in base.values())
    mean = math.sqrt(sum(norm**2 for norm in norms.values()) / elements)
    found = {}
    for name, gradient in base.items():
        least = LEAST_SIZE * mean * math.sqrt(gradient.numel())
        difference = (other[name].float() - gradient.float()).norm().item()
        found[name] = difference / (max(norms[name], least) or 1.0)
    return found


def _worst(changes: dict[str, float]) -> dict:
    """The largest change; a NaN is larger than all."""
    worst = max(changes, key=lambda name: (math.isnan(changes[name]), changes[name]))
    return {"gradient_change": changes[worst], "gradient": worst}
