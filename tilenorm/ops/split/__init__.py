"""Norms of rows in pieces: a process holds some columns of each row; sums are all-reduced."""

from . import cutile, reference

__all__ = ["cutile", "reference"]
