"""Which gradient goes where: the backward pass of an op, as the steps of its norms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.calls import Needs, addend_as, needs_of
from ...row import Op
from ...spec import NormSpec
from ...table import LAYER_SCALE, OF_KEY, OPS
from ..pytorch.placements import added_up
from .reference import group_gradient, of_input, vector_gradient

SUMMED = ("x", "residual", "addend")


class Step(NamedTuple):
    """The backward pass of one norm of an op."""

    place: int  # which of the op's norms
    spec: NormSpec
    needs: Needs
    asked: dict[str, str]  # for each role whose gradient is asked for, the name of the op's port
    dy: str | None  # the name of the port whose gradient comes in as dy
    dsum: str | None  # the same of dsum
    kept: slice  # where the tensors stand that autograd saved

    @property
    def gradient_index(self) -> dict[str | None, int]:
        """Where the gradient of each role stands in what a backward pass returns, with dy, which is
        a skip's gradient, and None behind it.
        """
        spec, shared = self.spec, 0 if self.spec.shares_dx else 1
        others = {"residual": shared, "addend": 0 if addend_as(spec) == "x" else shared}
        return {role: i for i, role in enumerate((*spec.derived, "skip", None))} | others

    @property
    def is_pass(self) -> bool:
        """Whether every gradient that is asked for is one that a backward pass returns, or dy."""
        spec = self.spec
        third = "addend" in self.asked and spec.addend not in (spec.dtype, spec.residual)
        comes = self.dy is not None or spec.rotation is not None
        return comes and not third and LAYER_SCALE.role not in self.asked

    def by_role(self, gradients: Sequence, dy: Tensor, saved: Sequence) -> dict[str, Tensor | None]:
        """The gradients that are asked for. gradients: what a backward pass returns."""
        spec, gradient_index = self.spec, self.gradient_index
        every = *gradients[: len(self.needs.gradients)], dy, None
        grads = {
            role: every[gradient_index[role]] for role in self.asked if role != LAYER_SCALE.role
        }
        if "addend" in grads and not self.is_pass:
            grads["addend"] = grads["addend"].to(getattr(torch, spec.addend))
        if LAYER_SCALE.role in self.asked:
            total = every[gradient_index["residual"]]
            grads[LAYER_SCALE.role] = vector_gradient(spec, total, named(spec, saved))
        return grads


def named(spec: NormSpec, saved: Sequence) -> dict[str, Any]:
    """The tensors that autograd saved of a norm, by their roles."""
    return dict(zip(spec.autograd_saves, saved, strict=True))


def steps_of(
    op: Op, specs: Sequence[NormSpec], asked: Sequence[bool], *arrived: bool
) -> tuple[Step, ...]:
    """The steps of the backward pass of an op, in the order in which they run.

    asked: for each tensor that the op takes, whether its gradient is asked for. arrived: for each
    tensor that users get, whether its gradient comes in.
    """
    wanted = {port.name for port, need in zip(op.takes, asked, strict=False) if need and port.grad}
    comes = {port.name for port, came in zip(op.makes, arrived, strict=False) if came}
    first = {port.name for port in op.takes}
    kept, end = [], 0
    for spec in specs:
        start, end = end, end + len(spec.autograd_saves)
        kept.append(slice(start, end))
    steps = []
    for place in reversed(range(len(specs))):
        stage, spec = op.stages[place], specs[place]
        ports, dsum = stage.ports, stage.ports.get("key_y" if op.rotated else "sum")
        x = ports["x"]
        inside = x not in first  # x is what an earlier norm has made
        if inside:
            if ports["y"] not in comes:
                continue
            before = [s.ports.get(role) for s in op.stages[:place] for role in OPS[s.op].roles]
            if wanted.intersection(before):
                wanted.add(x)
            if x in comes:  # the gradient from outside is added before the only rounding
                dsum, spec = x, replace(spec, residual=spec.dtype)
        roles = {r: ports[r] for r in OPS[stage.op].roles if ports.get(r) in wanted}
        dy, dsum = ports["y"] if ports["y"] in comes else None, dsum if dsum in comes else None
        if dy is None and dsum is None:
            continue
        if op.rotated:  # the gradients of the input and of the key come in apart
            roles = {r: name for r, name in roles.items() if (dsum if r in OF_KEY else dy)}
        needs = needs_of(spec, roles, dsum is not None)
        steps.append(Step(place, spec, needs, roles, dy, dsum, kept[place]))
        if inside and x in wanted:
            comes.add(x)
    return tuple(steps)


def run_steps(
    op: Op, steps: Sequence[Step], grads: Sequence, saved: Sequence, eps: tuple, run: Callable
) -> tuple[Tensor | None, ...]:
    """The gradient of each tensor that the op takes, or None.

    grads: of the tensors that users get. eps: of each norm. run: computes gradients, in the order
    of Needs.gradients, given a step, dy, dsum, the tensors that were saved for it and its eps.
    """
    by_name = dict(zip([port.name for port in op.makes], grads, strict=False))
    by_port: dict[str, Tensor | None] = {}
    for step in steps:
        kept = saved[step.kept]
        dy, dsum = by_name.get(step.dy), by_name.get(step.dsum)
        if dy is None and not op.rotated:
            by_role = through_sum(step.spec, step.asked, dsum, named(step.spec, kept))
        else:
            grads = (None,) * len(step.needs.gradients)
            if any(step.needs.gradients):
                grads = run(step, dy, dsum, kept, eps[step.place])
            by_role = step.by_role(grads, dy, kept)
        new = {name: by_role[role] for role, name in step.asked.items()}
        by_port, by_name = by_port | new, by_name | new
    return tuple([by_port.get(port.name) for port in op.takes])


def through_sum(
    spec: NormSpec, asked: Iterable[str], dsum: Tensor, saved: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The gradients where only the sum was used: copies, because dsum is the caller's.

    A Partial dsum is added up first. Otherwise each rank would round its own part, and the sum of
    rounded parts has other bits than the rounded sum.
    """
    dsum = added_up(dsum, saved["x"])
    grads: dict[str, Tensor | None] = dict.fromkeys(asked)
    for role in grads:
        if role in SUMMED:
            dtype = spec.dtype if role == "x" else getattr(spec, role)
            grads[role] = dsum.to(getattr(torch, dtype), copy=True)
        if role == "x":
            grads[role] = of_input(spec, grads[role], dsum, saved)
        if role == "mod_gate":
            grads[role] = group_gradient(spec, dsum, saved)
        if role == LAYER_SCALE.role:
            grads[role] = vector_gradient(spec, dsum, saved)
    return grads
