"""The gradients of two variants of a training step, compared over the same weights.

Products in 8-bit floats change a layer's output by a few percent. Layer after layer that becomes
another gradient: in Llama 3's form with 32 layers of 512 on a CPU, with weights of Llama's gain,
bfloat16's and 8-bit gradients differ by 0.94 of their norm, and those of two implementations of the
same 8-bit step by 0.58. So a variant with such products is compared layer by layer, each alone.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.models import Transformer
from bench.step import Training

# A larger change of a gradient is an error. In Llama 3's form with 32 layers of 512 on a CPU, with
# weights of Llama's gain, bfloat16's gradients differ from float32's by up to 0.13. One term that
# is left out of one layer's sum of gradients changes one of them by at least 0.5.
MOST_CHANGE = 0.4
# The same of a layer alone. In that form, with 2 to 32 layers of 256 or 512, bfloat16's and 8-bit
# gradients differ by up to 0.14 there, and those of two 8-bit steps by up to 0.06. A layer that is
# left without the gradient through one of its norms changes by at least 0.4.
MOST_CHANGE_ALONE = 0.3
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


def compared_by_layer(training: Training, models: Sequence[Transformer]) -> dict:
    """As compared, but each layer of the second model gets what that of the first gets: its input,
    and the gradient of its output.

    The head counts as a layer. The embedding is left out: it has no product. The losses are those
    of the whole models.
    """
    (tokens,) = training.inputs
    base, other = (_layers(model, tokens[:, 1:]) for model in models)
    kept, y = {}, models[0].embedding(tokens[:, :-1])
    for name, layer in base.items():
        x = _leaf(y)
        y = layer(x)
        kept[name] = x, y
    losses, changes, g = [y.item()], {}, None
    for name in reversed(base):
        x, y = kept.pop(name)
        parameters = dict(training.model.get_submodule(name).named_parameters(name))
        dx, mine = _gradients(x, y, g, parameters)
        again = _leaf(x)
        dx_again, theirs = _gradients(again, other[name](again), g, parameters)
        changes |= changes_of(mine, theirs)
        changes[f"{name}'s input"] = input_change(dx, dx_again, g)
        g = dx
    losses.append(models[1](tokens).item())
    return {"losses": losses, "layers_alone": True} | _worst(changes)


def input_change(base: Tensor, other: Tensor, passed: Tensor | None) -> float:
    """The change of a layer's input's gradient, as a share of what the layer adds to it.

    passed: what the residual passes on, or None. See LEAST_SIZE for layers that add about 0 to it.
    """
    whole = base.float()
    added = whole if passed is None else whole - passed.float()
    least = LEAST_SIZE * whole.norm().item()
    return (other.float() - whole).norm().item() / (max(added.norm().item(), least) or 1.0)


def _layers(model: Transformer, targets: Tensor) -> dict[str, Call]:
    """What the model computes behind the embedding, one after another."""
    places = {"cos": model.cos, "sin": model.sin}
    found = {f"blocks.{i}": partial(block, **places) for i, block in enumerate(model.blocks)}
    return found | {"head": partial(model.head, targets=targets)}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _gradients(
    x: Tensor, y: Tensor, g: Tensor | None, parameters: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of x, and those of the parameters."""
    dx, *others = torch.autograd.grad(y, [x, *parameters.values()], g)
    return dx, dict(zip(parameters, others, strict=True))


def _worst(changes: dict[str, float]) -> dict:
    """The largest change; a NaN is larger than all."""
    worst = max(changes, key=lambda name: (math.isnan(changes[name]), changes[name]))
    return {"gradient_change": changes[worst], "gradient": worst}
