"""Norms whose output is quantised: q as 8-bit floats, and scales.

functional -> norm -> library -> cutile, or reference
"""

from . import reference

__all__ = ["reference"]
