"""What a row of the table of ops is: ports, options and stages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

# The tensors whose gradients every backward pass may make, in the order of Needs.gradients.
DERIVED = "x", "residual", "gate", "weight", "bias"


@dataclass(frozen=True)
class Port:
    """A tensor of an op."""

    name: str
    dims: str = "... n"  # its dimensions, in the notation of ops/passes/dims.py
    role: str = ""  # its name in a norm: the array of the kernels, the field of NormSpec
    needed: bool = False  # every call has it
    cast: bool = False  # autocast casts it, as it casts the input of a norm
    shown: str = ""  # the argument of the public function, where it has another name
    # The dtype. Of a number for each row: float64 where a port of these names, separated by spaces,
    # is float64, else float32. Of another result: that of a port, the option of that name (where it
    # is None, that of the input), "scale" of a quantised norm, or a dtype's name. Of a tensor that
    # is taken: that of a port, or one of these names of dtypes. Without it such a tensor may have
    # any of the dtypes that norms take.
    like: str = ""
    same: str = ""  # the port whose shape it has, if the call has that port
    of: str = "input"  # the port whose rows they are
    when: str = ""  # of a result: the option without which it is absent, or "save"
    unless: str = ""  # of a result: the port that stands in its place, if a call has that port
    given: str = ""  # of a result: the port without which it is absent
    indexed: str = ""  # the dimensions in a call with positions
    swapped: str = ""  # the option with which heads come before tokens
    grad: bool = True  # it has a gradient

    @property
    def argument(self) -> str:
        """The name of the public function's argument."""
        return self.shown or self.name

    @property
    def number(self) -> bool:
        """Whether it is a number for each row, which users do not get."""
        return self.dims == "..."

    @property
    def parameter(self) -> bool:
        """Whether it has no rows: all of them share it, or those of one head."""
        return self.dims in ("n", "[h] n")

    @property
    def adds(self) -> bool:
        """Whether it adds up over the dimensions of the input that it lacks."""
        return self.dims.startswith("+")


class Option(NamedTuple):
    """An argument that is no tensor."""

    kind: str  # its type in a schema
    default: object = None  # of the public function
    words: tuple[str, ...] = ()  # the values of a str


class Stage(NamedTuple):
    """One norm of an op."""

    op: str  # the name of the op that does it alone
    ports: dict[str, str]  # for each role of that op, the name of the port of the whole


@dataclass(frozen=True)
class Op:
    """A row of the table: an op that users call, or an internal one.

    Internal ops are those of backward passes. Their results have the roles of the tensors that they
    are the gradients of.
    """

    name: str
    norm: str  # "rms" or "layer"; "" for an internal op, which takes it as an option
    takes: tuple[Port, ...]  # in the order of a call
    makes: tuple[Port, ...]  # what users get comes first
    # The names of OPTIONS in the order of a call. Those of an internal op are all of its arguments
    # behind the tensors, and among them may be names of tensors.
    options: tuple[str, ...] = ()
    calls: tuple[Stage, ...] = ()  # the stages of an op that stands for several calls
    backward: str = "norm_backward"  # the op of its backward pass
    takes_late: tuple[Port, ...] = ()  # the tensors among the options, which are absent by default

    def __post_init__(self):
        """Makes what its cached properties hold, but for those of a backward pass alone.

        torch.compile guards on the attributes that an object has. A property that is first read
        while it traces a call adds one, and torch.compile then refuses this call.
        """
        for name in ("roles", "made", "tensors", "arguments", "of_rows"):
            getattr(self, name)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The norms that the op is made of, in the order in which they run."""
        ports = {port.role: port.name for port in (*self.takes, *self.makes)}
        return self.calls or (Stage(self.name, ports),)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles of the tensors that are taken."""
        return tuple(port.role for port in self.takes)

    @cached_property
    def made(self) -> tuple[str, ...]:
        """The roles of the tensors that are made."""
        return tuple(port.role for port in self.makes)

    @cached_property
    def tensors(self) -> tuple[Port, ...]:
        """Every tensor that is taken."""
        return (*self.takes, *self.takes_late)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments, in their order."""
        names = [port.name for port in self.takes]
        if not self.norm:
            return (*names, *self.options)
        return self.in_order(names, ("hidden", *self.options), self.eps, "save", "backend")

    def in_order(
        self, tensors: Iterable, options: Sequence, eps: Iterable, save: Any, backend: Any
    ) -> tuple:
        """The arguments of the op, in their order. options: `hidden`, and those of the options.

        An out_dtype is the last one, so that programs without it, of older versions, stay right.
        """
        end = len(options) - ("out_dtype" in self.options)
        return *tensors, *options[:end], *eps, save, backend, *options[end:]

    def named(self, values: Iterable) -> dict[str, Any]:
        """A value for each tensor that is taken, by the names of the ports."""
        return dict(zip([port.name for port in self.takes], values, strict=True))

    def named_options(self, values: Sequence) -> dict[str, Any]:
        """The value of each option by its name. values: `hidden`, and those of the options."""
        return dict(zip(self.options, values[1:], strict=True))

    def by_role(self, values: Iterable) -> dict[str, Any]:
        """A value for each tensor that is taken, by the roles of the ports."""
        return dict(zip(self.roles, values, strict=True))

    @property
    def shown(self) -> int:
        """How many of the tensors that are made the user gets."""
        return sum(not port.number for port in self.makes)

    @cached_property
    def of_rows(self) -> bool:
        """Whether each tensor has rows, or all rows share it: then they may be any rows of another
        tensor.
        """
        words = {word for port in (*self.takes, *self.makes) for word in port.dims.split()}
        return words <= {"...", "n", "[h]"}

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

    @property
    def masked(self) -> tuple[str, ...]:
        """Of a backward pass, the roles of the tensors whose gradients output_mask asks for."""
        return tuple(role for role in self.made if role != "y")

    @cached_property
    def derived(self) -> tuple[str, ...]:
        """Of a backward pass, the roles of the tensors that may have gradients, in the order of
        Needs.gradients.
        """
        return (*DERIVED, *(role for role in self.masked if role not in DERIVED))

    @cached_property
    def gradient_index(self) -> tuple[int, ...]:
        """Of a backward pass, the index of each result in Needs.gradients, behind which y comes."""
        return tuple(map([*self.derived, "y"].index, self.made))
