"""NormSpec describes a normalisation: the key for dispatch, plans, caches, tests and bench."""

from dataclasses import dataclass, replace
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
# The values of the options that are words.
WORDS = {
    "norm": ("rms", "layer"),
    "rounding": ("late", "early"),
    "activation": ("silu", "sigmoid"),
}


class Options(NamedTuple):
    """The options of a call: the fields of NormSpec that do not follow from the tensors.

    The torch.library ops take these fields one by one, in this order, after their tensors.
    """

    hidden: int
    norm: str
    offset: float = 0.0
    gate_first: bool = False
    rounding: str = "late"
    activation: str = "silu"


def norm_of(op: str) -> str:
    """The norm of a function, given its name: "rms" or "layer"."""
    return "layer" if "layer" in op else "rms"


@dataclass(frozen=True)
class NormSpec:
    """One normalisation, independent of the number of rows and of the device.

    norm: "rms" or "layer". hidden: N, the elements of a row. dtype: the dtype of input and output.
    weight, bias: their dtypes, or None without them. offset: a constant added to the weight.

    residual: the dtype of the residual and of the sum x + residual, which is normalised. gate: the
    dtype of the gate z; act(z) multiplies the normalised rows, or, with gate_first, the rows before
    the norm. activation: act(z) is z · σ(z) for "silu" and σ(z) for "sigmoid". heads: 0, or the
    number of heads H; each head has its own N weights and biases, and row i of the input belongs
    to head i mod H. rounding: "late" computes in float32 to the end; "early" rounds to the input's
    dtype before the weight is applied.
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
        """The spec of a function, given its name. A residual or gate has the input's dtype."""
        if op.startswith("add_"):
            fields = {"residual": dtype} | fields
        elif op.startswith("gated_"):
            fields = {"gate": dtype} | fields
        return cls(norm_of(op), hidden, dtype, **fields)

    @classmethod
    def joined(cls, options: Options, dtype, residual, gate, weight, bias, heads=0) -> "NormSpec":
        """The spec for options and tensors of these dtypes, in the order of the ops' tensors."""
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
        """The dtypes of input, residual, gate, weight and bias; None for an absent tensor."""
        return self.dtype, self.residual, self.gate, self.weight, self.bias

    @property
    def summed(self) -> "NormSpec":
        """The part of the norm that comes before the sums over a row."""
        gate = self.gate if self.gate_first else None
        return replace(self, weight=None, bias=None, heads=0, gate=gate)

    @property
    def applied(self) -> "NormSpec":
        """The part that comes after them. It reads the sum, whose dtype is named if it differs."""
        return replace(self, residual=None if self.residual == self.dtype else self.residual)

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
        """Whether a row is whole 16-byte vectors: then each row of a matrix starts at a vector."""
        return all(self.hidden * size % 16 == 0 for size in self._row_bytes)
