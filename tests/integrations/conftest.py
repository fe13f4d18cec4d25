from ..ops.conftest import dynamo, gradients_made, quiet  # noqa: F401
