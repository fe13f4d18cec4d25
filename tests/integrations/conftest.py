"""Fixtures for the integration tests."""

from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tilenorm.ops import functional, functional_rotated

from ..ops.conftest import gradients_made, no_memory, quiet  # noqa: F401
from .aten_helpers import cpu  # noqa: F401
from .stepwise import stepwise  # noqa: F401


@pytest.fixture
def one_process_mesh():
    """A device mesh that holds only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The calls of functions that compute more than a norm, by name."""
    names = [f"{kind}_{norm}_norm" for kind in ("add", "modulated") for norm in ("rms", "layer")]
    calls = []

    def counted(name, function, *args, **options):
        calls.append(name)
        return function(*args, **options)

    for module, name in [*((functional, n) for n in names), (functional_rotated, "rms_norm_rope")]:
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    return calls
