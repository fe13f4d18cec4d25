"""What PyTorch sees: the registry, its implementations, the torch.library ops, the functions."""
