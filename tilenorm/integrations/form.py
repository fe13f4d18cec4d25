"""What a norm module's forward computes, as a value, and the same by tilenorm's functions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.functional import gated_rms_norm, layer_norm, rms_norm


@dataclass(frozen=True)
class Form:
    """A forward of one tensor, or of one and a gate.

    norm: "rms" or "layer". eps: the module's attribute that holds it, by name, or the value.
    shape: what is normalised together, or None for the last dimension. weight, bias: the names of
    the module's parameters. offset, rounding: as in tilenorm.rms_norm.

    promotes: what is rounded early, to the input's dtype, goes on in the one that it and the weight
    promote to, as PyTorch's product does; otherwise the output has the input's.
    autocasts: it follows torch.autocast as PyTorch's own functions do. gate: "after" or "before",
    where the norm is of the gate. arguments: the names of forward's; required: how many it needs.
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
    arguments: tuple[str, ...] = ("input",)
    required: int = 1

    def forward(self, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """What `module` gives for an input, and a gate, by tilenorm."""
        if kwargs or len(args) != self.required:
            args = self._bind(args, kwargs)
        if args[0].is_cuda and not self.autocasts and torch.is_autocast_enabled():
            with torch.autocast("cuda", enabled=False):
                return self.compute(module, *args)
        return self.compute(module, *args)

    def _bind(self, args: tuple, kwargs: dict) -> tuple:
        """All arguments by position."""
        rest = self.arguments[len(args) :]
        given = args + tuple(kwargs[name] for name in rest if name in kwargs)
        if not self.required <= len(given) <= len(self.arguments) or not kwargs.keys() <= {*rest}:
            takes, got = ", ".join(self.arguments), ", ".join(kwargs)
            raise TypeError(f"forward takes ({takes}), got {len(args)} by position and ({got})")
        return given

    def compute(
        self, module: nn.Module, x: Tensor, gate: Tensor | None = None, backend: str | None = None
    ) -> Tensor:
        """The same, whatever autocast says; backend: that of tilenorm's functions."""
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
            options["norm_before_gate"] = self.gate == "after"
            return gated_rms_norm(x, gate, shape, weight, eps, bias=bias, **options)
        if self.norm == "layer":
            return layer_norm(x, shape, weight, bias, eps, **options)
        return rms_norm(x, shape, weight, eps, bias=bias, **options)

    def epsilon(self, module: nn.Module) -> float | None:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def describe(self, module: nn.Module) -> str:
        """The function and its options, for people."""
        text = f"{'gated_' if self.gate else ''}{self.norm}_norm offset={self.offset}"
        text += f" rounding={self.rounding} eps={self.epsilon(module)}"
        if self.gate:
            text += f" norm_before_gate={self.gate == 'after'}"
        return text + (" in the dtype of input and weight" if self.promotes else "")
