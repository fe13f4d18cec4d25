"""Norms whose output is quantised: q as 8-bit floats, and scales.

functional.py has the public functions, norm.py the checks of a call that is not remembered, and
library.py the op. The kernels are launched by ops/cutile.py, as those of plain norms.
"""

from . import reference

__all__ = ["reference"]
