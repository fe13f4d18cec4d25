"""Models under tensor and sequence parallelism: eager, patched and compiled, with their norms."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tilenorm
from tests.support.calls import FAMILY, call, incoming_of, random, slow, step

from ..integrations.graphs import FeedForward, HuggingFaceNorm
from .placing import alike, case, placed, profiled
from .world import INDUCTOR, NAMES, device, mesh, on_every_rank, slow_but_first

N = 32
ONE, *_ = NAMES_FLAT = [name for name in NAMES if "x" not in name]
FLAT = slow_but_first(NAMES_FLAT)
NORMS = {
    "torch.nn, patched": (nn.RMSNorm, nn.LayerNorm),
    "tilenorm": (tilenorm.RMSNorm, tilenorm.LayerNorm),
}


def parallel(model: FeedForward, name: str) -> FeedForward:
    """A block whose residual stream is cut in the sequence."""
    plan = {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "second": SequenceParallel(),
    }
    whole = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
    )
    parallelize_module(model, mesh(name), plan)
    return parallelize_module(model, mesh(name), whole)


def model(first=nn.RMSNorm, second=nn.LayerNorm) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(first(N), second(N), N).to(device())


def trained(module, x) -> tuple[dict, dict]:
    """Outputs and gradients of a step, and the collectives that it took."""

    def once():
        y = module(x)
        y.backward(torch.ones_like(y) * y.detach())
        return y

    y, collectives = profiled(once)
    named = [(n.removeprefix("_orig_mod."), p.grad) for n, p in module.named_parameters()]
    return {"output": y.detach(), **{n: g for n, g in named if g is not None}}, collectives


def warmed(run, x) -> tuple[dict, dict]:
    """The same of a compiled module's second step."""
    trained(run, x)
    run.zero_grad()
    return trained(run, x)


def whole(results: dict) -> dict:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in results.items()}


def local_rows(name: str):
    x = random(2, 8, N, device=device())
    return x, placed(x, name, [Shard(1)]).to_local()


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("kind", slow_but_first(NORMS))
@on_every_rank
def test_sequence_parallel_plans(name, kind):
    """The collectives and placements of PyTorch's norms."""
    original = parallel(model(), name)
    mine = parallel(model(*NORMS[kind]), name)
    if "patched" in kind:
        assert len(tilenorm.patch(mine).patched) == 2
    alone, x = local_rows(name)
    found, collectives = trained(mine, x)
    expected, others = trained(original, x)
    assert collectives == others
    assert {n: t.placements for n, t in found.items()} == {
        n: t.placements for n, t in expected.items()
    }
    torch.testing.assert_close(whole(found), whole(expected))
    torch.testing.assert_close(whole(found), trained(model(*NORMS[kind]), alone)[0])


@pytest.mark.parametrize(
    "name, first, backend",
    [
        *slow((ONE, nn.RMSNorm, "aot_eager")),
        pytest.param(NAMES_FLAT[-1], HuggingFaceNorm, "inductor", marks=INDUCTOR),
    ],
)
@on_every_rank
def test_compile_replaces_norms_under_sequence_parallelism(name, first, backend):
    """Forward and backward, the sum before the LayerNorm included."""
    _, x = local_rows(name)
    torch._dynamo.reset()
    eager = parallel(model(first), name)
    every = {"where": lambda node: True}  # these norms are small
    run = tilenorm.compile(copy.deepcopy(eager), backend=backend, fullgraph=True, **every)
    found, collectives = warmed(run, x)
    kinds = sorted(kind for kind, _ in run.tilenorm_report.replaced)
    assert kinds == ["add_layer_norm", "rms_norm"] and not run.tilenorm_report.left
    # Inductor changes no collectives.
    _, others = warmed(torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True), x)
    assert collectives == others
    expected, _ = trained(eager, x)
    torch.testing.assert_close(whole(found), whole(expected))
    if backend == "aot_eager":
        with torch.inference_mode():
            torch.testing.assert_close(run(x).full_tensor(), eager(x).full_tensor())


@pytest.mark.parametrize(
    "op, backend",
    [
        *slow(("add_rms_norm", "aot_eager"), ("gated_layer_norm, gate first", "aot_eager")),
        pytest.param("add_layer_norm", "inductor", marks=INDUCTOR),
    ],
)
@on_every_rank
def test_compiled_functions(op, backend):
    """The bits of eager calls, on the last mesh."""
    name, form = NAMES[-1], FAMILY[op]
    torch._dynamo.reset()
    run = torch.compile(call, backend=backend, fullgraph=True)
    given, rows = case(form, 4, 6, N), [Shard(1)] * (2 if "x" in name else 1)
    tensors = given.placed(name, alike(given, rows))
    incoming = [placed(dy, name, rows) for dy in incoming_of(given.tensors)]
    expected = step(form, tensors, incoming)
    step(form, tensors, incoming, function=run)  # compiles
    found, collectives = profiled(step, form, tensors, incoming, function=run)
    assert not collectives and found.keys() == expected.keys()
    for n, result in found.items():
        assert result.placements == expected[n].placements
        assert torch.equal(result.to_local(), expected[n].to_local()), n
    with torch.no_grad():
        for result, other in zip(run(form, tensors), call(form, tensors), strict=True):
            assert torch.equal(result.to_local(), other.to_local())
