"""Measured configurations, one module for each architecture. sm_90.py explains the form."""

from . import sm_90

TABLES = {"sm_90": sm_90}
