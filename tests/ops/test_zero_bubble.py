"""Pipelines that split the backward pass in two: zero-bubble schedules of torch.distributed.

The first half computes the gradients of a stage's inputs, the second half those of its parameters.
"""

import copy

import pytest
import torch
from torch import nn

import tilenorm
from tilenorm.ops import torch_private

from .helpers import TORCH, random

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
N = 16


class Block(nn.Module):
    """Half a transformer's layer, with a norm of each kind."""

    def __init__(self):
        super().__init__()
        self.first, self.last = tilenorm.RMSNorm(N), tilenorm.LayerNorm(N)
        self.up, self.middle, self.down = (nn.Linear(N, N) for _ in range(3))
        self.weight, self.gated = (nn.Parameter(random(N, seed=s)) for s in (1, 2))

    def forward(self, x):
        h = self.up(self.first(x))
        y, total = tilenorm.add_rms_norm(h, x, (N,), self.weight)
        y = tilenorm.gated_rms_norm(self.middle(y), y, (N,), self.gated)
        return total + self.down(self.last(y))


# The gradients that the norms of a block compute, in the order of the backward pass. One gradient
# serves input and residual.
INPUTS = [{"input"}, {"input", "gate"}, {"input"}, {"input"}]
PARAMETERS = [{"weight", "bias"}, {"weight"}, {"weight"}, {"weight"}]
BOTH = [a | b for a, b in zip(INPUTS, PARAMETERS, strict=True)]


def test_the_two_halves_compute_each_gradient_once(device, way, gradients_made):
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    block = Block().to(device)
    whole = copy.deepcopy(block)
    x, dy = random(5, N, device=device).requires_grad_(), random(5, N, device=device, seed=3)
    x_of_whole = x.detach().clone().requires_grad_()
    whole(x_of_whole).backward(dy)
    assert gradients_made == BOTH
    gradients_made.clear()
    (dx,), groups = stage_backward_input([block(x)], [dy], [x], block.parameters())
    assert gradients_made == INPUTS
    gradients_made.clear()
    stage_backward_weight(block.parameters(), groups)
    assert sorted(map(sorted, gradients_made)) == sorted(map(sorted, PARAMETERS))  # in any order
    # With a gate, the gradients that are computed decide which multiplications a compiler fuses.
    tolerance = {} if device == "cuda" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(dx, x_of_whole.grad, **tolerance)
    if TORCH < (2, 13):  # adds the gradients of a node's two outputs: PyTorch's issue 170277
        block.weight.grad = whole.weight.grad
    for (name, mine), other in zip(block.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **tolerance, msg=name)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("tells_its_node", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_the_engine_of_rpc_computes_all(
    device, tells_its_node, gradients_made, tmp_path, monkeypatch
):
    """It does not tell which nodes it runs, and which one now in the threads of GPUs alone."""
    from torch.distributed import autograd, rpc

    if not rpc.is_available():
        pytest.skip("needs torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
    try:
        x, w = random(3, N).requires_grad_(), random(N, seed=1).requires_grad_()
        with autograd.context() as context:
            y = tilenorm.rms_norm(x, (N,), w)
            if tells_its_node:
                monkeypatch.setattr(torch_private, "_running_node", lambda: y.grad_fn)
            autograd.backward(context, [y.square().sum()])
            found = autograd.get_gradients(context)
    finally:
        rpc.shutdown()
    assert gradients_made == [{"input", "weight"}]
    expected = torch.autograd.grad(tilenorm.rms_norm(x, (N,), w).square().sum(), [x, w])
    assert all(map(torch.equal, (found[x], found[w]), expected))
