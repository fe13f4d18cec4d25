"""Norms whose output is quantised: q as 8-bit floats, and scales.

functional -> norm -> library -> cutile, or reference

linear is a norm with a linear behind it, for training: its products are in product, and what its
weight gradient multiplies is made by transposed.
"""

from . import reference, transposed

__all__ = ["reference", "transposed"]
