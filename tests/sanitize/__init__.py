"""Runs NVIDIA's compute-sanitizer over a launch of every schedule of the kernels.

workload.py launches them, and __main__.py runs the tools over it and reads what they print.
"""
