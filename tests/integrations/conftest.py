"""Fixtures for the integration tests."""

from ..ops.conftest import gradients_made, no_memory, quiet  # noqa: F401
from .aten_helpers import cpu  # noqa: F401
from .stepwise import stepwise  # noqa: F401
