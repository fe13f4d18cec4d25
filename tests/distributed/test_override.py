"""tilenorm.override where PyTorch's norms get DTensors: the kernels run on each rank's tensors."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ..integrations.aten_helpers import cpu_override
from ..ops.helpers import random
from .placing import R, counted, placed
from .world import EACH_MESH, mesh, on_every_rank

N = 64
NORMS = {"rms": torch.nn.functional.rms_norm, "layer": torch.nn.functional.layer_norm}
EACH_NORM = pytest.mark.parametrize("norm", NORMS)


def inputs(norm: str) -> tuple[list, torch.Tensor]:
    """An input, a weight and, for a LayerNorm, a bias; and the output's gradient."""
    sizes = [(4, 6, N), (N,), (N,)][: 3 if norm == "layer" else 2]
    return [random(*size, seed=s) for s, size in enumerate(sizes)], random(4, 6, N, seed=9)


def stepped(norm: str, tensors, dy) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = NORMS[norm](leaves[0], (N,), *leaves[1:], eps=1e-5)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def compare(found, expected) -> None:
    """Rows have their bits; the weights' gradients are the sum over ranks."""
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert type(mine) is DTensor
        if i < 2:
            assert torch.equal(mine.full_tensor(), other)
        else:
            torch.testing.assert_close(mine.full_tensor(), other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs have no override of the CPU")
@EACH_NORM
@EACH_MESH
@on_every_rank
def test_kernels_run_on_local_tensors(norm, name):
    """The interpreter runs the kernels in a GPU's place: the override is the CPU's."""
    tensors, dy = inputs(norm)
    cut, whole = [Shard(1)] * mesh(name).ndim, [R] * mesh(name).ndim
    given = [placed(t, name, whole if t.dim() == 1 else cut) for t in tensors]
    with cpu_override() as cpu:
        expected = cpu.around(stepped, norm, tensors, dy)
        alone, cpu.launches = cpu.launches, []
        found, collectives = counted(cpu.around, stepped, norm, given, placed(dy, name, cut))
        compare(found, expected)
        local = given[0].to_local().numel()  # 6 columns on 4 ranks: one may have none
        assert cpu.launches == (alone if local else [])
    assert not collectives
