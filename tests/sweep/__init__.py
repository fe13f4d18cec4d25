"""A sweep over drawn specs: a row has the same bits wherever it stands and however it lies.

draw.py draws the cases, checks.py checks one, ahead.py compiles cases before their checks run, and
__main__.py is the command line.
"""
