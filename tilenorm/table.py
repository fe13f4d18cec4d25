"""Every op as one row: the tensors that it takes and makes, its options, and what it is made of.

From a row follow the op's schema, fake, implementations, derivative, autocast and sharding rules,
the checks of a call and their messages, and which array of the kernels each tensor is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Port:
    """A tensor of an op.

    lies: "rows" has the input's shape; "mask" has it too, of torch.bool; "affine" has the shape
    normalized_shape, or (H, *normalized_shape) by heads; "vector" has normalized_shape alone;
    "group" has a row for each group of consecutive rows: leading sizes of the input, of which the
    last may be a divisor, and then normalized_shape; "scalar" is one number; "key" has the input's
    shape but for the number of heads; "table" has a row for each token, and "tokens" a number, or
    what broadcasts to that. Of what is made also: "heads" has the input's or the key's shape, or
    that with heads before tokens; "number" has one number a row; "scales" one a group of elements;
    "one" is (1,).
    role: the tensor's name in a norm: the array of the kernels, and of a tensor that is taken the
    field of NormSpec that holds its dtype.
    needed: every call has it. cast: autocast casts it, as it casts the input of a norm.
    shown: the argument of the public function, where it has another name.
    like: of what is made, the dtype: that of a port; or, for "number", float64 where a port of
    these, separated by spaces, is float64, else float32; or "dtype" and "scale" of a quantised
    norm; or a dtype's name. The rows are those of the first port, where one is named.
    when: of what is made, the option without which it is absent, or "save". unless: the port that
    stands in its place, if a call has that port. given: the port without which it is absent.
    grad: whether it has a gradient.
    """

    name: str
    lies: str = "rows"
    role: str = ""
    needed: bool = False
    cast: bool = False
    shown: str = ""
    like: str = ""
    when: str = ""
    unless: str = ""
    given: str = ""
    grad: bool = True

    @property
    def argument(self) -> str:
        """The name of the public function's argument."""
        return self.shown or self.name


class Option(NamedTuple):
    """An option of a public function. kind: its type in a schema. words: the values of a str."""

    kind: str
    default: object = None
    words: tuple[str, ...] = ()


class Stage(NamedTuple):
    """One norm of an op. op: the name of the op that does it alone. ports: the port of the whole
    for each role of that op.
    """

    op: str
    ports: dict[str, str]


@dataclass(frozen=True)
class Op:
    """A row of the table.

    norm: "rms" or "layer". takes, makes: in the order of a call's tensors; what users get comes
    first in makes. options: names of OPTIONS, in the order of a call. calls: of an op that stands
    for several calls, the stages; no other op has any.
    """

    name: str
    norm: str
    takes: tuple[Port, ...]
    makes: tuple[Port, ...]
    options: tuple[str, ...] = ("offset", "rounding")
    calls: tuple[Stage, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The norms that the op is made of, in the order in which they run."""
        ports = {port.role: port.name for port in (*self.takes, *self.makes)}
        return self.calls or (Stage(self.name, ports),)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the tensors that are taken."""
        return tuple(port.role for port in self.takes)

    @property
    def made(self) -> tuple[str, ...]:
        """The roles of the tensors that are made."""
        return tuple(port.role for port in self.makes)

    @property
    def tensors(self) -> tuple[Port, ...]:
        """Every tensor that is taken."""
        return self.takes

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments, in their order."""
        names = [port.name for port in self.takes]
        return (*names, "hidden", *self.options, *self.eps, "save", "backend")

    def named(self, values: Iterable) -> dict[str, Any]:
        """A value for each tensor that is taken, by the names of the ports."""
        return dict(zip([port.name for port in self.takes], values, strict=True))

    @property
    def shown(self) -> int:
        """How many of the tensors that are made the user gets."""
        return sum(port.lies != "number" for port in self.makes)

    @property
    def quantized(self) -> bool:
        return "scaling" in self.options

    @property
    def rotated(self) -> bool:
        return "rotary_dim" in self.options

    @property
    def eps(self) -> tuple[str, ...]:
        """The names of the eps of its stages, in a schema."""
        return ("eps", "next_eps")[: len(self.stages)]


OPTIONS = {
    "offset": Option("float", 0.0),
    "rounding": Option("str", "late", ("late", "early")),
    "dropout_scale": Option("float", 1.0),
    "norm_before_gate": Option("bool", True),
    "activation": Option("str", "silu", ("silu", "sigmoid")),
    "scaling": Option("str", None, ("row", "block", "mx", "tensor")),
    "dtype": Option("ScalarType"),
    "power_of_2": Option("bool", False),
    "layout": Option("str"),
    "return_output": Option("bool", False),
    "return_amax": Option("bool", False),
    "rotary_dim": Option("SymInt"),
    "interleaved": Option("bool", False),
    "heads_first": Option("bool", False),
    "output_heads_first": Option("bool", False),
}
QUANTIZATION = ("scaling", "dtype", "power_of_2", "layout", "return_output", "return_amax")
ROTATION = ("rotary_dim", "interleaved", "output_heads_first")

X = Port("input", role="x", needed=True, cast=True)
RESIDUAL = Port("residual", role="residual", needed=True)
ADDEND = Port("addend", role="addend", shown="residual[0]")
DROPOUT_MASK = Port("dropout_mask", "mask", role="dropout_mask", grad=False)
LAYER_SCALE = Port("layer_scale", "vector", role="layer_scale")
SKIP = Port("residual", role="skip", needed=True, cast=True)
GATE = Port("gate", role="gate", needed=True)
WEIGHT = Port("weight", "affine", role="weight")
BIAS = Port("bias", "affine", role="bias")
MOD_SCALE = Port("scale", "group", role="mod_scale", needed=True)
MOD_SHIFT = Port("shift", "group", role="mod_shift")
MOD_GATE = Port("gate", "group", role="mod_gate")
KEY = Port("key", "key", role="key", cast=True)
KEY_WEIGHT = Port("key_weight", "affine", role="key_weight")
COS = Port("cos", "table", role="cos", needed=True, grad=False)
SIN = replace(COS, name="sin", role="sin")
POSITIONS = Port("positions", "tokens", role="positions", grad=False)
GIVEN = Port("given_scale", "scalar", role="given_scale", shown="scale", grad=False)

Y = Port("output", role="y", like="input")
SUM = Port("residual_out", role="sum", like="residual")
MEAN = Port("mean", "number", role="mean", like="input", when="save", grad=False)
RSTD = replace(MEAN, name="rstd", role="rstd")
Q = Port("q", role="q", like="dtype", grad=False)
SCALE = Port("scale", "scales", role="scale", like="scale", unless="given_scale", grad=False)
AMAX = Port("amax", "one", role="amax", like="float32", when="return_amax", grad=False)
NUMBERS = {"rms": (RSTD,), "layer": (MEAN, RSTD)}
QUANTIZED = (Q, SCALE, AMAX, replace(Y, when="return_output"))


def _ops_of(norm: str) -> tuple[Op, ...]:
    """The ops of one norm. Modulated rows may be those of a sum with the residual."""
    name, affine, plain = f"{norm}_norm", (WEIGHT, BIAS), ("offset", "rounding")
    numbers = NUMBERS[norm]
    of_sum = tuple(replace(port, like="input residual") for port in numbers)
    branch, quantized = (ADDEND, DROPOUT_MASK, LAYER_SCALE), (*plain, *QUANTIZATION)
    gated = (*plain, "norm_before_gate", "activation")
    added = (*plain, "dropout_scale")
    after, total = replace(Y, like="residual"), replace(SUM, given="residual")
    summed = (X, RESIDUAL, *affine, ADDEND, GIVEN)
    by_group = (MOD_SCALE, MOD_SHIFT, *affine, replace(RESIDUAL, needed=False), MOD_GATE)
    return (
        Op(name, norm, (X, *affine), (Y, *numbers), plain),
        Op(f"add_{name}", norm, (X, RESIDUAL, *affine, *branch), (Y, SUM, *of_sum), added),
        Op(f"gated_{name}", norm, (X, GATE, *affine), (Y, *numbers), gated),
        Op(f"{name}_add", norm, (X, SKIP, *affine), (after, *numbers), plain),
        Op(f"{name}_quantized", norm, (X, *affine, GIVEN), (*QUANTIZED, *numbers), quantized),
        Op(f"add_{name}_quantized", norm, summed, (*QUANTIZED, SUM, *of_sum), quantized),
        Op(f"modulated_{name}", norm, (X, *by_group), (Y, total, *of_sum), ()),
    )


def _rotated() -> Op:
    """RMSNorm of the heads of queries, and of keys, and the rotation of each head."""
    of_key, turned = {"given": "key", "like": "key"}, replace(Y, lies="heads")
    return Op(
        "rms_norm_rope",
        "rms",
        (X, COS, SIN, WEIGHT, KEY, KEY_WEIGHT, POSITIONS),
        (
            turned,
            replace(turned, name="key_output", role="key_y", **of_key),
            RSTD,
            replace(RSTD, name="key_rstd", role="key_rstd", **of_key),
        ),
        (*ROTATION, "offset", "rounding"),
    )


def _chain_of(norm: str) -> Op:
    """A norm, the addition of the residual, and the norm of the sum. RMSNorm's have no biases.

    The second norm reads the sum that the first one writes. The kernels know the first as the inner
    norm.
    """
    name = f"{norm}_norm"
    affine, numbers = (WEIGHT, BIAS) if norm == "layer" else (WEIGHT,), NUMBERS[norm]
    inner = {"weight": "inner_w", "bias": "inner_b", "mean": "inner_mean", "rstd": "inner_rstd"}
    before = [replace(port, role=inner[port.role]) for port in (*affine, *numbers)]
    after = [replace(port, name=f"next_{port.name}") for port in (*affine, *numbers)]
    own = {port.role: port.name for port in (*affine, *numbers)}
    following = {port.role: port.name for port in after}
    end = len(affine)
    return Op(
        f"{name}_add_{name}",
        norm,
        (X, replace(SKIP, role="residual"), *before[:end], *after[:end]),
        (
            replace(Y, like="residual"),
            SUM,
            *before[end:],
            *(replace(port, like="residual") for port in after[end:]),
        ),
        calls=(
            Stage(f"{name}_add", {"x": "input", "skip": "residual", "y": "residual_out", **own}),
            Stage(name, {"x": "residual_out", "y": "output", **following}),
        ),
    )


_PAIRS = zip(_ops_of("rms"), _ops_of("layer"), strict=True)
_ROWS = (*chain.from_iterable(_PAIRS), _chain_of("rms"), _chain_of("layer"), _rotated())
OPS = {op.name: op for op in _ROWS}
# What multiplies the input before the residual is added, in this order. A mask has no gradient.
FACTORS = MASK, VECTOR = DROPOUT_MASK.role, LAYER_SCALE.role
# What lies by group, in the order in which gradients are returned.
MODULATION = MOD_SCALE.role, MOD_SHIFT.role, MOD_GATE.role
# The gradients of the key and of its weight, in the order in which they are returned.
OF_KEY = KEY.role, KEY_WEIGHT.role
# How the tensor of each role lies. A gate by group is saved with the input that it multiplied.
LIES = {port.role: port.lies for op in _ROWS for port in (*op.takes, *op.makes)}
LIES |= {"input": X.lies}
# The ops of one norm: of rows alone, with tensors by group, those whose output is rotated, and
# those whose output is quantised.
MODULATED_NORMS = tuple(op.name for op in _ROWS if op.roles[1:2] == MODULATION[:1])
ROTATED_NORMS = tuple(op.name for op in _ROWS if op.rotated)
NOT_OF_ROWS = MODULATED_NORMS + ROTATED_NORMS
NORMS = tuple(op.name for op in _ROWS if not (op.calls or op.quantized or op.name in NOT_OF_ROWS))
QUANTIZED_NORMS = tuple(op.name for op in _ROWS if op.quantized)


@dataclass(frozen=True)
class InternalOp:
    """An op that users do not call: of a backward pass.

    takes, makes: as those of Op. A result that is a gradient has the role of the tensor that it is
    the gradient of. options: the arguments behind the tensors, as in a schema. last: the tensors
    that are among these; they are absent by default.

    Its ports lie also as "derivative", of an affine tensor, and as "group derivative".
    """

    name: str
    takes: tuple[Port, ...]
    makes: tuple[Port, ...]
    options: str
    last: tuple[Port, ...] = ()

    @property
    def tensors(self) -> tuple[Port, ...]:
        """Every tensor that is taken."""
        return (*self.takes, *self.last)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments, in their order."""
        options = [option.partition("=")[0].split()[-1] for option in self.options.split(", ")]
        return (*(port.name for port in self.takes), *options)

    @property
    def masked(self) -> tuple[str, ...]:
        """Of a backward pass, the roles of the tensors whose gradients output_mask asks for."""
        return tuple(port.role for port in self.makes if port.role != "y")

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the results of a backward pass stand in Needs.gradients, behind which stands y."""
        made = [port.role for port in self.makes]
        order = (*DERIVED, *(role for role in made if role not in DERIVED))
        return tuple(map(order.index, made))


def _gradients(*ports: Port) -> tuple[Port, ...]:
    """The gradients of tensors, as results."""
    lies = {"affine": "derivative", "group": "group derivative", "key": "rows"}
    return tuple(
        Port(f"grad_{port.name}", lies.get(port.lies, port.lies), role=port.role) for port in ports
    )


# The tensors whose gradients every backward pass may make, in the order of Needs.gradients.
DERIVED = "x", "residual", "gate", "weight", "bias"
# The fields of spec.Options.
NORM = (
    "SymInt hidden, str norm, float offset, bool gate_first, str rounding, str activation,"
    " float dropout_scale"
)
BACKEND = "str? backend=None"
DY, DSUM = Port("grad_output", role="dy", needed=True), Port("grad_sum", role="dsum")
TERMS = tuple(Port(f"grad_output_{i}", role=f"grad_output_{i}") for i in (2, 3, 4))
_GATE, _AFFINE = replace(GATE, needed=False), (WEIGHT, BIAS)
_ROWS_GATE = replace(GATE, name="rows")  # where the name is a gate's by group
_STATISTICS = MEAN, replace(RSTD, needed=True)
_OF_KEY = KEY, KEY_WEIGHT
_DERIVED = _gradients(X, RESIDUAL, GATE, *_AFFINE)


def _last(ports: tuple[Port, ...]) -> str:
    """Tensors that are absent by default, as in a schema."""
    return ", ".join(f"Tensor? {port.name}=None" for port in ports)


_BACKWARD = (
    InternalOp(
        "norm_backward",
        (DY, DSUM, X, _GATE, *_AFFINE, *_STATISTICS),
        (*_DERIVED, replace(Y, like="")),
        f"{NORM}, float eps, bool added, bool[5] output_mask, {BACKEND}, {_last(TERMS)},"
        f" bool output=False, {_last((DROPOUT_MASK, LAYER_SCALE))}",
        last=(*TERMS, DROPOUT_MASK, LAYER_SCALE),
    ),
    InternalOp(
        "modulated_norm_backward",
        (DY, DSUM, X, Port("branch", role="input"), *_AFFINE, *_STATISTICS, MOD_SCALE, MOD_GATE),
        _gradients(X, RESIDUAL, _ROWS_GATE, *_AFFINE, MOD_SCALE, MOD_SHIFT, MOD_GATE),
        "SymInt hidden, str norm, str? shift, float eps, bool added, bool[8] output_mask,"
        f" {BACKEND}",
    ),
    InternalOp(
        "rms_norm_rope_backward",
        (
            replace(DY, lies="heads", needed=False),
            Port("grad_key_output", "heads", role="dsum"),
            *(X, WEIGHT, *_OF_KEY, _STATISTICS[1], Port("key_rstd", "number", role="key_rstd")),
            *(COS, SIN, POSITIONS),
        ),
        _gradients(X, WEIGHT, *_OF_KEY),
        "SymInt hidden, SymInt rotary_dim, bool interleaved, bool output_heads_first,"
        f" float offset, float eps, bool[4] output_mask, {BACKEND}",
    ),
)
BACKWARD = {op.name: op for op in _BACKWARD}
