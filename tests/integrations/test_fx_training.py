"""The FX pass on the graph of a whole training step, forward and backward."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EACH_DEVICE, EPS, random
from .graphs import NORM, NORM_BACKWARD, calls

N, ROWS, STEPS = 64, 24, 3
MODEL = {
    "layer": lambda: [nn.LayerNorm(N), nn.Linear(N, N), nn.ReLU(), nn.LayerNorm(N, bias=False)],
    "rms": lambda: [nn.RMSNorm(N, eps=EPS), nn.Linear(N, N), nn.ReLU(), nn.RMSNorm(N, eps=EPS)],
}


def traced(model, parameters):
    """The graph of a training step. It returns the loss and the gradients."""

    def step(parameters, x):
        loss = (functional_call(model, parameters, (x,)) - x).square().mean()
        return loss, torch.autograd.grad(loss, list(parameters.values()))

    device = next(iter(parameters.values())).device
    return make_fx(step)(parameters, random(ROWS, N, device=device))


def train(graph_module, parameters):
    parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    losses = []
    for seed in range(STEPS):
        device = next(iter(parameters.values())).device
        loss, grads = graph_module(parameters, random(ROWS, N, device=device, seed=seed))
        with torch.no_grad():
            for p, grad in zip(parameters.values(), grads, strict=True):
                p -= 0.1 * grad
        losses.append(loss.detach())
    return [*losses, *grads, *parameters.values()]


@EACH_DEVICE
@pytest.mark.parametrize("norm", MODEL)
def test_training_is_deterministic_and_matches_aten(device, norm):
    torch.manual_seed(0)
    model = nn.Sequential(*MODEL[norm]()).to(device)
    parameters = dict(model.named_parameters())
    graph_module = traced(model, parameters)
    aten_results = train(graph_module, parameters)
    replace_norms(graph_module)
    if norm == "layer" or device == "cuda":  # on a CPU aten has no op for RMSNorm
        assert len(calls(graph_module, NORM)) == len(calls(graph_module, NORM_BACKWARD)) == 2
    first, second = train(graph_module, parameters), train(graph_module, parameters)
    assert all(map(torch.equal, first, second))
    for got, expected in zip(first, aten_results, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
        )
