"""What the tools tell of a spec: the bytes that it moves, an example call's sizes, and a title."""

import torch

from ..launch.calls import Sizes, every_gradient
from ..ops.passes import dims, ports
from ..spec import NormSpec
from ..table import AMAX, BIAS, DSUM

HEADS = 32, 8  # of the input and of the key


def moved_bytes(
    spec: NormSpec, rows: int, terms: int = 1, sizes: Sizes | None = None, groups: int = 0
) -> tuple[int, int]:
    """Bytes that the mathematics moves, (forward, backward): each input and output once. Numbers of
    rows are left out.

    terms: how many tensors make up dy. sizes: of heads that are rotated; None for those of
    sizes_of. groups: of modulated rows; 0 leaves out what has a row for each group.
    """
    heads = sizes or (sizes_of(spec, rows) if spec.rotation else None)
    planned = dims.planned(spec, rows, groups, heads)
    return (
        _bytes_of(planned, _forward_tensors(spec)),
        _bytes_of(planned, _backward_tensors(spec, terms)) if spec.differentiable else 0,
    )


def _forward_tensors(spec: NormSpec) -> ports.Tensors:
    """What a forward pass reads and writes."""
    written = [result for result in ports.results(spec, False) if result and result[0] != AMAX]
    return ports.taken(spec) + written


def _backward_tensors(spec: NormSpec, terms: int) -> ports.Tensors:
    """What a backward pass reads and writes. Of a chain it is x, the sum and the weights that are
    read, and each tensor that is taken has a gradient.
    """
    needs = every_gradient(spec)._replace(terms=terms)
    if spec.inner:
        taken = ports.taken(spec)
        outputs = [result for result in ports.results(spec, False) if result]
        read = [(port, dtype) for port, dtype in taken if port.role.endswith(("x", "w", "weight"))]
        return [*outputs, (DSUM, spec.residual), *read, *taken]
    # The bias is read for the gradient of a gate behind it.
    reads_bias = spec.gate and not spec.gate_first
    read = [pair for pair in ports.read(spec, needs) if pair[0] != BIAS or reads_bias]
    return read + [gradient for gradient in ports.gradients(spec, needs) if gradient]


def _bytes_of(planned: dims.Sizes, tensors: ports.Tensors) -> int:
    return sum(
        dims.nbytes(port, planned, getattr(torch, dtype).itemsize)
        for port, dtype in tensors
        if dtype is not None and not port.number
    )


def token_rows(spec: NormSpec) -> int:
    """How many rows a token has, each of which is normalised by itself."""
    return HEADS[0] if spec.rotation and not spec.by_token else spec.heads or 1


def sizes_of(spec: NormSpec, rows: int) -> Sizes:
    """Of a call of rotated heads whose input has about so many rows, in one sequence. Where a norm
    spans one head, a token has those of HEADS.
    """
    heads, keys = HEADS
    if spec.by_token:
        heads, keys = spec.hidden // spec.rotation.head, spec.key_hidden // spec.rotation.head
    return Sizes(1, max(1, rows // token_rows(spec)), heads, keys if spec.key else 0)


def options_of(spec: NormSpec, terms: int = 1) -> str:
    """The fields of a spec besides op, size and dtype, as text. terms: of dy."""
    place = "before" if spec.gate_first else "after"
    by_gate = f" gate {spec.mod_gate}" if spec.mod_gate else ""
    further = (
        (spec.heads, f"{spec.heads} heads"),
        (spec.residual, f"residual {spec.residual}"),
        (spec.addend, f"another residual {spec.addend}"),
        (spec.dropout_mask, f"input masked, times {spec.dropout_scale:g}"),
        (spec.layer_scale, f"layer scale {spec.layer_scale}"),
        (spec.rotation, spec.rotation and spec.rotation.label),
        (spec.key, f"key weight {spec.key_weight}"),
        (spec.modulated, f"modulation scale {spec.mod_scale} shift {spec.mod_shift}{by_gate}"),
        (spec.skip, f"residual {spec.skip} after the norm"),
        (spec.gate, f"gate {spec.gate} {place} the norm, activation {spec.activation}"),
        (spec.quantized, spec.quantized and spec.quantized.label),
        (spec.rounding != "late", f"rounding {spec.rounding}"),
        (spec.out_dtype, f"output {spec.out_dtype}"),
        (terms > 1, f"{terms} terms of dy"),
    )
    parts = [f"weight {spec.weight}", f"bias {spec.bias}", f"offset {spec.offset:g}"]
    return ", ".join([*parts, *(text for shown, text in further if shown)])


def title(spec: NormSpec, terms: int = 1) -> str:
    return f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec, terms)})"
