"""What is to be normalised: the one key for dispatch, plans, caches, tests and bench."""

from dataclasses import dataclass
from functools import cached_property

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class NormSpec:
    """One normalisation, independent of the number of rows and of the device.

    norm: "rms". hidden: N, the elements of a row. dtype: of input and output. weight, bias: their
    dtypes, or None when absent. offset: the constant added to the weight.
    """

    norm: str
    hidden: int
    dtype: str
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def aligned(self) -> bool:
        """A row fills 16-byte vectors, so that every row of a contiguous matrix starts on one."""
        return self.hidden * self.item_bytes % 16 == 0
