import pytest
import torch.distributed as dist

from ..integrations.conftest import one_process_mesh  # noqa: F401
from . import world as worlds


@pytest.fixture(scope="session")
def world():
    """Runs a function on every rank."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    ranks = worlds.Here() if worlds.TORCHRUN else worlds.Pool()
    yield ranks
    ranks.close()
