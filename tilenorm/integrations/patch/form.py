"""Form: a description of what a norm module's forward computes, and how tilenorm computes it."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import functional
from ...ops.passes.dims import leading_groups
from ...ops.passes.registry import MODULATED_ROW
from ...ops.pytorch.torch_private import is_its_forward

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]  # input, gate, parameters


@dataclass(frozen=True)
class Form:
    """What the forward of a norm module computes from its input, and from a gate if it takes one,
    in the calls of the kinds that recognition compared. The forward of the module's own class
    serves all others, and raises what it raised before.

    Attributes:
        norm: "rms" or "layer".
        eps: the name of the module's attribute that holds eps, or the value of eps.
        dims: how many trailing dimensions are normalised together.
        sizes: the sizes in which every input ends; None where the parameters' shape says so, or
            where rows of every size are served.
        groups: how many groups of columns are normalised by themselves; 0 if the row is one.
        weight, bias: names of the module's parameters, or None.
        offset, rounding, activation: as in tilenorm.rms_norm and gated_rms_norm.
        rounds_offset: whether weight + offset is rounded to the weight's dtype, as a tensor is.
        promotes: whether the normalised row is rounded to the input's dtype, and then multiplied by
            the weight in the dtype to which both promote. If not, the output has the input's dtype.
        autocasts: whether the forward follows torch.autocast as PyTorch's own norms do.
        gate: "after" if the gate multiplies the normalised row, "before" if it multiplies the input
            of the norm, None if there is no gate.
        arguments: the names of the arguments that are the input and the gate.
        calls: the served numbers of tensors (2 with a gate), each with a served number of the
            input's dimensions.
        beyond: the numbers of tensors with which inputs of more dimensions are served too.
        own_from: from how many dimensions on the module's forward computes something else.
        dtypes: the served dtypes.
        mixed: whether the module takes an input and parameters of two dtypes that are not served.
    """

    norm: str
    eps: str | float | None
    dims: int = 1
    sizes: tuple[int, ...] | None = None
    groups: int = 0
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    rounding: str = "late"
    rounds_offset: bool = False
    promotes: bool = False
    autocasts: bool = False
    gate: str | None = None
    activation: str = "silu"
    arguments: tuple[str, ...] = ("input",)
    calls: tuple[tuple[int, int], ...] = ()
    beyond: tuple[int, ...] = ()
    own_from: int | None = None
    dtypes: tuple[Dtypes, ...] = ()
    mixed: bool = False
    # None, or, where dimension 1 is normalised, as the channels of images are, whose strides the
    # output has: "input" for the input's, "last" for those of channels that are last in memory.
    channels: str | None = None

    def forward(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The result of the module's forward, computed by tilenorm where it serves the call."""
        tensors = self._tensors(args, kwargs) if kwargs or len(args) != 1 else args
        if self.channels:
            tensors = tuple(map(_channels_last, tensors))
        served = self.served(module, *tensors)
        if served is None:
            former: Any = module._tilenorm_class
            return former.forward(module, *args, **kwargs)
        y = self._compute(module, *served)
        return self._channels_first(y, served[0]) if self.channels else y

    def _channels_first(self, y: Tensor, x: Tensor) -> Tensor:
        """An output as the module lays it out.

        Channels that are last in memory are read and written in place. Others are copied once
        before the norm, as PyTorch's norm does, and once behind it if the strides are the input's.
        These are six passes over memory. A forward that is written out with the mean of dimension 1
        takes fourteen. So no layout is left to the module's own forward.
        """
        y = y.movedim(-1, 1)
        return (
            y.contiguous() if self.channels == "input" and x.movedim(-1, 1).is_contiguous() else y
        )

    def _tensors(self, args: tuple, kwargs: dict) -> tuple:
        """The input, and the gate if there is one; () for any other call."""
        names = self.arguments[len(args) : len(args) + len(kwargs)]
        if len(args) > len(self.arguments) or kwargs.keys() != {*names}:
            return ()
        return args + tuple(kwargs[name] for name in names)

    def served(self, module: nn.Module, x: object = None, gate: object = None) -> tuple | None:
        """The input, gate, weight and bias of a call whose kind recognition compared, or None."""
        if not isinstance(x, Tensor) or not self.takes(1 if gate is None else 2, x.dim()):
            return None
        if gate is not None and not (isinstance(gate, Tensor) and gate.shape == x.shape):
            return None
        weight, bias = self._parameters(module)
        if self.weight and self.bias and not are_alike(weight, bias):
            return None
        parameter = bias if weight is None else weight
        if parameter is None and (self.weight or self.bias):
            return None
        sizes = (self.sizes or ()) if parameter is None else parameter.shape
        if x.shape[x.dim() - len(sizes) :] != sizes:
            return None
        others = (
            None if gate is None else gate.dtype,
            None if parameter is None else parameter.dtype,
        )
        # CUDA's autocast casts the input of PyTorch's norms to float32.
        if (x.dtype, *others) not in self.dtypes and not (
            self.autocasts
            and x.is_cuda
            and torch.is_autocast_enabled()
            and (torch.float32, *others) in self.dtypes
        ):
            return None
        return x, gate, weight, bias

    def takes(self, number: int, dims: int) -> bool:
        """Whether calls with so many tensors and dimensions of the input are served."""
        any_number = number in self.beyond and dims > max(self.dims_of(number))
        return any_number or (number, dims) in self.calls

    def dims_of(self, number: int) -> list[int]:
        """The served numbers of dimensions that are in `calls`."""
        return sorted(dims for called, dims in self.calls if called == number)

    def widens(self, x: Tensor, weight: Tensor | None) -> bool:
        """Whether the output has another dtype than the input, because of the weight's."""
        return self.promotes and weight is not None and widens(x, weight)

    def _parameters(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        weight = getattr(module, self.weight) if self.weight else None
        return weight, getattr(module, self.bias) if self.bias else None

    def one_pass(
        self, module: nn.Module, terms: tuple[Tensor, ...], by_group: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """x, or x + residual, and the module's output for it, times 1 + scale, plus shift; None if
        one pass gives other shapes or dtypes. terms: x, and the residual if there is one. by_group:
        the scale, and the shift if there is one; or none of both.
        """
        x, alone = terms[0], len(terms) == 1
        if self.groups or self.channels or not (by_group if alone else are_alike(*terms)):
            return None
        served = self.served(module, x)
        if served is None or self.widens(x, served[2]):
            return None
        _, _, weight, bias = served
        # Under autocast, a norm that follows it casts the sum to float32, and the sum stays as it
        # is. A modulation is left as it is.
        if (self.autocasts or by_group) and x.is_cuda and torch.is_autocast_enabled():
            return None
        if not by_group:
            return self._norm(module, "add_", terms, weight, bias)[::-1]
        if self.offset or self.gate or not self._lie_by_group(x, by_group[0], by_group[-1]):
            return None
        function, shape = getattr(functional, f"modulated_{self.norm}_norm"), x.shape[-self.dims :]
        options = {"weight": weight, "bias": bias, "eps": self.epsilon(module)}
        if alone:
            return x, function(x, shape, *by_group, **options)
        return function(x, shape, *by_group, residual=terms[1], **options)[::-1]

    def _lie_by_group(self, x: Tensor, scale: Tensor, shift: Tensor) -> bool:
        """Whether PyTorch repeats scale and shift along x as tilenorm repeats their rows, and gives
        the dtype of x.
        """
        if not all(isinstance(t, Tensor) and t.device == x.device for t in (scale, shift)):
            return False
        if widens(x, scale) or widens(x, shift):
            return False
        rows, groups = x.shape[: -self.dims], leading_groups(scale.shape, self.dims)
        repeated = scale.dim() in (self.dims, x.dim()) and groups == rows[: len(groups)]
        alike = scale.shape == shift.shape and scale.shape[-self.dims :] == x.shape[-self.dims :]
        return repeated and alike and x.shape[-self.dims :].numel() <= MODULATED_ROW

    def compute(
        self, module: nn.Module, x: Tensor, gate: Tensor | None = None, *, backend: str
    ) -> Tensor:
        """Like forward of a served call. backend: as in tilenorm.rms_norm."""
        return self._compute(module, x, gate, *self._parameters(module), backend)

    def _compute(self, module: nn.Module, x, gate, weight, bias, backend=None) -> Tensor:
        apart = self.widens(x, weight)
        parameters = (None, None) if apart else (weight, bias)
        if self.groups:  # each group is a head
            x, gate, *parameters = (
                t if t is None else t.unflatten(-1, (self.groups, -1))
                for t in (x, gate, *parameters)
            )
        if gate is None:
            y = self._norm(module, "", (x,), *parameters, backend=backend)
        else:
            options = {"norm_before_gate": self.gate == "after", "activation": self.activation}
            y = self._norm(module, "gated_", (x, gate), *parameters, backend=backend, **options)
        y = y.flatten(-2) if self.groups else y
        if apart:
            y = y * (weight + self.offset if self.offset else weight)
            y = y if bias is None else y + bias
        return y

    def _norm(self, module: nn.Module, kind: str, tensors: tuple, weight, bias, **options):
        """What the function of tilenorm returns whose name begins so."""
        weight, offset = self.scale(weight)
        off = not self.autocasts and tensors[0].is_cuda and torch.is_autocast_enabled()
        with torch.autocast("cuda", enabled=False) if off else nullcontext():
            return getattr(functional, f"{kind}{self.norm}_norm")(
                *tensors,
                tensors[0].shape[-self.dims :],
                weight=weight,
                bias=bias,
                eps=self.epsilon(module),
                offset=offset,
                rounding=self.rounding,
                **options,
            )

    def scale(self, weight: Tensor | None) -> tuple[Any, float]:
        """The weight and the offset for tilenorm's function."""
        if self.rounds_offset and weight is not None:
            return weight + self.offset, 0.0
        return weight, self.offset

    def epsilon(self, module: nn.Module) -> float | None:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def describe(self, module: nn.Module) -> str:
        """A readable line: the tilenorm function and its options."""
        text = f"{'gated_' if self.gate else ''}{self.norm}_norm offset={self.offset}"
        text += " (rounded to the weight's dtype)" if self.rounds_offset else ""
        text += f" rounding={self.rounding} eps={self.epsilon(module)}"
        if self.channels:
            text += " over the channels, which are dimension 1"
        if self.groups:
            text += f" groups={self.groups}"
        if self.gate:
            text += f" norm_before_gate={self.gate == 'after'} activation={self.activation}"
        if self.promotes:
            text += " output_dtype=promote_types(input, weight)"
        has_16_bits = any({*dtypes} - {None} == {torch.bfloat16} for dtypes in self.dtypes)
        exceptions = [] if has_16_bits or not self.dtypes else ["16 bits"]
        exceptions += ["mixed dtypes"] if self.mixed and has_16_bits else []
        exceptions += [f"inputs of {self.own_from} or more dimensions"] if self.own_from else []
        return text + (f", or its own forward for {' and '.join(exceptions)}" if exceptions else "")


def _channels_last(x: object) -> object:
    return x.movedim(1, -1) if isinstance(x, Tensor) and x.dim() > 1 else x


def are_alike(a: Tensor | None, b: Tensor | None) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def widens(x: Tensor, other: Tensor) -> bool:
    """Whether the product of two tensors has another dtype than the first."""
    return promotes(x.dtype, other.dtype)


def promotes(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether PyTorch computes with both dtypes in another one than the first."""
    return torch.promote_types(dtype, other) != dtype


def form_of(module: nn.Module) -> Form | None:
    """The form of a patched module that runs its own forward alone: without hooks, say."""
    form = getattr(type(module), "_tilenorm_form", None)  # peft's wrappers pass attributes on
    return form if form is not None and is_its_forward(module) else None
