"""What a pass is asked for, where other graphs, threads, compilers and engines are about."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tilenorm.ops import autograd, cutile, library, reference
from tilenorm.ops.torch_private import asked_of

from .helpers import (
    ADD,
    EACH_DEVICE,
    GATED,
    LAYER,
    RMS,
    call,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)
from .passes import by_grad, recorded

pytestmark = EACH_DEVICE


def test_one_tensor_given_twice(device, gradients_made):
    """Both edges lead to one node."""
    x, w = random(3, 8, device=device).requires_grad_(), random(8, device=device, seed=1)
    y, _ = call(ADD, {"input": x, "residual": x, "weight": w.requires_grad_()})
    (dx,) = by_grad([y], [x], [torch.ones_like(y)])
    assert gradients_made == [{"input"}]
    all_of_x, _ = by_grad([y], [x, w], [torch.ones_like(y)])
    assert torch.equal(dx, all_of_x)


class Inner(Function):
    """Its backward pass runs another graph, by a pass of its own or by calling the node."""

    @staticmethod
    def forward(ctx, x, y, run):
        ctx.y, ctx.run = y, run
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.run(ctx.y, dy)
        return dy, None, None


RUNS = {
    "all": (lambda y, dy, x, w: y.backward(dy, retain_graph=True), {"input", "weight"}),
    "part": (lambda y, dy, x, w: by_grad([y], [w], [dy]), {"weight"}),
    # The engine's answers are about the outer graph, so that all is computed.
    "node": (lambda y, dy, x, w: y.grad_fn.apply(dy, None), {"input", "weight"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_graphs_within_a_pass_of_another_graph(device, run, gradients_made):
    x, z = (random(3, 8, device=device, seed=i).requires_grad_() for i in range(2))
    w = random(8, device=device).requires_grad_()
    function, expected = RUNS[run]
    (y,) = call(RMS, {"input": x, "weight": w})
    (outer,) = call(RMS, {"input": z, "weight": w})
    outer = Inner.apply(outer, y, partial(function, x=x, w=w))
    by_grad([outer], [w], [torch.ones_like(outer)])
    assert gradients_made == [expected, {"weight"}]


def test_a_node_that_is_called_outside_of_a_pass_computes_all(device, gradients_made):
    given = recorded(tensors_of(RMS, 3, 8, device=device))
    (y,) = call(RMS, given)
    y.grad_fn.apply(torch.ones_like(y), None)
    assert gradients_made == [set(given)]


@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=["layer", "add", "gated"])
def test_passes_of_several_threads_at_once(device, form):
    """Each thread asks for another part of one graph."""
    tensors = tensors_of(form, 5, 24, device=device)
    given, incoming = recorded(tensors), incoming_of(tensors)
    outputs = call(form, given)
    every = dict(zip(given, by_grad(outputs, list(given.values()), incoming), strict=True))

    def alike(name):
        found = (by_grad(outputs, [given[name]], incoming)[0] for _ in range(20))
        return all(torch.equal(grad, every[name]) for grad in found)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(alike, [*given, *given]))


def test_reentrant_checkpoints(device, gradients_made):
    """The recomputed graph has a pass of its own, which wants all of its gradients."""
    given = recorded(tensors_of(RMS, 3, 8, device=device))
    y = checkpoint(lambda *t: call(RMS, dict(zip(given, t, strict=True)))[0], *given.values(),
                   use_reentrant=True)  # fmt: skip
    y.sum().backward()
    assert gradients_made == [set(given)]


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_selective_checkpointing_sees_the_op(device, keep, no_memory, monkeypatch):
    calls = []

    def counted(forward):
        return lambda *args: calls.append(forward) or forward(*args)

    bind = cutile.bind_forward
    monkeypatch.setattr(cutile, "bind_forward", lambda *args: counted(bind(*args)))
    by_reference = reference.bind_forward
    monkeypatch.setattr(reference, "bind_forward", lambda *args: counted(by_reference(*args)))

    def policy(context, op, *args, **kwargs):
        wanted = keep and op == torch.ops.tilenorm.rms_norm.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE

    def sine(form, tensors):
        return (call(form, tensors)[0].sin(),)

    def selective(form, tensors):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(sine, form, tensors, use_reentrant=False, context_fn=contexts)

    tensors = tensors_of(RMS, 5, 40, device=device)
    got = step(RMS, tensors, function=selective)
    assert len(calls) == (1 if keep else 2)
    assert same(got, step(RMS, tensors, function=sine))


def test_a_compiled_graph_is_as_before(device, dynamo, gradients_made):
    """AOTAutograd's backward graph computes all, and each part is right."""
    tensors = tensors_of(RMS, 5, 24, device=device)
    given, incoming = recorded(tensors), incoming_of(tensors)
    outputs = torch.compile(call, backend="aot_eager", fullgraph=True)(RMS, given)
    every = dict(zip(given, by_grad(call(RMS, given), [*given.values()], incoming), strict=True))
    for name in given:
        gradients_made.clear()
        (grad,) = by_grad(outputs, [given[name]], incoming)
        assert gradients_made == [set(given)]
        assert torch.equal(grad, every[name])


def test_compiled_autograd(device, dynamo):
    """It calls backward with an object that stands for the node."""
    tensors = tensors_of(RMS, 5, 24, device=device)
    given, incoming = recorded(tensors, leaves=("weight", "bias")), incoming_of(tensors)
    every = dict(zip(given, by_grad(call(RMS, given), [*given.values()], incoming), strict=True))
    compiler = partial(torch.compile, backend="eager")
    for name in given:
        with torch._dynamo.compiled_autograd._enable(compiler):
            (grad,) = by_grad(call(RMS, given), [given[name]], incoming)
        assert torch.equal(grad, every[name])


class UpToDate(Function):
    """A Function in a PyTorch that keeps needs_input_grad up to date, as is proposed for it."""

    @staticmethod
    def forward(ctx, seen, *tensors):
        ctx.seen = seen
        return sum(tensors)

    @staticmethod
    def backward(ctx, dy):
        ctx.seen.append(asked_of(ctx))
        ctx.needs_input_grad = ctx.seen[-1]
        ctx.seen.append(asked_of(ctx))
        return None, *[dy] * (len(ctx.needs_input_grad) - 1)


def test_needs_input_grad_that_is_up_to_date_is_taken(device):
    a, b, c = (random(3, device=device, seed=i) for i in range(3))
    a, c = a.requires_grad_(), c.requires_grad_()
    for asked in ([a], [c], [a, c]):
        seen = []
        torch.autograd.grad(UpToDate.apply(seen, a, b, c).sum(), asked)
        expected = (False, *(any(t is one for one in asked) for t in (a, b, c)))
        assert seen == [expected, expected]


def test_a_gradient_edge_asks_as_its_tensor_does(device, gradients_made):
    """Pipelines that split the backward pass start and end at edges."""
    x, w = random(3, 8, device=device).requires_grad_(), random(8, device=device).requires_grad_()
    (y,) = call(RMS, {"input": x, "weight": w})
    start = GradientEdge(y.grad_fn, 0)
    end = y.grad_fn.next_functions[1]
    torch.autograd.grad([start], [GradientEdge(*end)], [torch.ones_like(y)])
    assert gradients_made == [{"weight"}]


@pytest.mark.parametrize("module", [autograd, library], ids=lambda m: m.__name__.split(".")[-1])
def test_the_fallback_computes_all(device, module, gradients_made):
    """Where PyTorch does not tell, each pass computes what requires a gradient."""
    given = recorded(tensors_of(RMS, 3, 8, device=device))
    with patch.object(module, "asked_of", lambda ctx: ctx.needs_input_grad):
        (y,) = call(RMS, given)
        by_grad([y], [given["input"]], [torch.ones_like(y)])
    assert gradients_made == [set(given) if module is autograd else {"input"}]
