"""Models whose norms lie behind projections that are cut by columns."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tilenorm

from ..ops.helpers import EPS, random
from .placing import counted
from .world import INDUCTOR, NAMES, device, mesh, on_every_rank

ONE = NAMES[0]


class Attention(nn.Module):
    """The projections and norms of q and k as OLMo 2 has them: the norm is over all heads."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k"):
            setattr(self, f"{name}_proj", nn.Linear(16, 24, bias=False))
            setattr(self, f"{name}_norm", tilenorm.RMSNorm(24, eps=EPS))
        self.o_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return self.o_proj(torch.tanh(q) * k)


def models():
    torch.manual_seed(0)
    alone = Attention().to(device())
    parallel = Attention().to(device())
    parallel.load_state_dict(alone.state_dict())
    colwise = ColwiseParallel(use_local_output=False)
    plan = {"q_proj": colwise, "k_proj": colwise, "o_proj": RowwiseParallel()}
    parallelize_module(parallel, mesh(ONE), plan)
    for norm in (parallel.q_norm, parallel.k_norm):
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.data, mesh(ONE), [Shard(0)]))
    return alone, parallel


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
@on_every_rank
def test_q_and_k_norms_of_olmo_2(backend):
    """Behind projections that are cut by columns: one all-reduce for each norm each way, and the
    one of o_proj's output.
    """
    alone, parallel = models()
    x = random(3, 5, 16, device=device())
    dy = random(3, 5, 16, device=device(), seed=1)
    expected = alone(x)
    expected.backward(dy)
    torch._dynamo.reset()
    run = torch.compile(parallel, backend=backend, fullgraph=True) if backend else parallel
    measure = counted if backend is None else lambda f: (f(), None)  # dynamo refuses the mode

    def training_step():
        y = run(x)
        y.backward(dy)
        return y

    y, collectives = measure(training_step)
    assert collectives is None or mesh(ONE).size() == 1 or collectives == {"all_reduce": 2 * 2 + 1}
    torch.testing.assert_close(y, expected)
    for (name, p), q in zip(parallel.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        assert p.grad.placements == p.placements
