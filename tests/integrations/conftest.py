"""Fixtures for the integration tests."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..ops.conftest import gradients_made, no_memory, quiet  # noqa: F401
from .aten_helpers import cpu  # noqa: F401
from .stepwise import stepwise  # noqa: F401


@pytest.fixture
def one_process_mesh():
    """A device mesh that holds only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
