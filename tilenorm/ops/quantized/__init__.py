"""Norms whose output is quantised: q as 8-bit floats, and scales.

functional -> norm -> library -> cutile, or reference

linear is a norm with a linear behind it, for training: its products are in product, and what its
weight gradient multiplies is made by transposed.
"""

from . import cutile, reference, transposed

__all__ = ["cutile", "reference", "transposed"]
