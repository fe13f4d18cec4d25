"""RMSNorm and LayerNorm: modules with torch.nn's signatures and state_dicts, run by tilenorm; and
QuantizedNormLinear, a norm and the linear behind it in 8-bit floats.
"""

import torch
from torch import Tensor, nn

from .ops.arguments import check_option, sizes_of
from .ops.functional import layer_norm, rms_norm
from .ops.quantized.linear import check_sizes, norm_linear


class RMSNorm(nn.RMSNorm):
    """A replacement for torch.nn.RMSNorm that calls tilenorm.rms_norm.

    Args:
        normalized_shape: sizes of the trailing dimensions to normalise, or an int for one size.
        eps: added to the mean square; None means the machine epsilon of float32, as in torch.nn.
        elementwise_affine: whether the module has a weight, of shape normalized_shape.
        offset: added to the weight in the forward pass. Gemma's models use 1.0. The weight is
            initialised to 1 - offset, so that a new module computes a plain RMSNorm.
        rounding: "late" or "early" (see tilenorm.rms_norm).

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
    ):
        normalized_shape = sizes_of("RMSNorm", normalized_shape)
        _check("RMSNorm", dtype, offset, rounding)
        self.offset, self.rounding = offset, rounding
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight to 1 - offset."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, of shape (..., *normalized_shape). The output has the same dtype."""
        options = {"offset": self.offset, "rounding": self.rounding}
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, **options)

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_options(self)

    def __prepare_scriptable__(self):
        refuse_script(self)


class LayerNorm(nn.LayerNorm):
    """A replacement for torch.nn.LayerNorm that calls tilenorm.layer_norm.

    Args:
        normalized_shape: sizes of the trailing dimensions to normalise, or an int for one size.
        eps: added to the variance.
        elementwise_affine: whether the module has a weight, of shape normalized_shape.
        bias: whether a module with a weight also has a bias.
        offset: added to the weight in the forward pass. The weight is initialised to 1 - offset.
        rounding: "late" or "early" (see tilenorm.rms_norm).

    state_dicts can be exchanged with torch.nn.LayerNorm.
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
    ):
        normalized_shape = sizes_of("LayerNorm", normalized_shape)
        _check("LayerNorm", dtype, offset, rounding)
        self.offset, self.rounding = offset, rounding
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight to 1 - offset and the bias to 0."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise input, of shape (..., *normalized_shape). The output has the same dtype."""
        options = {"offset": self.offset, "rounding": self.rounding}
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, **options)

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_options(self)

    def __prepare_scriptable__(self):
        refuse_script(self)


class QuantizedNormLinear(nn.Module):
    """A norm and the linear that reads it, such as fused q, k, v or gate, up, in 8-bit floats.

        output = linear(norm(x))

    The norm writes its rows as float8_e4m3fn with scales, the weight is quantised at each call, and
    F.scaled_mm multiplies both. The normalised rows themselves are not stored: for the backward
    pass the module keeps x, a number or two a row, and the parameters. The gradient of the norm's
    output is computed with the weight itself, and goes through the norm's own backward pass. The
    weight gradient multiplies the output's gradient and the normalised rows, which one kernel
    computes again, both quantised with a scale for each 128 rows of a column. Gradients go through
    quantisation as if it were not there. A backward pass with create_graph=True raises
    RuntimeError, because there is no second derivative.

    On CUDA F.scaled_mm gives bfloat16, so that an output or weight gradient of another dtype has
    bfloat16's precision. scaling="row" takes sm_89 or later. scaling="block" takes sm_90, PyTorch
    2.10 and CUDA 12.9; where these are not there, the weight gradient multiplies rows in the
    input's dtype. Before sm_90 PyTorch's operations quantise. On a CPU the quantised matrices are
    multiplied in float32, which tests the numbers and saves no time.

    Args:
        in_features: the size N of the last dimension of x: a multiple of 16, or of 128 with
            scaling="block".
        out_features: of the linear: a multiple of 16.
        norm: "rms" or "layer".
        eps: added to the mean square or variance; None means that of torch.nn's module.
        elementwise_affine: whether the norm has a weight, and a LayerNorm a bias.
        bias: whether the linear has a bias.
        offset, rounding: as for RMSNorm and LayerNorm.
        scaling: "row", one scale for each row of the norm's output and of the weight, or "block",
            one for each 128 elements of such a row.

    The parameters are those of the submodules `norm` (RMSNorm or LayerNorm) and `linear`
    (torch.nn.Linear), and may have dtypes of their own. Hooks of the submodules do not run.

    Raises:
        ValueError: an unknown word, or sizes that are not such multiples.
        Otherwise as RMSNorm, LayerNorm and torch.nn.Linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        norm: str = "rms",
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = False,
        device=None,
        dtype=None,
        *,
        offset: float = 0.0,
        rounding: str = "late",
        scaling: str = "row",
    ):
        super().__init__()
        name = type(self).__name__
        check_option(name, "norm", norm)
        check_sizes(name, out_features, in_features, scaling)
        where = {"device": device, "dtype": dtype}
        made = {"elementwise_affine": elementwise_affine, "offset": offset, "rounding": rounding}
        if norm == "layer":
            made["eps"] = 1e-5 if eps is None else eps
            self.norm = LayerNorm(in_features, **made, **where)
        else:
            self.norm = RMSNorm(in_features, eps, **made, **where)
        self.linear = nn.Linear(in_features, out_features, bias, **where)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """The output (..., out_features) of x (..., in_features), of float16, bfloat16 or float32.

        The output has x's dtype, or, inside of torch.autocast, autocast's. Its gradients have the
        dtypes of what they are of.

        Raises:
            RuntimeError: x has another last size, or a parameter is on another device.
            NotImplementedError: another dtype; a GPU that has no such products; torch.func.
        """
        norm, linear = self.norm, self.linear
        # In the message of an error the norm follows the module's name.
        name = f"{type(self).__name__}(norm={'layer' if self._is_layer else 'rms'!r})"
        affine = norm.weight, norm.bias if self._is_layer else None
        asked = norm.eps, norm.offset, norm.rounding
        return norm_linear(name, x, affine, (linear.weight, linear.bias), asked, self.scaling)

    @property
    def _is_layer(self) -> bool:
        return isinstance(self.norm, nn.LayerNorm)

    def extra_repr(self) -> str:
        return f"scaling={self.scaling!r}"

    def __prepare_scriptable__(self):
        refuse_script(self)


def refuse_script(module: nn.Module) -> None:
    """Raise NotImplementedError: torch.jit.script calls it, by the name __prepare_scriptable__."""
    raise NotImplementedError(
        f"{type(module).__name__}: torch.jit.script does not compile a norm of tilenorm: use"
        " torch.export or torch.jit.trace, or undo tilenorm.patch where it made this module"
    )


def _check(name: str, dtype, offset, rounding) -> None:
    """Check what a module is made with. PyTorch's own messages name `device` and its values."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        got = type(dtype).__name__
        raise TypeError(f"{name}: argument 'dtype' takes a torch.dtype or None, got {got}")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"{name}: argument 'dtype' takes a floating-point dtype, got {dtype}")
    check_option(name, "offset", offset)
    check_option(name, "rounding", rounding)


def _extra_options(module: nn.Module) -> str:
    """The options that torch.nn's module does not have, unless they have their default values."""
    text = f", offset={module.offset:g}" if module.offset else ""
    return text + (f", rounding={module.rounding!r}" if module.rounding != "late" else "")
