"""Norms whose output is 8-bit floats with scales: by row, by blocks of 128 or the caller's scale.

Only the forward pass has codes. ``torch`` and ``compile`` are PyTorch's norm followed by the
operations of a cast, and ``tilenorm+cast`` is tilenorm's norm followed by that cast under
torch.compile. ``flashinfer`` writes the sum over the residual; its norm by blocks always writes y
too. What a provider returns is decoded, and checked before it is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.op import EPS, INFERENCE, Case, Op, layer_norm, of_sum, rms_norm
from tilenorm.spec import NormSpec, Quantization

FP8, MOST = torch.float8_e4m3fn, 448.0
LEAST_PEAK = 1e-12  # a row of zeros has a finite scale, too
SCALINGS = {"row": 0, "block": 128, "tensor": 0}  # elements that share a scale; 0: all of a row
STATIC_SCALE = 1 / 64  # the largest code is 448 / 64 = 7, and y is smaller


@dataclass(frozen=True)
class Quantized(Op):
    """A norm whose first output is codes, with the decoding scales behind them if it writes any.

    ``norm``: the norm alone. The last input is the caller's scale, for the scaling "tensor".
    """

    norm: Callable = rms_norm
    scaling: str = "row"
    added: bool = False
    returned: bool = False

    directions = ("forward", INFERENCE)
    trained = ()
    ways = ("call",)
    # Three bits of mantissa miss a value by a sixteenth at most. Decoded rows are float32.
    coded = 2**-4 / torch.finfo(torch.float32).eps

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.rows, *self.columns, "static")

    @property
    def reference(self) -> Callable:
        """y, the sum if there is one, and y if it is returned."""
        norm = of_sum(self.norm) if self.added else self.norm
        return composed(norm, self.scaling, self.returned, lambda y, *_: (y,))

    def decoded(self, outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        q, *written = outputs
        scale, *others = [inputs[-1], *written] if self.scaling == "tensor" else written
        groups = q.float().unflatten(-1, (-1, SCALINGS[self.scaling] or q.shape[-1]))
        return (groups * scale.float().reshape(-1, groups.shape[-2], 1)).flatten(-2), *others

    def spec(self, case: Case, **fields) -> NormSpec:
        how = Quantization(self.scaling, output=self.returned)
        return super().spec(case, quantized=how, **fields)

    def made(self, case: Case, device: str) -> list[Tensor]:
        tensors = [x.detach() for x in super().made(case, device)]
        return [*tensors, torch.full((1,), STATIC_SCALE, device=device)]


def quantize(y: Tensor, static: Tensor, scaling: str) -> tuple[Tensor, ...]:
    """The codes and the decoding scales of rows, as training code in PyTorch computes them.

    With the caller's scale, ``static``, there are only codes.
    """
    if scaling == "tensor":
        return (_saturated(y.float() * static.reciprocal()),)
    groups = y.float().unflatten(-1, (-1, SCALINGS[scaling] or y.shape[-1]))
    factor = MOST / groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_PEAK)
    return _saturated(groups * factor).flatten(-2), factor.reciprocal().squeeze(-1)


def _saturated(scaled: Tensor) -> Tensor:
    """PyTorch's own cast does not saturate before 2.12."""
    return scaled.clamp(-MOST, MOST).to(FP8)


def composed(norm: Callable, scaling: str, returned: bool, casting: Callable = quantize):
    """A norm, and then a cast of its first output."""

    def run(*tensors):
        *inputs, static = tensors
        results = norm(*inputs)
        y, *total = results if isinstance(results, tuple) else (results,)
        return *casting(y, static, scaling), *total, *[y] * returned

    return run


def _op(norm: Callable, columns: tuple, scaling: str, added: bool, returned: bool = False) -> Op:
    name = f"{'add_' * added}{norm.__name__}_quantized {scaling}{' + y' * returned}"
    rows = ("x", *["residual"] * added)
    outputs = ("codes", *["sum"] * added, *["output"] * returned)
    eager = composed(of_sum(norm) if added else norm, scaling, returned)
    how = {"norm": norm, "scaling": scaling, "added": added, "returned": returned}
    return Quantized(name, eager, rows, columns, outputs, **how)


QUANTIZED = (
    *(_op(rms_norm, ("weight",), scaling, added) for added in (0, 1) for scaling in SCALINGS),
    _op(rms_norm, ("weight",), "block", True, returned=True),
    *(_op(layer_norm, ("weight", "bias"), "row", added) for added in (0, 1)),
)


# A provider's function of an op takes the op's inputs, and returns the codes, the decoding scales
# if it writes them, the sum if there is one, and y if it was asked for.


def tilenorm(op: Quantized) -> Callable:
    import tilenorm as tn

    function: Callable = getattr(tn, op.name.split()[0])
    static, rows = op.scaling == "tensor", len(op.rows)

    def run(*tensors):
        *inputs, scale = tensors
        how = {"scaling": op.scaling, "return_output": op.returned}
        how |= {"scale": scale if static else None}
        results = function(*inputs[:rows], inputs[0].shape[-1:], *inputs[rows:], eps=EPS, **how)
        written = (*[results.residual_out] * op.added, *[results.output] * op.returned)
        return results.q, *[results.scale] * (not static), *written

    return run


def flashinfer(op: Op) -> Callable | None:
    if not isinstance(op, Quantized) or op.norm is not rms_norm:
        return None
    from flashinfer import norm

    def by_tensor(*tensors):
        x, *residual, w, scale = tensors
        q = torch.empty_like(x, dtype=FP8)
        function = norm.fused_add_rmsnorm_quant if op.added else norm.rmsnorm_quant
        function(q, x, *residual, w, scale, EPS)
        return q, *residual

    def by_block(x, residual, w, scale):
        rows, groups = len(x), x.shape[-1] // SCALINGS["block"]
        q, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        scales = x.new_empty(groups, -(-rows // 4) * 4, dtype=torch.float32)
        norm.fused_add_rmsnorm_fp8_block_quant(q, scales, y, x, residual, w, EPS)
        return q, scales.T[:rows], residual, y

    if (op.scaling, op.returned) == ("block", True):  # y and the sum are always written
        return by_block
    return by_tensor if (op.scaling, op.returned) == ("tensor", False) else None
