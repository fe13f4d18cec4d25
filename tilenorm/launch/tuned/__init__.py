"""Measured numbers. sm_90.py has the configurations of one architecture, and explains their form.

rules.py and quantized.py serve every architecture.
"""

from . import sm_90

TABLES = {"sm_90": sm_90}
