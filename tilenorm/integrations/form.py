"""Form: a description of what a norm module's forward computes, and how tilenorm computes it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.functional import (
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)


@dataclass(frozen=True)
class Form:
    """What the forward of a norm module computes from its input, and from a gate if it takes one.

    Attributes:
        norm: "rms" or "layer".
        eps: the name of the module's attribute that holds eps, or the value of eps.
        shape: the sizes of the trailing dimensions that are normalised together; None means the
            last dimension, of any size.
        weight, bias: names of the module's parameters, or None.
        offset, rounding: as in tilenorm.rms_norm.
        promotes: whether the output has the dtype to which input and weight promote. The
            normalised row is then rounded to the input's dtype before it is multiplied by the
            weight. If False, the output has the input's dtype.
        autocasts: whether the forward follows torch.autocast as PyTorch's own norms do.
        gate: "after" if act(gate) multiplies the normalised row, "before" if it multiplies the
            input of the norm, None if there is no gate.
        activation: act, as in tilenorm.gated_rms_norm.
        arguments: the names of forward's arguments.
        required: how many of forward's arguments have no default.
    """

    norm: str
    eps: str | float | None
    shape: tuple[int, ...] | None
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    rounding: str = "late"
    promotes: bool = False
    autocasts: bool = False
    gate: str | None = None
    activation: str = "silu"
    arguments: tuple[str, ...] = ("input",)
    required: int = 1

    def forward(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The result of the module's forward, computed by tilenorm."""
        if kwargs or len(args) != self.required:
            args = self._bind(args, kwargs)
        if args[0].is_cuda and not self.autocasts and torch.is_autocast_enabled():
            with torch.autocast("cuda", enabled=False):
                return self.compute(module, *args)
        return self.compute(module, *args)

    def add(self, module: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """a + b and the module's output for it, in one pass; None if one pass gives others.

        a, b: of one shape, dtype and device.
        """
        weight = getattr(module, self.weight) if self.weight else None
        bias = getattr(module, self.bias) if self.bias else None
        if self.gate or (self.promotes and weight is not None and weight.dtype != a.dtype):
            return None
        if a.is_cuda and torch.is_autocast_enabled():
            if self.autocasts:  # the norm casts the sum to float32, and the sum stays as it is
                return None
            with torch.autocast("cuda", enabled=False):
                return self._add(a, b, weight, bias, self.epsilon(module))
        return self._add(a, b, weight, bias, self.epsilon(module))

    def _add(self, a, b, weight, bias, eps) -> tuple[Tensor, Tensor]:
        shape = a.shape[-1:] if self.shape is None else self.shape
        options = {"offset": self.offset, "rounding": self.rounding}
        if self.norm == "layer":
            y, total = add_layer_norm(a, b, shape, weight, bias, eps, **options)
        else:
            y, total = add_rms_norm(a, b, shape, weight, eps, bias=bias, **options)
        return total, y

    def _bind(self, args: tuple, kwargs: dict) -> tuple:
        """Turn keyword arguments into positional ones; raise TypeError if they do not fit."""
        rest = self.arguments[len(args) :]
        given = args + tuple(kwargs[name] for name in rest if name in kwargs)
        if not self.required <= len(given) <= len(self.arguments) or not kwargs.keys() <= {*rest}:
            takes, got = ", ".join(self.arguments), ", ".join(kwargs)
            raise TypeError(
                f"forward takes ({takes}), got {len(args)} positional arguments and ({got})"
            )
        return given

    def compute(
        self,
        module: nn.Module,
        x: Tensor,
        gate: Tensor | None = None,
        *,
        backend: str | None = None,
    ) -> Tensor:
        """Like forward, but without regard to autocast. backend: as in tilenorm.rms_norm."""
        weight = getattr(module, self.weight) if self.weight else None
        bias = getattr(module, self.bias) if self.bias else None
        eps = self.epsilon(module)
        promotes = self.promotes and weight is not None
        if promotes and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
            y = self._normalize(x, gate, None, None, eps, backend)
            y = y * (weight + self.offset if self.offset else weight)
            return y if bias is None else y + bias
        return self._normalize(x, gate, weight, bias, eps, backend)

    def _normalize(self, x, gate, weight, bias, eps, backend) -> Tensor:
        shape = x.shape[-1:] if self.shape is None else self.shape
        options = {"offset": self.offset, "rounding": self.rounding, "backend": backend}
        if gate is not None:
            options |= {"norm_before_gate": self.gate == "after", "activation": self.activation}
            if self.norm == "layer":
                return gated_layer_norm(x, gate, shape, weight, bias, eps, **options)
            return gated_rms_norm(x, gate, shape, weight, eps, bias=bias, **options)
        if self.norm == "layer":
            return layer_norm(x, shape, weight, bias, eps, **options)
        return rms_norm(x, shape, weight, eps, bias=bias, **options)

    def epsilon(self, module: nn.Module) -> float | None:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def describe(self, module: nn.Module) -> str:
        """A readable line: the tilenorm function and its options."""
        text = f"{'gated_' if self.gate else ''}{self.norm}_norm offset={self.offset}"
        text += f" rounding={self.rounding} eps={self.epsilon(module)}"
        if self.gate:
            text += f" norm_before_gate={self.gate == 'after'} activation={self.activation}"
        return text + (" output_dtype=promote_types(input, weight)" if self.promotes else "")
