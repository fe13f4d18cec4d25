"""Which norms tilenorm.compile leaves to Inductor on a GPU, because the host would be slower."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tilenorm
from tilenorm.integrations.fx.nodes import Left
from tilenorm.integrations.fx.rewrite import replace_chosen

from ..ops.helpers import EPS

VIT, WAITS = 14 * 577, "a step with norms of {} rows of {} waits for the host"


@pytest.mark.parametrize(
    "rows, hidden, mode, reason",
    [
        (4096, 2048, None, "chosen"),  # Llama 3.2 1B
        (VIT, 1024, None, WAITS),  # ViT-L
        (VIT, 1024, "reduce-overhead", "chosen"),
        (None, 4096, None, "chosen"),  # how many rows come may be unknown
        (1, 4096, None, WAITS),
        (8192, 256, "reduce-overhead", "Inductor fuses a norm of 256 elements with its neighbours"),
    ],
)
def test_a_step_that_waits_for_the_host_has_inductors_norms(
    rows, hidden, mode, reason, monkeypatch, dynamo
):
    """On a GPU, unless CUDA graphs are captured; fake tensors stand for the GPU's."""
    backends = []
    monkeypatch.setattr(torch, "compile", lambda m, backend, **_: backends.append(backend) or m)
    tilenorm.compile(nn.Module(), mode=mode)
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        x, w = (torch.empty(*shape, hidden, device="cuda") for shape in ((rows or 1,), ()))
        graph = make_fx(lambda x, w: nn.functional.rms_norm(x, w.shape, w, EPS))(x, w)
        if rows is None:
            unknown = fake.shape_env.create_unbacked_symint()
            for node in graph.graph.nodes:
                if len(getattr(node.meta.get("val"), "shape", ())) == 2:
                    node.meta["val"] = x.new_empty(unknown, node.meta["val"].shape[1])

    def choose(norm):
        backends[0]._choose(norm)
        raise Left("chosen")  # to replace it would take a GPU

    ((_, why),) = replace_chosen(graph, choose).left
    assert why == reason.format(rows, hidden)
