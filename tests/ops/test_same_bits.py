"""A row has the same bits wherever it stands in the batch, whatever stands beside it, and in any
layout. Public functions of drawn specs are compared with one plain call.

On a GPU, `SWEEP="3000 7" python -m pytest -n 16 tests/ops/test_same_bits.py` draws 3000 specs of
seed 7.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import cuda.tile as ct
import pytest
import torch
from torch import Tensor

from tests.support import cases, draw
from tests.support.calls import NEEDS_GPU, Form, call, slow
from tests.support.draw import Case
from tests.support.guarded import guarded
from tests.support.on_gpu import train
from tests.support.pretended import pretended_gpu
from tests.support.quantized import arguments, bits
from tilenorm.kernels import forward
from tilenorm.spec import TENSORS, NormSpec

# Tensors with rows, and their gradients.
ROWS = ("input", "residual", "gate", "addend", "skip", "dropout_mask")
SUMS = ("weight", "bias", "layer_scale")  # their gradients are sums over the rows
Results = dict[str, Tensor]


class Subject:
    """The tensors of a case, and `expected`: the results of a plain call with grad."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, device
        spec = case.spec
        options = {"offset": spec.offset, "rounding": spec.rounding, "backend": "cutile"}
        if spec.out_dtype:
            options["out_dtype"] = getattr(torch, spec.out_dtype)
        if spec.dropout_mask:
            options["dropout_scale"] = spec.dropout_scale
        if spec.gate:
            options |= {"norm_before_gate": not spec.gate_first, "activation": spec.activation}
        dtypes = dict(zip(("input", *TENSORS[1:]), spec.dtypes, strict=True))
        self.form = Form(spec.op, options)
        self.generator = torch.Generator(device).manual_seed(case.seed)
        self.tensors = {n: self._random(n, d) for n, d in dtypes.items() if d}
        outputs = [spec.y_dtype] + ([spec.residual] if spec.residual else [])
        self.incoming = [self._random("incoming", dtype).detach() for dtype in outputs]
        self.expected = self.train()

    def _random(self, name: str, dtype: str) -> Tensor:
        """Normal numbers. Rows differ in their magnitudes, by up to 2 to the 12th power."""
        case, options = self.case, {"generator": self.generator, "device": self.device}
        shape = case.row_shape if name in SUMS else (case.rows, *case.row_shape)
        shape = shape[-1:] if name == "layer_scale" else shape
        values = torch.randn(shape, **options)
        if dtype == "bool":
            return values > -1
        if name in ROWS or name == "incoming":
            powers = torch.randint(-8, 5, (case.rows, *[1] * len(case.row_shape)), **options)
            values *= torch.exp2(powers.float())
        return values.to(getattr(torch, dtype)).requires_grad_()

    def train(self, tensors: Results | None = None, incoming=None) -> Results:
        """Outputs and gradients by name: of these tensors, else of the case's own."""
        tensors, incoming = tensors or self.tensors, incoming or self.incoming
        return train(self.form, tensors, incoming)

    def with_rows(self, change: Callable[[str, Tensor], Tensor]) -> tuple[Results, list[Tensor]]:
        """The case's tensors, those with rows as change(name, tensor) gives them."""
        tensors = {
            n: change(n, t.detach()).requires_grad_(t.requires_grad) if n in ROWS else t
            for n, t in self.tensors.items()
        }
        return tensors, [change(f"incoming {i}", t) for i, t in enumerate(self.incoming)]

    def differences(self, got: Results, index: Tensor | None = None) -> Iterator[str]:
        """What differs from the expected bits, of all results or of the rows `index`."""
        for name, t in got.items():
            expected = self.expected[name]
            if index is not None:
                if name in SUMS:
                    continue
                expected = expected[index.to(expected.device)]
            unequal = bits(t.detach()) != bits(expected.detach())
            if unequal.any():
                yield f"{name}: {int(unequal.sum())} of {unequal.numel()} bytes"


def again(subject: Subject) -> Iterator[str]:
    for _ in range(2):
        yield from subject.differences(subject.train())


def without_grad(subject: Subject) -> Iterator[str]:
    with torch.no_grad():
        outputs = call(subject.form, subject.tensors)
    yield from subject.differences(dict(zip(("output", "sum"), outputs, strict=False)))


def picked(subject: Subject) -> Iterator[str]:
    """Permutations, subsets and repetitions of the rows."""
    for name, index in subject.case.picks().items():
        there = index.to(subject.device)
        got = subject.train(*subject.with_rows(lambda _, t: t[there]))  # noqa: B023
        for difference in subject.differences(got, index):
            yield f"{name}, {len(index)} rows: {difference}"


def beside_nan(subject: Subject) -> Iterator[str]:
    """Every second row is NaN: no mask lets a row read the next one, or a sum run over both."""
    index = torch.arange(0, subject.case.rows, 2)

    def spoilt(_, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[1::2] = torch.nan if tensor.is_floating_point() else False
        return tensor

    got = subject.train(*subject.with_rows(spoilt))
    there = {name: t if name in SUMS else t[::2] for name, t in got.items()}
    yield from subject.differences(there, index)


def strided(subject: Subject) -> Iterator[str]:
    """Each tensor that has rows lies in a layout of its own, with NaN around it."""
    case = subject.case
    got = subject.train(*subject.with_rows(lambda name, t: case.layout(name).filled(t)))
    yield from subject.differences(got)
    got.pop("skip", None)  # its gradient is the incoming gradient itself
    apart = [name for name, t in got.items() if not t.is_contiguous()]
    yield from (f"{name} is not contiguous" for name in apart)


def between_guards(subject: Subject) -> Iterator[str]:
    """In memory that is NaN at first and lies between guard bytes."""
    with guarded():
        got = subject.train()
    yield from subject.differences(got)


def quantized(subject: Subject) -> Iterator[str]:
    """The quantised norm adds up a row as the plain norm does, whether y is returned or not."""
    how, form = subject.case.how, subject.form
    if how is None:
        return
    asked = arguments(how, subject.device)
    function = Form(f"{form.op}_quantized", form.options | asked)
    with torch.no_grad():
        with_y, codes = (
            call(function, subject.tensors, return_output=output) for output in (True, False)
        )
    yield from subject.differences({"output": with_y.output})
    if not torch.equal(bits(with_y.q), bits(codes.q)):
        yield f"{how.label}: other codes where y is returned"


CHECKS = (again, without_grad, picked, beside_nan, strided, between_guards, quantized)


def problems(case: Case, device: str = "cpu") -> list[str]:
    """What is wrong with a case, by the check that says it."""
    subject = Subject(case, device)
    return [f"{check.__name__}: {wrong}" for check in CHECKS for wrong in check(subject)]


SPECS, SEED = map(int, os.environ.get("SWEEP", "200 1").split())  # on a GPU
EACH = 5  # specs of a case: a GPU's kernels take most of the time to compile


def check_each(drawn: list[Case], device: str) -> None:
    for case in drawn:
        with draw.naming(case):
            assert not problems(case, device)


@pytest.mark.parametrize(
    "executor", [*cases.INTERPRETERS[:2], *slow(*cases.INTERPRETERS[2:])], indirect=True
)
def test_drawn_rows(executor):
    with pretended_gpu(executor.name.removeprefix("interpreter_")):
        seed = cases.INTERPRETERS.index(executor.name) + 1
        check_each(draw.drawn(4, seed, draw.INTERPRETER), executor.device)


@NEEDS_GPU
@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SPECS, EACH))
def test_drawn_rows_on_a_gpu(first):
    check_each(draw.drawn(SPECS, SEED, draw.GPU)[first : first + EACH], "cuda")


def by_place_in_the_tile(real):
    """moments() whose variance is another in every second row of a tile."""

    def moments(*arguments):
        found = real(*arguments)
        rows = ct.arange(found.variance.shape[0], dtype=ct.int32)[:, None]
        return replace(
            found, variance=ct.where(rows % 2 == 1, found.variance * 1.01, found.variance)
        )

    return moments


def by_row_count(real):
    """moments() whose variance is another in a grid of several blocks."""

    def moments(*arguments):
        found = real(*arguments)
        few = ct.num_blocks(1) < 3
        return replace(found, variance=ct.where(few, found.variance * 1.01, found.variance))

    return moments


SEVERAL_ROWS_A_TILE = Case(NormSpec("layer", 40, "float32", "float32"), 9, 1)
ONE_ROW_A_TILE = Case(NormSpec("rms", 1030, "bfloat16", "bfloat16"), 4, 2)


@pytest.mark.parametrize(
    "case, fault",
    [(SEVERAL_ROWS_A_TILE, by_place_in_the_tile), (ONE_ROW_A_TILE, by_row_count)],
    ids=["place", "rows"],
)
def test_a_kernel_whose_rows_depend_on_their_place_is_found(case, fault):
    with pretended_gpu():
        subject = Subject(case, "cpu")
        assert not [*picked(subject)]
        with patch.object(forward, "moments", fault(forward.moments)):
            assert any("output" in wrong for wrong in picked(Subject(case, "cpu")))
