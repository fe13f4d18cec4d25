"""Norms in FX graphs become tilenorm's ops."""

from .rewrite import Report, replace_norms

__all__ = ["Report", "replace_norms"]
