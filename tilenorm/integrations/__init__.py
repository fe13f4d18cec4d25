"""tilenorm in models and graphs that were written for PyTorch's norms."""
