"""Measured numbers. sm_90.json has the configurations of one architecture, and explains its form.
sm_90_H100.json has those that differ on one machine of it. tables.py reads these files.

rules.py and quantized.py serve every architecture.
"""
