"""Norms of rows in pieces on one process: the ops, with a sum over the pieces in between."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.spec import NormSpec

from . import cases
from .executors import Inputs

OPS = torch.ops.tilenorm


def in_pieces(
    spec: NormSpec,
    inputs: Inputs,
    widths: tuple[int, ...],
    needs: Needs | None = None,
    copied: bool = False,
) -> dict[str, Tensor]:
    """The results and the gradients by name, where each piece has so many columns.

    copied: the pieces are contiguous, not views of the whole rows.
    """
    ends = pairwise(accumulate(widths, initial=0))

    def cut(tensor: Tensor | None, piece: slice) -> Tensor | None:
        found = tensor if tensor is None else tensor[..., piece]
        return found.contiguous() if copied and found is not None else found

    def of(piece: slice) -> Inputs:
        tensors = ("x", "residual", "gate", "weight", "bias", "dy", "dsum")
        return Inputs(**{n: cut(getattr(inputs, n), piece) for n in tensors}, eps=inputs.eps)

    pieces = [of(slice(*piece)) for piece in ends]
    results, saved = forward(spec, pieces)
    if spec.hidden > 1:  # of one number, x − mean is 0 with the row's own mean alone
        # The oracle's mean and rstd, so that errors of the forward pass do not matter.
        lead = inputs.x.shape[:-1]
        statistics = [s if s is None else s.view(lead) for s in inputs.stats(spec)]
        saved = [(*kept[:4], *statistics) for kept in saved]
    gradients = backward(spec, pieces, saved, needs or every_gradient(spec))
    return {name: t for name, t in (results | gradients).items() if t is not None}


def forward(spec: NormSpec, pieces: list[Inputs]) -> tuple[dict, list[tuple]]:
    """y, sum, mean and rstd, and what the backward pass of each piece saves."""
    last, layer = (*spec.options, 1), spec.norm == "layer"
    sums = [
        OPS.row_sums(p.x, p.residual, p.gate if spec.gate_first else None, *last) for p in pieces
    ]
    whole, centered = sum(part for part, _, _ in sums), None
    if layer:
        own = [numbers for _, numbers, _ in sums]
        parts = zip(pieces, own, strict=True)
        centered = sum(OPS.row_center(p.x, whole, numbers, *last) for p, numbers in parts)
    ys, saved = [], []
    for p, (_, _, total) in zip(pieces, sums, strict=True):
        x = p.x if spec.residual is None else total
        given = (x, p.gate, p.weight, p.bias, whole, centered)
        y, mean, rstd = OPS.row_apply(*given, *last, p.eps, p.x.dtype, True)
        ys.append(y)
        saved.append((x, p.gate, p.weight, p.bias, mean if layer else None, rstd))
    results = {"y": torch.cat(ys, -1), "rstd": rstd.reshape(-1)}
    if layer:
        results["mean"] = mean.reshape(-1)
    if spec.residual is not None:
        results["sum"] = torch.cat([total for _, _, total in sums], -1)
    return results, saved


def backward(spec: NormSpec, pieces: list[Inputs], saved: list[tuple], needs: Needs) -> dict:
    """The needed gradients."""
    last, dots = (*spec.options, 1), None
    both = list(zip(pieces, saved, strict=True))
    if needs.dx or needs.dresidual or (needs.dgate and spec.gate_first):
        dots = sum(
            OPS.grad_sums(p.dy, x, gate, weight, mean, rstd, *last)
            for p, (x, gate, weight, _, mean, rstd) in both
        )
    more = spec.residual is not None, list(needs.gradients)
    found = [
        OPS.grad_apply(p.dy, p.dsum if needs.dsum else None, *kept, dots, *last, *more)
        for p, kept in both
    ]
    grads = {
        name: torch.cat(parts, -1)
        for name, needed, parts in zip(
            cases.GRADIENTS, needs.gradients, zip(*found, strict=True), strict=True
        )
        if needed
    }
    return {n: g.reshape(-1) if n in ("dw", "db") else g for n, g in grads.items()}
