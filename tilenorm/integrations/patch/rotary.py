"""Norms of queries and keys with a rotation behind them: what rotates, and both in one pass."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import functional_rotated
from .form import are_alike, form_of, widens

# Where the norms of a rotation stand: the methods between. q is (B, H, S, D) at last.
PLACES = {(), ("transpose",), ("view", "transpose")}


@cache
def casts_back(function: Any) -> bool | None:
    """Of a function of q, k, cos and sin with the numbers of apply_rotary_pos_emb: whether it
    computes with cos and sin of more bits, and then has the dtype of q and k. None for others.
    """
    if all(_rotates(function, dtype, dtype) for dtype in (torch.float32, torch.bfloat16)):
        return _rotates(function, torch.bfloat16, torch.float32)
    return None


def _rotates(function: Any, dtype: torch.dtype, of_tables: torch.dtype) -> bool:
    how: Any = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    heads = [torch.randn(2, n, 3, 8, **how).to(dtype) for n in (4, 2)]
    tables = [torch.randn(2, 3, 8, **how).to(of_tables) for _ in range(2)]
    cos, sin = (table[:, None] for table in tables)
    expected = []
    for x in heads:
        first, second = x.chunk(2, -1)
        expected.append((x * cos + torch.cat((-second, first), -1) * sin).to(dtype))
    try:
        pairs = zip(function(*heads, *tables), expected, strict=True)
        return all(y.dtype == dtype and torch.equal(y, like) for y, like in pairs)
    except Exception:  # it takes other arguments
        return False


def rotated(
    apply: Callable,
    q_norm: nn.Module,
    k_norm: nn.Module,
    place: tuple[str, ...],
    casts: bool,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, S, D), normalised and then rotated by `apply`; in one pass where that
    gives the same shapes and dtypes. place: of PLACES. casts: as that of casts_back.
    """
    spans_token, of_q, of_k = "view" in place, None, None
    if _fit(q, k, cos, sin, casts):
        of_q, of_k = (_norm_of_heads(*of, spans_token) for of in ((q_norm, q), (k_norm, k)))
    if of_q is None or of_k is None or of_q[1:] != of_k[1:]:
        return apply(_norm_at(q_norm, q, place), _norm_at(k_norm, k, place), cos, sin)
    weight, has_weight, offset, rounding, eps = of_q
    # In 16 bits, no rounding of the op is that of a norm that rounds once, behind the weight.
    once = rounding == "late" and has_weight and q.dtype.itemsize == 2
    return functional_rotated.rms_norm_rope(
        q,
        (q.shape[1], q.shape[3]) if spans_token else q.shape[3:],
        cos,
        sin,
        weight,
        eps,
        key=k,
        key_weight=of_k[0],
        heads_first=True,
        offset=offset,
        rounding="late" if once or widens(q, cos) else "early",
    )


def _fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, casts: bool) -> bool:
    """Whether one pass takes these tensors, and gives the dtypes of what it replaces."""
    if not all(isinstance(t, Tensor) for t in (q, k, cos, sin)):
        return False
    fits = q.dim() == k.dim() == 4 and (q.dtype, q.device) == (k.dtype, k.device)
    fits = fits and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    fits = fits and are_alike(cos, sin) and cos.dim() == 3 and cos.shape[0] in (1, len(q))
    fits = fits and cos.shape[1:] == q.shape[2:] and not (cos.requires_grad or sin.requires_grad)
    fits = fits and (casts or not widens(q, cos)) and cos.dtype != torch.float64
    return fits and not (q.is_cuda and torch.is_autocast_enabled())


def _norm_at(norm: nn.Module, x: Tensor, place: tuple[str, ...]) -> Tensor:
    """What a norm at a place gives of (B, H, S, D)."""
    if not place:
        return norm(x)
    rows = x.transpose(1, 2)
    y = norm(rows.flatten(2)).view(rows.shape) if "view" in place else norm(rows)
    return y.transpose(1, 2)


def _norm_of_heads(norm: nn.Module, x: Tensor, spans_token: bool) -> tuple | None:
    """The weight of the norm of heads (B, H, S, D), whether there is one, its offset, rounding and
    eps; None for what is no RMSNorm of heads, or of all heads of a token, that tilenorm serves.
    """
    form, rows = form_of(norm), x.transpose(1, 2)
    if form is None or form.norm != "rms" or form.dims > 1 or form.groups or form.gate or form.bias:
        return None
    served = form.served(norm, rows.flatten(2) if spans_token else rows)
    if served is None or form.widens(x, served[2]):
        return None
    weight, offset = form.scale(served[2])
    if spans_token and weight is not None:
        weight = weight.view(-1, x.shape[-1])
    return weight, weight is not None, offset, form.rounding, form.epsilon(norm)
