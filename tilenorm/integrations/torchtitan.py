"""tilenorm's norms in torchtitan: overrides of the configurations of its norms. torchtitan 0.3.

    --override.imports tilenorm.integrations.torchtitan.rms_norm
    --override.imports 'tilenorm.integrations.torchtitan.rms_norm={"rounding": "early"}'
    --override.imports tilenorm.integrations.torchtitan.layer_norm

Parameters stay as they are, and so do their initialisation, their sharding and checkpoints. This
module imports torchtitan, and nothing else of tilenorm imports this module.
"""

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm

from ..ops import functional


class TileRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, computed by tilenorm."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """rounding: "late" rounds once, as torch.nn.RMSNorm. "early" rounds the normalised row
        before the weight multiplies it, as Hugging Face's LlamaRMSNorm.
        """

        rounding: str = "late"

    def __init__(self, config: Config):
        super().__init__(config)
        self.rounding = config.rounding

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, of shape (..., *normalized_shape), as tilenorm.rms_norm."""
        shape, rounding = self.normalized_shape, self.rounding
        return functional.rms_norm(x, shape, self.weight, self.eps, rounding=rounding)


class TileLayerNorm(LayerNorm):
    """torchtitan's LayerNorm, computed by tilenorm."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):
        """As LayerNorm's."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, of shape (..., *normalized_shape), as tilenorm.layer_norm."""
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


# exact: the configuration of a derived class is that of a module which computes something else.
@override(target=RMSNorm.Config, exact=True, description="RMSNorm by tilenorm")
def rms_norm(config: RMSNorm.Config, rounding: str = "late") -> TileRMSNorm.Config:
    """The configuration of tilenorm's RMSNorm in the place of torchtitan's."""
    return derive(config, TileRMSNorm.Config, rounding=rounding)


@override(target=LayerNorm.Config, exact=True, description="LayerNorm by tilenorm")
def layer_norm(config: LayerNorm.Config) -> TileLayerNorm.Config:
    """The configuration of tilenorm's LayerNorm in the place of torchtitan's."""
    return derive(config, TileLayerNorm.Config)
