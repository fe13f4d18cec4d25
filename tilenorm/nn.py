"""Modules with the signatures and state_dicts of torch.nn's norms, run by tilenorm.

A forward reads parameters in `_parameters`, because nn.Module.__getattr__ is a Python frame for
each of them: the host takes 3.2 µs up to the function in place of 5.7, with other code between the
calls (LayerNorm on a CPU). It asks for items, which DeepSpeed gathers then, and not by get(). A
derived class may give an attribute another meaning, and a parametrization takes a parameter out of
`_parameters`. Then it reads the attribute.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .ops.arguments import check_argument, check_option, sizes_of
from .ops.functional import layer_norm, modulated_layer_norm, modulated_rms_norm, rms_norm
from .ops.pytorch.errors import wrong


def refuse_script(module: nn.Module) -> None:
    """Raise NotImplementedError: torch.jit.script calls it, by the name __prepare_scriptable__."""
    raise NotImplementedError(
        f"{type(module).__name__}: torch.jit.script does not compile a norm of tilenorm: use"
        " torch.export or torch.jit.trace, or undo tilenorm.patch where it made this module"
    )


class _WithOptions(nn.Module):
    """What both norms do with the options that torch.nn's have not."""

    offset: float
    rounding: str
    out_dtype: torch.dtype | None = None  # modules that older versions have pickled have none

    def reset_parameters(self) -> None:
        """Set the weight to 1 - offset, and a bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        """torch.nn's text, and the options that have other values than by default."""
        text = f", offset={self.offset:g}" if self.offset else ""
        text += f", rounding={self.rounding!r}" if self.rounding != "late" else ""
        text += f", out_dtype={self.out_dtype}" if self.out_dtype is not None else ""
        return super().extra_repr() + text

    __prepare_scriptable__ = refuse_script


class RMSNorm(_WithOptions, nn.RMSNorm):
    """A replacement for torch.nn.RMSNorm that calls tilenorm.rms_norm.

    Args:
        normalized_shape: sizes of the trailing dimensions to normalise, or an int for one size.
        eps: added to the mean square; None means the machine epsilon of float32, as in torch.nn.
        elementwise_affine: whether the module has a weight, of shape normalized_shape.
        offset: added to the weight in the forward pass. Gemma's models use 1.0. The weight is
            initialised to 1 - offset, so that a new module computes a plain RMSNorm.
        rounding: "late" or "early" (see tilenorm.rms_norm).
        out_dtype: of the output; None is the input's (see tilenorm.rms_norm).

    state_dicts can be exchanged with torch.nn.RMSNorm.
    """

    def __init__(
        self,
        normalized_shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device=None,
        dtype=None,
        *,
        offset: float = 0.0,
        rounding: str = "late",
        out_dtype: torch.dtype | None = None,
    ):
        options = {"offset": offset, "rounding": rounding, "out_dtype": out_dtype}
        normalized_shape = _checked("RMSNorm", normalized_shape, dtype, options)
        self.offset, self.rounding, self.out_dtype = offset, rounding, out_dtype
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, of shape (..., *normalized_shape). The output has x's dtype or out_dtype."""
        if type(self) is RMSNorm and "weight" in self._parameters:
            weight = self._parameters["weight"]
        else:
            weight = self.weight
        return rms_norm(
            x,
            self.normalized_shape,
            weight,
            self.eps,
            offset=self.offset,
            rounding=self.rounding,
            out_dtype=self.out_dtype,
        )


class LayerNorm(_WithOptions, nn.LayerNorm):
    """A replacement for torch.nn.LayerNorm that calls tilenorm.layer_norm.

    Args: eps is added to the variance; bias: whether a module with a weight also has a bias. The
    others are those of RMSNorm. state_dicts can be exchanged with torch.nn.LayerNorm.
    """

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        offset: float = 0.0,
        rounding: str = "late",
        out_dtype: torch.dtype | None = None,
    ):
        options = {"offset": offset, "rounding": rounding, "out_dtype": out_dtype}
        normalized_shape = _checked("LayerNorm", normalized_shape, dtype, options)
        self.offset, self.rounding, self.out_dtype = offset, rounding, out_dtype
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise input, of shape (..., *normalized_shape). The output has its dtype or
        out_dtype.
        """
        parameters = self._parameters
        if type(self) is LayerNorm and "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.weight, self.bias
        return layer_norm(
            input,
            self.normalized_shape,
            weight,
            bias,
            self.eps,
            offset=self.offset,
            rounding=self.rounding,
            out_dtype=self.out_dtype,
        )


class _Modulated(nn.Module):
    """What both modulated norms do. _function: what they call."""

    _function: Callable

    def forward(
        self,
        input: Tensor,
        scale: Tensor,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of input, scaled and shifted; with a residual, that of residual + gate · input,
        and this sum.
        """
        parameters, bias = self._parameters, None
        if type(self) in (ModulatedRMSNorm, ModulatedLayerNorm) and "weight" in parameters:
            weight = parameters["weight"]
            if "bias" in parameters:
                bias = parameters["bias"]
        else:
            weight, bias = self.weight, getattr(self, "bias", None)
        return self._function(
            input,
            self.normalized_shape,
            scale,
            shift,
            residual=residual,
            gate=gate,
            weight=weight,
            bias=bias,
            eps=self.eps,
        )

    __prepare_scriptable__ = refuse_script


class ModulatedRMSNorm(_Modulated, nn.RMSNorm):  # type: ignore[misc]
    """An RMSNorm whose output is scaled and shifted by group: see tilenorm.modulated_rms_norm.

    Args: those of RMSNorm. Diffusion transformers have no weight. state_dicts can be exchanged with
    torch.nn.RMSNorm.
    """

    _function = staticmethod(modulated_rms_norm)

    def __init__(
        self,
        normalized_shape,
        eps: float | None = 1e-6,
        elementwise_affine: bool = False,
        device=None,
        dtype=None,
    ):
        normalized_shape = _checked("ModulatedRMSNorm", normalized_shape, dtype)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)


class ModulatedLayerNorm(_Modulated, nn.LayerNorm):  # type: ignore[misc]
    """A LayerNorm whose output is scaled and shifted by group: see tilenorm.modulated_layer_norm.

    Args: those of LayerNorm. Diffusion transformers have no weight. state_dicts can be exchanged
    with torch.nn.LayerNorm.
    """

    _function = staticmethod(modulated_layer_norm)

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
    ):
        normalized_shape = _checked("ModulatedLayerNorm", normalized_shape, dtype)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)


def _checked(name: str, shape, dtype, options: dict | None = None) -> tuple[int, ...]:
    """The sizes of what a module is made with, which is checked. PyTorch's own messages name
    `device` and its values. options: those that torch.nn's have not.
    """
    sizes = sizes_of(name, shape)
    right = dtype is None or isinstance(dtype, torch.dtype)
    check_argument(name, "dtype", dtype, right, "a torch.dtype or None")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise wrong(name, "dtype", "a floating-point dtype", dtype)
    for option, value in (options or {}).items():
        check_option(name, option, value)
    return sizes
