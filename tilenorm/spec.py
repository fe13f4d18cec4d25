"""What is to be normalised: the one key for dispatch, plans, caches, tests and bench."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
OPS = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "add_layer_norm",
    "gated_rms_norm",
    "gated_layer_norm",
)
# The values that a word may have.
WORDS = {
    "norm": ("rms", "layer"),
    "rounding": ("late", "early"),
    "activation": ("silu", "sigmoid"),
}


class Options(NamedTuple):
    """What a call asks for beside its tensors and eps: the fields of NormSpec that no tensor tells.

    The torch.library ops take these fields one by one, in this order, after their tensors.
    """

    hidden: int
    norm: str
    offset: float = 0.0
    gate_first: bool = False
    rounding: str = "late"
    activation: str = "silu"


def norm_of(op: str) -> str:
    """The norm of a function by its name: "rms" or "layer"."""
    return "layer" if "layer" in op else "rms"


@dataclass(frozen=True)
class NormSpec:
    """One normalisation, independent of the number of rows and of the device.

    norm: "rms" or "layer". hidden: N, the elements of a row. dtype: of input and output. weight,
    bias: their dtypes, or None when absent. offset: the constant added to the weight.

    residual: the dtype of what is added to the input first, and of the sum. gate: the dtype of z
    where act(z) multiplies the normalised rows, or, with gate_first, the rows before they are
    normalised. heads: H where weight and bias have a row of N for each of H heads, which take
    turns over the input's rows; 0 where every row has the same. rounding: "late" computes in
    float32 to the end, "early" rounds to the input's dtype before the weight. activation: of the
    gate, act(z) = z · σ(z) for "silu" and σ(z) for "sigmoid".
    """

    norm: str
    hidden: int
    dtype: str
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    residual: str | None = None
    gate: str | None = None
    gate_first: bool = False
    heads: int = 0
    rounding: str = "late"
    activation: str = "silu"

    @classmethod
    def of(cls, op: str, hidden: int, dtype: str, **fields) -> "NormSpec":
        """The spec of a function by its name, its residual or gate in the input's dtype."""
        if op.startswith("add_"):
            fields = {"residual": dtype} | fields
        elif op.startswith("gated_"):
            fields = {"gate": dtype} | fields
        return cls(norm_of(op), hidden, dtype, **fields)

    @classmethod
    def joined(cls, options: Options, dtype, residual, gate, weight, bias, heads=0) -> "NormSpec":
        """The spec of options for tensors of these dtypes, in the order in which ops take them."""
        dtypes = {
            "dtype": dtype,
            "residual": residual,
            "gate": gate,
            "weight": weight,
            "bias": bias,
        }
        return cls(**options._asdict(), **dtypes, heads=heads)

    @property
    def options(self) -> Options:
        return Options(*(getattr(self, name) for name in Options._fields))

    @property
    def dtypes(self) -> tuple[str | None, ...]:
        """Of input, residual, gate, weight and bias, None for an absent one."""
        return self.dtype, self.residual, self.gate, self.weight, self.bias

    @property
    def op(self) -> str:
        """The name of the function that users call."""
        return f"{'add_' if self.residual else 'gated_' if self.gate else ''}{self.norm}_norm"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def _row_bytes(self) -> tuple[int, ...]:
        """Bytes of an element of each tensor that has rows."""
        return tuple(ITEM_BYTES[d] for d in (self.dtype, self.residual, self.gate) if d)

    @property
    def widest_item(self) -> int:
        """Bytes of an element of the widest tensor that has rows."""
        return max(self._row_bytes)

    @cached_property
    def aligned(self) -> bool:
        """A row fills 16-byte vectors, so that every row of a contiguous matrix starts on one."""
        return all(self.hidden * size % 16 == 0 for size in self._row_bytes)
