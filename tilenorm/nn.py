"""Modules in place of torch.nn's, with their signatures and state_dicts."""

from torch import Tensor, nn

from .ops.arguments import ROUNDINGS
from .ops.functional import layer_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """tilenorm.rms_norm over the trailing dimensions, in place of torch.nn.RMSNorm.

    Args:
        normalized_shape: int or sizes of the trailing dimensions.
        eps: None is the machine epsilon of float32, as in torch.nn.
        elementwise_affine: whether there is a weight, of shape normalized_shape.
        offset: added to the weight, which then starts at 1 - offset: the module starts as a plain
            RMSNorm. 1.0 is Gemma's.
        rounding: "late" or "early" (see tilenorm.rms_norm).

    A state_dict is torch.nn.RMSNorm's, and loads both ways.
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
        self.offset, self.rounding = offset, _known(rounding)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """The weight becomes 1 - offset."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same, in x's dtype."""
        options = {"offset": self.offset, "rounding": self.rounding}
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, **options)

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(self)


class LayerNorm(nn.LayerNorm):
    """tilenorm.layer_norm over the trailing dimensions, in place of torch.nn.LayerNorm.

    Args:
        normalized_shape: int or sizes of the trailing dimensions.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, of shape normalized_shape.
        bias: whether there is one, with the weight.
        offset: added to the weight, which then starts at 1 - offset.
        rounding: "late" or "early" (see tilenorm.rms_norm).

    A state_dict is torch.nn.LayerNorm's, and loads both ways.
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
        self.offset, self.rounding = offset, _known(rounding)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """The weight becomes 1 - offset, the bias 0."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same, in the input's dtype."""
        options = {"offset": self.offset, "rounding": self.rounding}
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, **options)

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(self)


def _known(rounding: str) -> str:
    if rounding not in ROUNDINGS:
        takes = " or ".join(map(repr, ROUNDINGS))
        raise ValueError(f"rounding: got {rounding!r}, takes {takes}")
    return rounding


def _options(module: nn.Module) -> str:
    """What the module does beyond torch.nn's."""
    text = f", offset={module.offset:g}" if module.offset else ""
    return text + (f", rounding={module.rounding!r}" if module.rounding != "late" else "")
