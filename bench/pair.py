"""Paired training steps: two variants in one process, over the same weights, in turn.

Both variants are modules with the same parameters and one optimizer, so memory holds the weights
once. First both compute the loss and the gradients of the same weights, which are compared. Then
the steps alternate: A B, B A, A B and so on, so that neither is always first, and a drift of the
machine's speed is in both alike. Everything here runs in a worker process.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench import kernels
from bench.record import first_line
from bench.step import Settings, Training
from bench.timing import Timer
from bench.variants import VARIANTS, prepared, twin

WARM_UP = 2  # pairs of steps
# A larger change of a gradient is an error. In Llama 3's form with 32 layers of 512 on a CPU, with
# weights of Llama's gain, bfloat16's gradients differ from float32's by up to 0.13. One term that
# is left out of one layer's sum of gradients changes one of them by at least 0.5.
MOST_CHANGE = 0.4
# A gradient whose elements are smaller than this share of the mean is compared with the share: the
# gradient of the bias of k is 0, and what is computed for it is rounding alone.
LEAST_SIZE = 0.1


def measure(names: Sequence[str], settings: dict, pairs: int, deadline: float) -> dict:
    """The fields of a record's Pair. No pair starts after the deadline, a value of time.time()."""
    given = Settings.of(settings)
    training = Training.of(given)
    both = [prepared(twin(training.model), VARIANTS[name], given.whole) for name in names]
    calls = [variant.call for variant in both]
    found = compared(training, calls)
    found["reports"] = [variant.said() for variant in both]
    if not found["gradient_change"] <= MOST_CHANGE:
        return found | {"status": "wrong", "error": _complaint(found)}
    steps = [lambda call=variant.call: training.step(call) for variant in both]
    timer = Timer(given.device)
    alternated(steps, WARM_UP, timer, deadline)
    found["pairs_us"], found["peak_bytes"] = alternated(steps, pairs, timer, deadline)
    if not found["pairs_us"]:
        return found | {"status": "skipped", "error": "no time was left after compiling"}
    if given.device != "cpu":
        found |= kernels_of(steps)
    return found


def compared(training: Training, calls: Sequence[Callable[..., Tensor]]) -> dict:
    """Both losses, and the largest change of a gradient, from the same weights."""
    losses, gradients = [], []
    for call in calls:
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


def kernels_of(steps: Sequence[Callable]) -> dict:
    """The kernels of each step. A failure does not lose the times, which were measured before."""
    try:
        return {"kernels": [kernels.of_step(step) for step in steps]}
    except Exception as error:  # PyTorch's profiler raises many types
        return {"error": f"no kernels: {first_line(error)}"}


def _complaint(found: dict) -> str:
    base, other = found["losses"]
    return (
        f"the gradient of {found['gradient']} changes by {found['gradient_change']:.3g} of its norm"
        f", more than {MOST_CHANGE}; the losses are {base:.4f} and {other:.4f}"
    )


def alternated(
    steps: Sequence[Callable], pairs: int, timer: Timer, deadline: float
) -> tuple[list[list[float]], list[int | None]]:
    """The microseconds of both steps of each pair, and the most bytes that each step needs.

    No pair starts after the deadline. The host queues one pair while the GPU computes another.
    """
    marks: list = []
    peaks: list = [None, None]
    for i in range(pairs):
        if time.time() >= deadline:
            break
        order = (0, 1) if i % 2 == 0 else (1, 0)
        ends = [timer.mark()]
        for which in order:
            peak = peak_of(steps[which], timer.on_cpu)
            peaks[which] = peak if peaks[which] is None else max(peaks[which], peak)
            ends.append(timer.mark())
        marks.append((order, ends))
        if i:
            timer.wait(marks[-2][1][-1])
    if marks:
        timer.wait(marks[-1][1][-1])
    times = []
    for order, (start, middle, end) in marks:
        first, second = timer.between(start, middle), timer.between(middle, end)
        times.append([first, second] if order == (0, 1) else [second, first])
    return times, peaks


def peak_of(step: Callable, on_cpu: bool) -> int | None:
    """The most bytes of the GPU's memory that tensors have during a step.

    The host allocates and frees memory in the order of its own calls, so this needs no waiting.
    """
    if on_cpu:
        step()
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()
