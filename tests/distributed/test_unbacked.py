"""Replicated DTensors of rows whose number the data tell compile, as PyTorch's norms of them do."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import tilenorm
from tests.support.calls import random

from .world import NAMES, device, mesh, on_every_rank

CAPTURES = {"capture_dynamic_output_shape_ops": True}
CALLS = (
    lambda x, s: tilenorm.add_layer_norm(x, x, (8,))[0],
    lambda x, s: tilenorm.modulated_rms_norm(x, (8,), s, s),
    lambda x, s: tilenorm.rms_norm_rope(x[:, :, None], (8,), s[:, None], s[:, None])[0],
)


@pytest.mark.slow
@on_every_rank
def test_replicated_rows():
    def run(x, mask, scale):
        given = [DTensor.from_local(t[mask], on, [Replicate()] * on.ndim) for t in (x, scale)]
        return [call(*given).to_local() for call in CALLS]

    on = mesh(NAMES[-1])
    x, scale = (random(*shape, device=device()) for shape in ((6, 5, 8), (6, 8)))
    mask = torch.arange(6, device=device()) % 3 != 1
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURES):
        made = torch.compile(run, fullgraph=True, backend="aot_eager")(x, mask, scale)
    assert all(map(torch.equal, made, run(x, mask, scale)))
