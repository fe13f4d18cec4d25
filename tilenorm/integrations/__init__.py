"""tilenorm in existing models: patch modules, override aten, torch.compile, the FX pass."""
