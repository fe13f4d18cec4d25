"""How kernels are launched: configurations, plans, and the only calls to cuTile's launch."""

from .forcing import forced as forced
