"""Benchmarks of tilenorm beside PyTorch and every peer that is installed: ``python -m bench``."""
