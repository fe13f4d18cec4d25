"""A drawn case whose rows are of drawn kinds, and the check of its results."""

from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support import cases, layouts
from tests.support.executors import Compiler, Executor, Inputs
from tests.support.oracle import Truth
from tests.support.results import assert_same_bits
from tests.support.tolerance import assert_close
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec

from .draw import Case
from .rows import KINDS

PARAMETERS = ("weight", "bias")
SUMS = ("dw", "db")
EPS = (1e-6, 1e-5, 1.0, 1e-12, 0.0)


class Batch(NamedTuple):
    """kinds: one for each extent of the first dimension, so with heads one for each token."""

    case: Case
    kinds: tuple[str, ...]
    needs: Needs
    eps: float

    @classmethod
    def of(cls, case: Case) -> "Batch":
        """LayerNorm of one or two elements has a gradient of zero, in which all terms cancel.

        With the gate first the oracle's mean, which the backward pass gets, is that of another
        x · act(z), and the rest is larger than the budget. So there are at least three elements.
        """
        rng, spec = Random(case.seed), case.spec
        if spec.norm == "layer" and spec.gate_first:
            case = replace(case, spec=replace(spec, hidden=max(3, spec.hidden)))
        kinds = tuple(rng.choices([*KINDS], k=case.rows))
        return cls(case, kinds, rng.choice(cases.some_needs(spec)), rng.choice(EPS))

    def inputs(self, device: str) -> Inputs:
        case, rows = self.case, len(self.kinds) * (self.case.spec.heads or 1)
        given = Inputs.random(case.spec, rows, "cpu", case.seed)
        generator = torch.Generator().manual_seed(case.seed)

        def filled(name: str, tensor: Tensor) -> Tensor:
            values = tensor.float()
            for row, kind in zip(values, self.kinds, strict=True):
                if fill := KINDS[kind].fills.get(name):
                    fill(row, tensor.dtype, generator)
            return case.layout(name).filled(values.to(tensor.dtype).to(device))

        given = given.with_rows(filled)
        there = {n: t.to(device) for n in PARAMETERS if (t := getattr(given, n)) is not None}
        for name, tensor in there.items():
            layout = layouts.draw(Random(f"{case.seed} {name}"), case.row_shape, False)
            there[name] = layout.filled(tensor)
        if given.layer_scale is not None:
            there["layer_scale"] = given.layer_scale.to(device)
        if not self.needs.dsum:
            there["dsum"] = None
        return replace(given, **there, eps=self.eps)


def compile_ahead(item: tuple[Batch, Target]) -> None:
    """Compile what `check` launches for a batch."""
    batch, target = item
    _results(Compiler(target), batch, batch.inputs("cpu"))


def _results(executor: Executor, batch: Batch, inputs: Inputs, **how) -> dict[str, Tensor]:
    found = executor.forward(batch.case.spec, inputs, **how)
    return found | executor.backward(batch.case.spec, inputs, batch.needs, **how)


def check(executor: Executor, batch: Batch, **how) -> None:
    """Each result is in the budget, for the rows of each kind apart. how: see Interpreter.run."""
    spec, inputs = batch.case.spec, batch.inputs(executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    computable = _computable(spec, truth, len(batch.kinds))
    for name, actual in _results(executor, batch, inputs, **how).items():
        if name in SUMS:
            if all(computable) and all(KINDS[kind].summed for kind in batch.kinds):
                _assert_close(name, actual, truth[name], own[name])
            continue
        results = (actual, truth[name].value, truth[name].scale, own[name])
        results = [t.reshape(len(batch.kinds), -1) for t in results]
        for kind in dict.fromkeys(batch.kinds):
            chosen = [i for i, other in enumerate(batch.kinds) if other == kind and computable[i]]
            actual, value, scale, pytorch = (t[chosen] for t in results)
            _assert_close(f"{name} of {kind}", actual, Truth(value, scale), pytorch)


def check_alone(executor: Executor, batch: Batch) -> None:
    """Each gradient has the bits that it has where every gradient is needed."""
    spec, inputs, needs = batch.case.spec, batch.inputs(executor.device), batch.needs
    found = executor.backward(spec, inputs, needs)
    assert set(found) == {name for name in cases.GRADIENTS if getattr(needs, name)}
    every = executor.backward(spec, inputs, every_gradient(spec)._replace(dsum=needs.dsum))
    assert_same_bits(found, {name: every[name] for name in found})


def _computable(spec: NormSpec, truth: dict[str, Truth], rows: int) -> list[bool]:
    """Whether float32 can compute a row: its squares have a sum, or NaN or infinity is among them.

    With eps = 0 a LayerNorm of equal numbers is 0 / 0. What rounding leaves of their mean decides
    whether float32 has NaN or a number. Zeros leave nothing.
    """
    rstd = truth["rstd"].value.reshape(rows, -1)
    squares = rstd**-2 * spec.hidden
    computable = (squares < torch.finfo(torch.float32).max / 2) | ~squares.isfinite()
    if spec.norm == "layer":
        computable &= (rstd != torch.inf) | (truth["mean"].value.reshape(rows, -1) == 0)
    return computable.all(1).tolist()


def _assert_close(name: str, actual: Tensor, truth: Truth, own: Tensor) -> None:
    """Hold the elements to the budget that float32 can give.

    Left out are elements where PyTorch's result is finite and float64's is not, or the other way
    round, and elements that may be rounded to infinity or to the largest number. In all results but
    y and the sum, infinity counts as NaN: infinities are subtracted there, in any order.
    """
    largest = torch.finfo(actual.dtype).max
    value = truth.value
    if not name.startswith(("y", "sum")):
        actual, value, own = (torch.where(t.isfinite(), t, torch.nan) for t in (actual, value, own))
    rounded, size = value.to(actual.dtype), value.abs() / largest
    kept = (
        (rounded == own) | (rounded.isnan() & own.isnan()) | (rounded.isfinite() & own.isfinite())
    )
    kept &= (size < 1 - 2**-7) | (size > 1 + 2**-7) | ~value.isfinite()
    value, scale = (torch.where(kept, t, 0.0) for t in (value, truth.scale))
    assert_close(name, torch.where(kept, actual, 0), Truth(value, scale), torch.where(kept, own, 0))
