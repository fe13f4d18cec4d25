from .aten_helpers import cpu  # noqa: F401
from ..ops.conftest import dynamo, gradients_made, quiet  # noqa: F401
