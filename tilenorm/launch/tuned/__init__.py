"""Measured configurations, one module an architecture; see sm_90.py for their form."""

from . import sm_90

TABLES = {"sm_90": sm_90}
