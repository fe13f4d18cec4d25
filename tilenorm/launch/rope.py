"""The plans of heads that are normalised and then rotated.

The launches of a plan follow from Sizes and eps. They take a RopeForwardArrays or a
RopeBackwardArrays, whose tensors of heads are views (batch, tokens, heads, D).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ..kernels.constants import How, Rope
from ..kernels.rope_backward import rope_backward
from ..kernels.rope_forward import rope_forward
from . import heuristics
from .arrays import MAIN_ARRAYS, RopeBackwardArrays, RopeForwardArrays
from .calls import Launch, Needs, Sizes, constants, rectangles
from .config import RopeBackward, RopeForward, cdiv
from .kernel import hinted
from .tiling import Tiling, remembered


@dataclass(frozen=True)
class RopePlan(Tiling):
    """Base class of the plans of both directions."""

    config: RopeForward

    @cached_property
    def rope(self) -> Rope:
        spec, how, config = self.spec, self.spec.rotation, self.config
        heads = (spec.hidden // how.head, spec.key_hidden // how.head) if spec.by_token else ()
        width = heuristics.rope_width(spec)
        cut = spec.aligned, width, config.rows, config.tiles, heads
        return Rope(how.head, how.dim // 2, how.interleaved, how.full, *cut)

    def items(self, sizes: Sizes) -> tuple[int, int]:
        """How many items the input and the key have. A block works on one item at once."""
        if self.spec.by_token:
            parts = sizes.batch * sizes.tokens
            return parts, parts * bool(sizes.key_heads)
        parts = sizes.batch * cdiv(sizes.tokens, self.config.rows)
        groups, key_groups = (cdiv(heads, self.config.tiles) for heads in sizes[2:])
        return parts * groups, parts * key_groups


@dataclass(frozen=True)
class RopeForwardPlan(RopePlan):
    """The launches of a forward pass. save: whether the arrays have an rstd."""

    save: bool

    arrays: ClassVar[Any] = RopeForwardArrays
    for_small_batches: ClassVar[None] = None  # as a ForwardPlan has it
    casts_apart: ClassVar[None] = None

    @remembered
    def launches(self, sizes: Sizes, eps: float) -> list[Launch]:
        spec, config = self.spec, self.config
        kernel = hinted(rope_forward, config.hints)
        heads = config.rows * config.tiles * spec.rotation.head
        how = How(**self._early(spec.hidden if spec.by_token else heads))
        after = (eps, sizes.tokens, *map(constants, (self.norm, self.rope, how)))
        return [
            Launch(kernel, (1, y, z), (first, y), tuple, after, y <= how.EARLY)
            for first, y, z in rectangles(sum(self.items(sizes)))
        ]


@dataclass(frozen=True)
class RopeBackwardPlan(RopePlan):
    """The launches of a backward pass: the norm, and a column sum where weights have gradients."""

    config: RopeBackward
    needs: Needs

    arrays: ClassVar[Any] = RopeBackwardArrays

    @cached_property
    def columns(self) -> dict[str, int]:
        """How many columns each of the needed sums over tokens has."""
        columns = {}
        if self.needs.dw:
            columns["dw"] = self.spec.hidden
        if self.needs.dkey_weight:
            columns["dkey_weight"] = self.spec.key_hidden or self.spec.hidden
        return columns

    def blocks(self, sizes: Sizes) -> int:
        """As many as are resident at once, unless there is too little to do."""
        return min(max(self.items(sizes)), self.resident)

    def partials(self, sizes: Sizes) -> tuple[int, int] | None:
        """Shape of the float32 scratch for the sums over tokens; None without any."""
        columns = self.columns.values()
        return (len(columns) * self.blocks(sizes), max(columns)) if columns else None

    @remembered
    def launches(self, sizes: Sizes, _eps: float = 0.0) -> list[Launch]:
        """_eps: is not read, because the saved rstd holds it."""
        kernel = hinted(rope_backward, self.config.hints)
        blocks = self.blocks(sizes)
        asked = self.needs.dw, self.needs.dkey_weight
        width = max(self.columns.values(), default=0)
        norm, rope, how = map(constants, (self.norm, self.rope, How(OVERLAP=self._overlap)))
        after = (*sizes[:2], norm, rope, how, *asked)
        main = Launch(kernel, (blocks,), (), MAIN_ARRAYS, after, self._overlap)
        return [main, *self._column_sum(RopeBackwardArrays, [*self.columns], blocks, width)]
