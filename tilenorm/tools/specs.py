"""What the tools tell of a spec: the bytes that it moves, an example call's sizes, and a title."""

import math

from ..launch.calls import Sizes
from ..launch.scales import Scales
from ..spec import ITEM_BYTES, NormSpec

HEADS = 32, 8  # of the input and of the key


def moved_bytes(
    spec: NormSpec, rows: int, terms: int = 1, sizes: Sizes | None = None
) -> tuple[int, int]:
    """Bytes that the mathematics moves, (forward, backward): each input and output once.

    terms: how many tensors make up dy. What lies by group is left out: a spec has no number of
    groups. sizes: of heads that are rotated.
    """
    if spec.rotation:
        return _rotated_bytes(spec, sizes or sizes_of(spec, rows))
    x, residual, gate, weight, bias, addend, skip, mask, factor, *_ = (
        ITEM_BYTES[dtype] if dtype else 0 for dtype in spec.dtypes
    )
    how, heads = spec.quantized, spec.heads or 1
    matrix, vector = rows * spec.hidden, spec.hidden * heads
    y = skip or (x if spec.differentiable else 0)
    # Added up: x, y and q; residual and sum; gate; addend; skip; mask.
    forward = matrix * (x + y + bool(how) + 2 * residual + gate + addend + skip + mask)
    forward += vector * (weight + bias) + spec.hidden * factor
    if how:
        scales = Scales.of(how, spec.hidden, rows)
        item = 4 if scales.dtype == "float32" else 1
        forward += (math.prod(scales.shape) - scales.padding) * item
    if not spec.differentiable:
        return forward, 0
    # Added up: dy and dx; the saved x, or the sum with its gradient (and the residual's gradient
    # if the residual has another dtype, or x is masked or scaled); the gate and its gradient; mask.
    apart = spec.residual is not None and not spec.shares_dx
    saved = (2 + apart) * residual if residual else x
    saved += x if spec.mod_gate else 0  # the input, which a gate by group multiplied
    backward = matrix * (x + terms * y + saved + 2 * gate + mask) + spec.hidden * factor
    kept = weight + (bias if spec.gate and not spec.gate_first else 0)
    return forward, backward + vector * (kept + weight + bias)


def _rotated_bytes(spec: NormSpec, sizes: Sizes) -> tuple[int, int]:
    """The same of heads that are rotated. All sequences share the tables' rows."""
    how, x = spec.rotation, ITEM_BYTES[spec.dtype]
    tokens = sizes.batch * sizes.tokens
    heads = tokens * (sizes.heads + sizes.key_heads) * how.head
    tables = 2 * sizes.tokens * (how.dim if how.full else how.dim // 2) * ITEM_BYTES[how.table]
    tables += tokens * {"int32": 4, "int64": 8}.get(how.positions or "", 0)
    each = (spec.weight, spec.hidden), (spec.key_weight, spec.key_hidden or spec.hidden)
    weights = sum(ITEM_BYTES[dtype] * count for dtype, count in each if dtype)
    return 2 * x * heads + tables + weights, 3 * x * heads + tables + 2 * weights


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
        (terms > 1, f"{terms} terms of dy"),
    )
    parts = [f"weight {spec.weight}", f"bias {spec.bias}", f"offset {spec.offset:g}"]
    return ", ".join([*parts, *(text for given, text in further if given)])


def title(spec: NormSpec, terms: int = 1) -> str:
    return f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec, terms)})"
