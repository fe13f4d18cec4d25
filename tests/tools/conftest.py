from ..ops.conftest import gradients_made, no_memory, quiet  # noqa: F401
