"""Benchmarks of tilenorm beside PyTorch and the installed peer libraries: ``python -m bench``."""
