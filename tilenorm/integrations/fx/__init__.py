"""The FX pass: replace norms in a graph by tilenorm's ops."""

from .gradients import Folds
from .rewrite import Report, replace_norms

__all__ = ["Folds", "Report", "replace_norms"]
