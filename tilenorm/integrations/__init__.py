"""tilenorm where PyTorch's norms are already: in models."""
