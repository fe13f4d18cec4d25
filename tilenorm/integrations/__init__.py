"""Ways to use tilenorm in code that calls PyTorch's own norms."""
