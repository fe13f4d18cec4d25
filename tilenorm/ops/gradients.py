"""Which gradient goes where: the backward pass of an op, as the steps of its norms."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.calls import Needs, addend_as, needs_of
from ..spec import NormSpec
from ..table import FACTORS, OF_KEY, OPS, VECTOR, Op
from .reference import branched, gated, group_gradient, vector_gradient

SUMMED = ("x", "residual", "addend")
Roles = tuple[str | None, ...]


class Step(NamedTuple):
    """The backward pass of one norm of an op.

    place: which of the op's norms. asked: for each tensor of the norm the role, if its gradient is
    asked for. ports: the op's names of those tensors. dy, dsum: the op's names of what the incoming
    gradients are of. kept: where the tensors stand that autograd saved.
    """

    place: int
    spec: NormSpec
    needs: Needs
    asked: Roles
    ports: tuple[str | None, ...]
    dy: str | None
    dsum: str | None
    kept: slice

    @property
    def standing(self) -> dict[str | None, int]:
        """Where the gradient of each role stands in what a backward pass returns, with dy, which is
        a skip's gradient, and None behind it.
        """
        spec, shared = self.spec, 0 if self.spec.shares_dx else 1
        own = {"residual": shared, "addend": 0 if addend_as(spec) == "x" else shared}
        return {role: i for i, role in enumerate((*spec.derived, "skip", None))} | own

    @property
    def places(self) -> tuple[int, ...] | None:
        """The same of what is asked for; None where one of them is made of what is returned."""
        spec = self.spec
        third = "addend" in self.asked and spec.addend not in (spec.dtype, spec.residual)
        if third or VECTOR in self.asked:
            return None
        return tuple(map(self.standing.__getitem__, self.asked))

    def ordered(self, found: Sequence, dy: Tensor, saved: Sequence) -> tuple[Tensor | None, ...]:
        """The gradients that are asked for, in the order of `asked`. found: what a backward pass
        returns.
        """
        spec, standing = self.spec, self.standing
        every = *found[: len(self.needs.gradients)], dy, None
        by_role = {role: every[standing[role]] for role in self.asked if role != VECTOR}
        if "addend" in by_role:
            by_role["addend"] = by_role["addend"].to(getattr(torch, spec.addend))
        if VECTOR in self.asked:
            total = every[standing["residual"]]
            by_role[VECTOR] = vector_gradient(spec, total, named(spec, saved))
        return tuple(map(by_role.__getitem__, self.asked))


def named(spec: NormSpec, saved: Sequence) -> dict[str, Any]:
    """The tensors that autograd saved of a norm, by their roles."""
    return dict(zip((*spec.kept, "input"), saved, strict=False))


def steps_of(
    op: Op, specs: Sequence[NormSpec], asked: Sequence[bool], arrived: Sequence[bool]
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
        start, end = end, end + len(spec.kept) + spec.keeps_input
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
        names = tuple(ports.get(role) for role in OPS[stage.op].roles)
        roles = tuple(
            role if name in wanted else None
            for role, name in zip(OPS[stage.op].roles, names, strict=True)
        )
        dy, dsum = ports["y"] if ports["y"] in comes else None, dsum if dsum in comes else None
        if dy is None and dsum is None:
            continue
        if op.rotated:  # the gradients of the input and of the key come in apart
            roles = tuple([r if (dsum if r in OF_KEY else dy) else None for r in roles])
        needs = needs_of(spec, roles, dsum is not None)
        names = tuple(n if r else None for n, r in zip(names, roles, strict=True))
        steps.append(Step(place, spec, needs, roles, names, dy, dsum, kept[place]))
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
    found: dict[str, Tensor | None] = {}
    for step in steps:
        kept = saved[step.kept]
        dy, dsum = by_name.get(step.dy), by_name.get(step.dsum)
        if dy is None and not op.rotated:
            given = through_sum(step.spec, step.asked, dsum, named(step.spec, kept))
        else:
            grads = (None,) * len(step.needs.gradients)
            if any(step.needs.gradients):
                grads = run(step, dy, dsum, kept, eps[step.place])
            given = step.ordered(grads, dy, kept)
        there = {name: grad for name, grad in zip(step.ports, given, strict=True) if name}
        found, by_name = found | there, by_name | there
    return tuple([found.get(port.name) for port in op.takes])


def through_sum(
    spec: NormSpec, asked: Roles, dsum: Tensor, saved: dict[str, Any]
) -> list[Tensor | None]:
    """The gradients where only the sum was used: copies, because dsum is the caller's."""
    found: list[Tensor | None] = []
    for role in asked:
        grad = None
        if role in SUMMED:
            dtype = spec.dtype if role == "x" else getattr(spec, role)
            grad = dsum.to(getattr(torch, dtype), copy=True)
        if role == "x":
            grad = branched(spec, grad, *map(saved.get, FACTORS[::-1]))
            grad = gated(spec, dsum, saved.get("mod_gate"), grad)
        if role == "mod_gate":
            grad = group_gradient(spec, dsum, saved)
        if role == VECTOR:
            grad = vector_gradient(spec, dsum, saved)
        found.append(grad)
    return found
