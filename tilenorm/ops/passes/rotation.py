"""The rotation of heads, and its derivative, in plain PyTorch: a part of the reference.

The two elements of a pair of a head, and the cosine and the sine of each element's angle, give

    (n1 · cos − n2 · sin, n2 · cos' + n1 · sin')

after Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). The angles
of both elements are the same where the tables have one column for each pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import Rotation


class Turns(NamedTuple):
    """What multiplies the first and the second element of each pair, (…tokens, 1, dim / 2)."""

    cos: Tensor
    cos_second: Tensor
    sin: Tensor
    sin_second: Tensor

    @classmethod
    def of(
        cls, how: Rotation, cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype
    ) -> "Turns":
        tables: list[Tensor] = []
        for table in (cos, sin):
            table = table if positions is None else table[positions]
            table = table.to(dtype).unsqueeze(-2)
            tables += _pairs_of(how, table) if how.full else (table, table)
        return cls(*tables)


def check_positions(positions: Tensor, table: Tensor) -> None:
    """Raise IndexError unless each position is a row of the tables. This waits for a GPU."""
    if positions.numel():
        least, most = (int(end) for end in positions.aminmax())
        if least < 0 or most >= table.shape[0]:
            takes = f"numbers from 0 to {table.shape[0] - 1}, the rows of cos and sin"
            raise IndexError(
                f"rms_norm_rope: argument 'positions' takes {takes}, got {least} to {most}"
            )


def rotate(
    how: Rotation, rows: Tensor, turns: Turns, dtype: torch.dtype, early: bool = False
) -> Tensor:
    """Heads (…tokens, H, head) rotated, in a dtype. early: each product is rounded to it, too."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).to(dtype).to(rows.dtype) if early else a * b

    first, second = _pairs_of(how, rows)
    turned = (
        (product(first, turns.cos) - product(second, turns.sin)).to(dtype),
        (product(second, turns.cos_second) + product(first, turns.sin_second)).to(dtype),
    )
    return _joined(how, *turned, rows)


def rotate_back(how: Rotation, rows: Tensor, turns: Turns) -> Tensor:
    """The gradient of what was rotated, from that of what `rotate` returned."""
    first, second = _pairs_of(how, rows)
    turned = (
        first * turns.cos + second * turns.sin_second,
        second * turns.cos_second - first * turns.sin,
    )
    return _joined(how, *turned, rows)


def _pairs_of(how: Rotation, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second element of each pair."""
    if how.interleaved:
        return rows[..., 0 : how.dim : 2], rows[..., 1 : how.dim : 2]
    half = how.dim // 2
    return rows[..., :half], rows[..., half : how.dim]


def _joined(how: Rotation, first: Tensor, second: Tensor, rows: Tensor) -> Tensor:
    """Heads of these pairs, whose other elements are those of `rows`."""
    pairs = [torch.stack((first, second), -1).flatten(-2)] if how.interleaved else [first, second]
    return torch.cat([*pairs, rows[..., how.dim :].to(first.dtype)], -1)
