from .aten_helpers import cpu  # noqa: F401
