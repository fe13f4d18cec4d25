"""The FX pass: replace norms in a graph by tilenorm's ops."""

from .rewrite import Report, replace_norms

__all__ = ["Report", "replace_norms"]
