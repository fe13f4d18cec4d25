"""What the extension is told: calls that Python has made, with what repeats their launches."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, is_grad_enabled

from ..passes.base import Copied, Gradients, Pass
from ..passes.bound import Bound
from ..passes.native import state
from ..passes.reading import strided
from . import autograd

MOST_KINDS = 4096  # of calls that differ in op, options, dtypes or shapes


def tell(bound: Bound, eps: Any, requires_grad: bool, call: tuple) -> None:
    """Have later calls like this one served by the extension, once a pass repeats its launches.

    bound, eps: what has served the call. requires_grad: whether a tensor requires a gradient. call:
    the arguments of call.call.
    """
    extension, tensors = state().extension, call[1]
    recording = requires_grad and is_grad_enabled()
    run = bound.training if recording else bound.inference
    repeat, copied = ready(run, tensors, eps)
    if repeat is None or extension.kinds() >= MOST_KINDS:
        return
    op = bound.op
    differentiable = [port.grad for port in op.makes[: op.shown]]
    saved = bound.autograd_saves(tuple(range(len(op.takes) + len(op.makes)))) if recording else ()
    token = bound, eps
    apart = strided(tensors, run.grouped)
    how = requires_grad, recording, differentiable, repeat, apart, list(copied), list(saved)
    extension.remember(call, *how, token, backward)


def backward(
    number: int, token: tuple, asked: tuple, grads: tuple, saved: tuple
) -> tuple[Tensor | None, ...]:
    """The backward pass of a call that the extension has served, where it cannot repeat one; and it
    is told what repeats this one.
    """
    (bound, eps), every = token, []
    arrived = [g is not None for g in grads]
    if bound.gradients is not None and not is_grad_enabled():
        run = bound.gradients((False, *asked), *arrived)
        if run.plain.takes((*grads, *saved)):  # a hook of saved tensors may return any tensor
            if not isinstance(run, Gradients):
                return run(grads, saved, eps)[1:]
            results = run(grads, saved, eps, every)
            _tell_backward(number, run, (asked, arrived), (*grads, *saved), every, eps)
            return results[1:]
    return autograd.gradients(bound, asked, grads, saved, eps)


def _tell_backward(
    number: int, run: Gradients, flags: tuple, inputs: tuple, every: list, eps: Any
) -> None:
    """flags: which gradients are asked for, and which arrive. inputs: what a pass may read. every:
    what stands at each of Gradients' places.
    """
    extension, steps = state().extension, []
    copied, in_place = set(), set()
    if extension is None:
        return
    for step_pass, reads, which_eps in run.passes:
        tensors = tuple([every[place] for place in reads])
        repeat, copies = ready(step_pass, tensors, eps if which_eps is None else eps[which_eps])
        if repeat is None:
            return
        steps.append((repeat, list(reads)))
        for place in strided(tensors, step_pass.grouped):
            (copied if place in copies else in_place).add(reads[place] - 1)
    if copied & in_place:  # one pass reads a tensor where it lies, and another one a copy
        return
    bits = [sum(flag << i for i, flag in enumerate(group)) for group in flags]
    gives = [(place, None) for place in run.gives]
    groups = copied | in_place, copied
    places = [[p for p in sorted(group) if p < len(inputs)] for group in groups]
    extension.add_backward(number, *bits, inputs, *places, steps, gives)


def ready(run: Pass, tensors: tuple, eps: Any) -> tuple[Any, frozenset[int]]:
    """What repeats a call, if the extension has made it, else None; and the places of the tensors
    that have to be copied before.
    """
    repeat = run.ready.get(run.key(tensors, eps)) if run.ready else None
    copied: frozenset[int] = frozenset()
    if isinstance(repeat, Copied):
        repeat, copied = repeat.repeat(tensors), repeat.places
    return repeat if isinstance(repeat, type(len)) else None, copied


class Generated:
    """The function that Inductor's code calls, by the extension where there is one."""

    def __init__(self, python: Callable):
        extension = state().extension
        self.function = python if extension is None else extension.generated(python)
        self._tells = extension is not None

    def tell(
        self,
        run: Pass,
        eps: Any,
        tensors: tuple,
        read: tuple,
        reads: Sequence[int],
        outputs: Sequence[tuple[int, Sequence[int] | None]],
    ) -> None:
        """Have later calls with tensors of these shapes repeat a pass.

        read: what the pass has read. reads: the places of that, which count None first, and then
        the tensors. outputs: for each result its place, which counts also the results of the pass
        behind, and the sizes that it gets, or None.
        """
        if not self._tells:
            return
        repeat, copied = ready(run, read, eps)
        if repeat is None:
            return
        apart = sorted({reads[place] - 1 for place in strided(read, run.grouped)})
        copies = sorted({reads[place] - 1 for place in copied})
        how = tensors, apart, copies, [(repeat, list(reads))], list(outputs)
        state().extension.add_generated(self.function, *how)
