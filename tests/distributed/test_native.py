"""DDP, FSDP2 and checkpoints of norms that the extension in C++ serves, on several ranks.

On each rank the kernels are interpreted for a GPU. Each row has the bits that Python's path gives.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.pretended import pretended_gpu
from tests.support.served import entered
from tilenorm.ops.passes import native
from tilenorm.ops.passes.native import build

from .test_wrappers import alone, block, compare, rows_of, sharded, trained
from .world import device, on_every_rank

STEPS = 5  # the extension serves from the fourth on


@contextmanager
def in_service(file: Path) -> Iterator[None]:
    """In this block the extension serves."""
    before = native.state().extension
    native.state().use(before or build.load(file))
    try:
        yield
    finally:
        native.state().use(before)


def steps(model, x):
    """What the last of some steps gives, which the extension serves."""
    for _ in range(STEPS):
        model.zero_grad()
        made: list = []
        names = entered(lambda made=made: made.append(trained(model, x)))
    assert not {"checked", "tell", "cold"} & {*names}, names
    return made[0]


def parallel(model):
    return DistributedDataParallel(model)


def checkpointed(model):
    model.first.forward = partial(checkpoint, model.first.forward, use_reentrant=False)
    return sharded(model)


WRAPPERS: dict[str, Callable] = {"ddp": parallel, "fsdp2": sharded, "checkpoint": checkpointed}


@pytest.fixture
def file(extension_file) -> Path:
    if extension_file is None:
        pytest.skip(build.refused() or build.missing())
    return extension_file


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
@on_every_rank
def test_wrapped_norms(name, file):
    if device() == "cuda":
        pytest.skip("the kernels are interpreted")
    x = rows_of(dist.get_rank())
    with pretended_gpu():
        native.state().use(None)
        expected = alone(block())
        with in_service(file):
            # The interpreter makes arrays of NumPy's, whose tensors FSDP2 cannot free.
            steps(block(), x)
            y, gradients = steps(WRAPPERS[name](block()), x)
    gradients = {n.removeprefix("module."): g for n, g in gradients.items()}
    if name == "ddp":
        assert (y == expected[0]).all()
        assert all((gradients[n] - g).abs().max() < 1e-4 for n, g in expected[1].items())
    else:
        compare((y, gradients), expected)
