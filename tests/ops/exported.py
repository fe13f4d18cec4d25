"""Every public function and module as a module of torch.nn with its inputs, for exporters."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import tilenorm
from tilenorm.table import NOT_OF_ROWS, OPS, ROTATED_NORMS

from ..quantized import HOWS, arguments, label
from .helpers import CALLS, FAMILY, arguments_of, random, slow, tensors_of, tensors_of_op

N = 256
TAKEN = [port for op in OPS.values() for port in op.takes]
PARAMETERS = {p.name for p in TAKEN if p.lies in ("affine", "vector", "table", "tokens")}


class Called(nn.Module):
    """A function of tilenorm. names: of the tensors that it is given, in their order."""

    def __init__(self, op: str, names: tuple[str, ...], options: dict):
        super().__init__()
        self.op, self.names, self.options = op, names, options

    def forward(self, a, b=None, c=None, d=None, e=None, f=None, g=None):
        """With names, because PyTorch 2.9 exports guards of *tensors that it cannot run."""
        tensors = [t for t in (a, b, c, d, e, f, g) if t is not None]
        given = arguments_of(dict(zip(self.names, tensors, strict=True)))
        found = getattr(tilenorm, self.op)(**given, normalized_shape=(N,), **self.options)
        return found if isinstance(found, Tensor) else tuple(t for t in found if t is not None)


class Case(NamedTuple):
    """A module, and the tensors that it takes by name."""

    module: nn.Module
    tensors: dict[str, Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors.values())

    @property
    def dynamic_shapes(self) -> tuple:
        """Of torch.export: any number of rows."""
        rows = torch.export.Dim("rows", min=2, max=1 << 20)
        return tuple(None if n in PARAMETERS else {0: rows} for n in self.tensors)

    def of_rows(self, rows: int) -> tuple[Tensor, ...]:
        """Other inputs, with so many rows."""

        def other(t: Tensor, seed: int) -> Tensor:
            numbers = random(rows, *t.shape[1:], seed=seed)
            return numbers > -1 if t.dtype == torch.bool else numbers.to(t.dtype)

        named = enumerate(self.tensors.items())
        return tuple(t if n in PARAMETERS else other(t, 7 + i) for i, (n, t) in named)

    def outputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)


def called(op: str, tensors: dict[str, Tensor], **options) -> Case:
    return Case(Called(op, tuple(tensors), options), tensors)


CASES = {
    name: called(form.op, tensors_of(form, 3, N), **form.options) for name, form in CALLS.items()
}
CASES |= {
    f"{op}, 16 bits": called(
        op, tensors_of(FAMILY[op], 3, N, dtype=dtype), offset=1.0, rounding="early"
    )
    for op, dtype in (("add_layer_norm", torch.bfloat16), ("gated_rms_norm", torch.float16))
}
CASES["rms_norm, by heads"] = called(
    "rms_norm", {"input": random(3, 4, N), "weight": random(4, N, seed=1)}
)
INTERLEAVED = {name: {"interleaved": True} for name in ROTATED_NORMS}
CASES |= {
    name: called(name, tensors_of_op(name, lead=(3, 2), n=N), **INTERLEAVED.get(name, {}))
    for name, op in OPS.items()
    if op.calls or name in NOT_OF_ROWS
}
for name in ("RMSNorm", "LayerNorm", "ModulatedRMSNorm", "ModulatedLayerNorm"):
    tensors = CASES["modulated_rms_norm"].tensors
    taken = ("input", "scale", "shift") if name.startswith("Mod") else ("input",)
    module = getattr(tilenorm, name)(N).requires_grad_(False)
    CASES[name] = Case(module, {n: tensors[n] for n in taken})
CASES |= {
    f"rms_norm_quantized, {label(how)}": called(
        "rms_norm_quantized",
        tensors_of_op("rms_norm_quantized", lead=(3, 2), n=N),
        **arguments(how),
    )
    for how in HOWS
}
CASES |= {
    f"{op}_quantized": called(f"{op}_quantized", tensors_of(FAMILY[op], 3, N), scaling="row")
    for op in ("layer_norm", "add_rms_norm", "add_layer_norm")
}
BLOCK = f"rms_norm_quantized, {label(HOWS[2])}"
QUICK = ("add_layer_norm, two residuals", "rms_norm_add_rms_norm", "RMSNorm")
QUICK += ("gated_rms_norm, 16 bits", BLOCK)
# They look at the bits of numbers, for which ONNX has no operator.
BITS = tuple(
    f"rms_norm_quantized, {label(how)}" for how in HOWS if how.power_of_2 or how.scaling == "mx"
)


def each(*left_out: str, quick: tuple[str, ...] = QUICK) -> list:
    """The names of the cases but of these, as parameters."""
    names = [name for name in CASES if name not in left_out]
    return [n for n in names if n in quick] + slow(*(n for n in names if n not in quick))


def assert_alike(got: Tensor, expected: Tensor) -> None:
    """8-bit numbers: but for few, which another last place of the norm rounds to their neighbours.
    Others: by the tolerances of torch.testing.
    """
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if expected.dtype.itemsize == 1:
        differ = got.view(torch.uint8).int() - expected.view(torch.uint8).int()
        assert differ.abs().max() <= 1 and (differ != 0).double().mean() < 0.01
    else:
        torch.testing.assert_close(got, expected)
