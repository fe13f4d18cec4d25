"""NormSpec describes a normalisation: the key for dispatch, plans, caches, tests and bench."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .row import Op
from .table import BACKWARD, BRANCH_PORTS, COS, MODULATION, OF_KEY, OPS, SIN

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}
DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}  # binary ones
FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # the largest number of each dtype
# The elements that share a scale, or 0 for a whole row or a whole tensor; and the layouts of the
# scales, of which the first is the default.
GROUPS = {"row": 0, "block": 128, "mx": 32, "tensor": 0}
LAYOUTS = {
    "row": ("row",),
    "block": ("column", "column_tma", "row"),
    "mx": ("row", "swizzled"),
    "tensor": ("row",),
}
# The fields of NormSpec that are dtypes of tensors: `dtype` is that of x, and each other field has
# the name of its tensor's role.
TENSORS = ("dtype", "residual", "gate", "weight", "bias", "addend", "skip")
TENSORS += (*(port.role for port in BRANCH_PORTS), *MODULATION, *OF_KEY)
MAX_TERMS = 4  # of dy, that one backward pass adds up
# No table, no rule and no candidate of the tuner has blocks share a row of fewer elements.
SHARED_FROM = 8192


class Options(NamedTuple):
    """The fields of NormSpec that do not follow from the tensors: what the op norm_backward takes
    one by one, in this order, after its tensors.
    """

    hidden: int
    norm: str
    offset: float = 0.0
    gate_first: bool = False
    rounding: str = "late"
    activation: str = "silu"
    dropout_scale: float = 1.0


class Quantization(NamedTuple):
    """How normalised rows are quantised, and what is returned: see ops/passes/quantize.py."""

    scaling: str  # "row", "block", "mx" or "tensor"
    dtype: str = "float8_e4m3fn"  # of q
    power_of_2: bool = False  # the scales of rows and blocks are powers of two
    layout: str = "row"  # of the scales
    output: bool = False  # the normalised rows are returned too
    amax: bool = False  # the largest magnitude of the normalised rows is returned too

    @property
    def group(self) -> int:
        """The elements that share a scale, or 0 for a whole row or a whole tensor."""
        return GROUPS[self.scaling]

    def groups(self, hidden: int) -> int:
        """How many scales a row of `hidden` elements has."""
        if self.scaling == "tensor":
            return 0
        return hidden // self.group if self.group else 1

    @property
    def scale_dtype(self) -> str:
        """The dtype of the array of scales that the kernels write: powers of two are bytes."""
        return "uint8" if self.scaling == "mx" else "float32"

    @property
    def label(self) -> str:
        """The fields in words."""
        words = [f"{self.scaling} scales"] + ["powers of two"] * self.power_of_2
        words += [self.dtype, f"layout {self.layout}"]
        return " ".join(words + ["output"] * self.output + ["amax"] * self.amax)


class Rotation(NamedTuple):
    """How normalised heads are rotated by the angles of their tokens, which tables give."""

    dim: int  # how many elements of a head are rotated, the first ones; it is even
    head: int  # the elements of a head
    interleaved: bool = False  # elements 2 i and 2 i + 1 are a pair, else i and i + dim / 2
    table: str = "float32"  # the dtype of cos and sin
    full: bool = True  # tables have `dim` columns, one for each element, else one for each pair
    # The dtype of the tokens' rows in the tables; None where each token has a row of its own.
    positions: str | None = None
    heads_first: bool = False  # of an input (B, S, H, head), the output is (B, H, S, head)

    def aligned(self, item_bytes: int) -> bool:
        """Whether heads, and what is rotated of a head and of a table, are whole 16-byte vectors,
        also the halves that are read apart.
        """
        apart = self.dim if self.interleaved else self.dim // 2
        columns = self.dim if self.interleaved and self.full else self.dim // 2
        sizes = self.head * item_bytes, apart * item_bytes, columns * ITEM_BYTES[self.table]
        return not any(size % 16 for size in sizes)

    @property
    def label(self) -> str:
        """The fields in words."""
        pairs, columns = "in pairs" if self.interleaved else "by halves", self.dim
        columns = columns if self.full else columns // 2
        words = [f"{self.dim} of {self.head} elements rotated {pairs}"]
        words += [f"tables {self.table} of {columns}"]
        return ", ".join(words + [f"positions {self.positions}"] * bool(self.positions))


@dataclass(frozen=True)
class NormSpec:
    """One normalisation, independent of the number of rows and of the device.

    A field that is a dtype is None where the norm has no such tensor.
    """

    norm: str  # "rms" or "layer"
    hidden: int  # N, the elements of a row
    dtype: str  # of the input, and of the output unless another field has that
    weight: str | None = None  # a dtype
    bias: str | None = None  # a dtype
    offset: float = 0.0  # a constant added to the weight
    residual: str | None = None  # the dtype of it, and of the sum x + residual, which is normalised
    gate: str | None = None  # the dtype of z; act(z) multiplies the normalised rows
    gate_first: bool = False  # act(z) multiplies the rows before the norm
    # The number of heads H, or 0. Each head has its own N weights and biases, and row i of the
    # input belongs to head i mod H.
    heads: int = 0
    # "late" computes in float32 to the end; "early" rounds to the input's dtype before the weight
    # is applied.
    rounding: str = "late"
    activation: str = "silu"  # act(z) is z · σ(z) for "silu" and σ(z) for "sigmoid"
    addend: str | None = None  # the dtype of what is added before the residual, and of that sum
    # The dtype of what is added to normalised rows, and of the output. In the spec of a backward
    # pass, the dtype of dy, where it is not that of the input.
    skip: str | None = None
    dropout_mask: str | None = None  # "bool": x is multiplied by a mask before the sum
    layer_scale: str | None = None  # the dtype of the N factors of x before the sum
    dropout_scale: float = 1.0  # a factor beside the mask
    quantized: Quantization | None = None  # how the output is quantised
    inner: "NormSpec | None" = None  # the norm of x that is added to the residual in place of x
    # The dtypes of what modulates the normalised rows, with a row for each group of consecutive
    # rows: y is multiplied by 1 + scale, and shift is added.
    mod_scale: str | None = None
    mod_shift: str | None = None
    mod_gate: str | None = None  # a dtype; it multiplies x, by group, before the residual is added
    # How the normalised heads are rotated. x is then (tokens, H, head), and hidden is `head`, or
    # H · head where all heads of a token are normalised together.
    rotation: Rotation | None = None
    key: str | None = None  # the dtype of other heads of the same tokens, which are treated alike
    key_weight: str | None = None  # a dtype
    key_hidden: int = 0  # the elements of a key's token, where these are normalised together
    out_dtype: str | None = None  # the dtype of the output, where it is not that of the input

    @classmethod
    def of(cls, op: str, hidden: int, dtype: str, **fields) -> "NormSpec":
        """The spec of a function, given its name. A residual or gate has the input's dtype."""
        row = OPS[op]
        roles = [port.role for port in row.takes if port.needed]
        needed: dict = {role: dtype for role in roles if role in TENSORS}
        if row.quantized:
            needed["quantized"] = Quantization("row")
        if row.rotated:
            needed["rotation"] = Rotation(hidden, hidden)
        return cls(row.norm, hidden, dtype, **needed | fields)

    @classmethod
    def of_tensors(cls, options: Options, dtypes: dict[str, str | None], heads: int = 0, **fields):
        """The spec for options and tensors of these dtypes, by their roles.

        heads: how many rows of `hidden` elements weight and bias have.
        """
        named = {"dtype" if role == "x" else role: dtype for role, dtype in dtypes.items()}
        return cls(**options._asdict(), **named, heads=heads if heads > 1 else 0, **fields)

    @classmethod
    def chained(cls, before: "NormSpec", after: "NormSpec") -> "NormSpec":
        """The norm `after`, of what the norm `before` with its skip makes."""
        return replace(after, dtype=before.dtype, residual=before.skip, inner=before)

    @property
    def options(self) -> Options:
        return Options(*(getattr(self, name) for name in Options._fields))

    @property
    def dtypes(self) -> tuple[str | None, ...]:
        """The dtypes of the tensors, in the order of TENSORS; None for an absent tensor."""
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def y_dtype(self) -> str:
        """The dtype of the output, and of its gradient."""
        return self.out_dtype or self.skip or self.dtype

    @property
    def shares_dx(self) -> bool:
        """Whether the residual's gradient is that of x."""
        return self.residual == self.dtype and not self.branches and not self.mod_gate

    @property
    def branches(self) -> bool:
        """Whether x is masked or scaled before it is added to the residual."""
        return any(getattr(self, port.role) for port in BRANCH_PORTS)

    @property
    def modulated(self) -> bool:
        """Whether the normalised rows are scaled and shifted by group."""
        return self.mod_scale is not None

    @property
    def by_token(self) -> bool:
        """Whether all heads of a token are normalised together, before they are rotated."""
        return self.rotation is not None and self.hidden != self.rotation.head

    @property
    def rotated_norms(self) -> "tuple[NormSpec, ...]":
        """The norms of the input and of the key, without their rotation."""
        bare = {"rotation": None, "key": None, "key_weight": None, "key_hidden": 0}
        norm = replace(self, **bare)
        hidden = self.key_hidden or self.hidden
        of_key = replace(norm, hidden=hidden, weight=self.key_weight)
        return (norm, of_key) if self.key else (norm,)

    @property
    def autograd_saves(self) -> tuple[str, ...]:
        """The roles of the tensors that autograd saves: also x itself, of which, and not of the
        sum, the gradient of the layer scale is made.
        """
        return (*self.kernel_reads, "input") if self.layer_scale else self.kernel_reads

    @property
    def unserved(self) -> str | None:
        """Why no implementation has such a norm, or None. The ops' schemas allow no other ones."""
        third = self.addend and self.addend not in (self.dtype, self.residual)
        if third and ITEM_BYTES[self.addend] >= ITEM_BYTES[self.residual]:
            return "an addend of a third dtype has fewer bits than the residual"
        if self.branches and self.addend:
            return "a dropout mask and a layer scale take one residual"
        if self.layer_scale and DIGITS[self.residual] < DIGITS[self.dtype]:
            return "a layer scale takes a residual of at least as many digits as the input"
        if self.mod_gate and not self.residual:
            return "a gate by group needs a residual"
        if how := self.rotation:
            even = how.dim % 2 == 0 and 0 < how.dim <= how.head
            if not even or self.hidden % how.head:
                return "a rotation takes an even number of elements of a head"
        if (self.key or self.dtype) != self.dtype:
            return "a key has the input's dtype"
        return None

    def dtype_of(self, role: str) -> str | None:
        """The dtype of a tensor that is taken, by its role; None for an absent one, or a number."""
        if role.startswith("inner_"):
            return self.inner and getattr(self.inner, {"w": "weight", "b": "bias"}[role[6:]])
        if role in ("cos", "sin", "positions"):
            how = self.rotation
            return how and (how.positions if role == "positions" else how.table)
        if role == "given_scale":
            by_caller = self.quantized is not None and self.quantized.scaling == "tensor"
            return "float32" if by_caller else None
        return getattr(self, "dtype" if role == "x" else role, None)

    @cached_property
    def row(self) -> Op:
        """The row of the op that users call: of those with this norm that need none of the tensors
        that are absent, the first that takes most of the others. An op of a backward pass may have
        a mixture of tensors that no row takes.
        """
        if self.inner:
            chains = [row for row in OPS.values() if row.calls]
            return next(row for row in chains if row.calls[0].op == self.inner.op)
        roles = {role for role in TENSORS if role != "dtype" and getattr(self, role)} | {"x"}
        roles |= {COS.role, SIN.role} if self.rotation else set()
        kind = self.norm, self.quantized is not None
        rows = [
            row
            for row in OPS.values()
            if not row.calls
            and (row.norm, row.quantized) == kind
            and roles.issuperset(port.role for port in row.takes if port.needed)
        ]
        return max(rows, key=lambda row: len(roles.intersection(row.roles)))

    @property
    def op(self) -> str:
        """The name of the function that users call."""
        return self.row.name

    @property
    def backward(self) -> Op:
        """The row of the op of its backward pass."""
        return BACKWARD[self.row.backward]

    @property
    def derived(self) -> tuple[str, ...]:
        """The roles of the tensors that may have gradients, in the order of Needs.gradients."""
        return self.backward.derived

    @cached_property
    def kernel_reads(self) -> tuple[str, ...]:
        """The roles of the saved tensors that the backward pass reads. "x" is the sum if there is
        one, and "input" is x itself.
        """
        if self.rotation:
            roles = [name for name in ("weight", *OF_KEY) if getattr(self, name)]
            roles += ["rstd", "key_rstd"] if self.key else ["rstd"]
            return ("x", *roles, "cos", "sin", *["positions"] * bool(self.rotation.positions))
        roles = ["x", *(name for name in ("gate", "weight", "bias") if getattr(self, name))]
        roles += ["mean", "rstd"] if self.norm == "layer" else ["rstd"]
        roles += [
            name
            for name in ("dropout_mask", "layer_scale", "mod_scale", "mod_gate")
            if getattr(self, name)
        ]
        return (*roles, "input") if self.mod_gate else tuple(roles)

    @property
    def unquantized(self) -> "NormSpec":
        """The same norm, whose output is not quantised."""
        return replace(self, quantized=None) if self.quantized else self

    @property
    def uncast(self) -> "NormSpec":
        """The same norm, whose output is not quantised and has the input's dtype."""
        return replace(self.unquantized, out_dtype=None) if self.out_dtype else self.unquantized

    @property
    def differentiable(self) -> bool:
        """Whether there is an output that has a gradient."""
        return self.quantized is None or self.quantized.output

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def _row_bytes(self) -> tuple[int, ...]:
        """Bytes of an element of each tensor that has rows."""
        rows = self.dtype, self.residual, self.gate, self.addend, self.skip
        return tuple(ITEM_BYTES[dtype] for dtype in rows if dtype)

    @property
    def widest_item(self) -> int:
        """Bytes of an element of the widest tensor that has rows."""
        return max(self._row_bytes)

    @property
    def output_refused(self) -> str | None:
        """Why a backward pass cannot write y again with the bits of the forward pass, or None.

        It has the sum, mean and rstd. The forward pass subtracts the mean in two parts, of which it
        saves the sum, where an input has more than 16 bits or where blocks may share a row. Without
        a weight the compiler may fuse x · rstd + b in one kernel and not in another, because the
        backward pass uses x · rstd more than once.
        """
        layer = self.norm == "layer"
        wide, shared = layer and self.widest_item > 2, layer and self.hidden >= SHARED_FROM
        fused = self.bias and not self.weight and self.rounding == "late"
        reasons = {
            "a norm with a gate": self.gate,
            "a modulated norm": self.modulated,
            "a norm that is rotated": self.rotation,
            "a norm whose output has another dtype than its input": self.y_dtype != self.dtype,
            "a norm to whose output something is added": self.skip,
            "LayerNorm of an input or a sum of more than 16 bits": wide,
            f"LayerNorm of rows of {SHARED_FROM} elements or more": shared,
            "a norm with a bias and no weight": fused,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @cached_property
    def aligned(self) -> bool:
        """Whether a row is whole 16-byte vectors: then each row of a matrix starts at a vector.

        The output is left out: it is only written, and its dtype does not change how rows are read.
        """
        by_group = [ITEM_BYTES[dtype] for role in MODULATION if (dtype := getattr(self, role))]
        whole = all(self.hidden * size % 16 == 0 for size in (*self._row_bytes, *by_group))
        return whole and (self.rotation is None or self.rotation.aligned(self.item_bytes))

    @cached_property
    def takes_rows_apart(self) -> bool:
        """Whether rows are added up alike when they are apart in memory and when they are not.

        The compiler chooses the order by the distance of rows where a row is shorter than a vector
        of 16 bytes, or where the rows of only some tensors are whole vectors: rms_norm of 4
        bfloat16, and gated_rms_norm of 4 float32 with a bfloat16 gate (sm_90).
        """
        sizes = [self.hidden * item for item in (*self._row_bytes, ITEM_BYTES[self.y_dtype])]
        return min(sizes) >= 16 and (self.aligned or all(size % 16 for size in sizes))
