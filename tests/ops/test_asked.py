"""A pass of the engine computes the gradients that it was asked for, and no others.

A pass may want less than what requires a gradient: torch.autograd.grad(y, [x]) and
y.backward(inputs=[x]) want no dW. The zero-bubble pipelines of torch.distributed split the backward
pass in two: the first half computes the gradients of a stage's inputs, the second half those of its
parameters.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tilenorm
from tests.support.calls import (
    ADD,
    DTYPES,
    RMS,
    TORCH,
    assert_step,
    call,
    expected_of,
    gradients_like,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)
from tests.support.drawn import FORMS, draw
from tests.support.passes import FUNCTIONS, WAYS, Seen, by_grad, passes, recorded
from tilenorm.ops.pytorch import torch_private
from tilenorm.table import NORMS


def check_bits(form, tensors, got, every, incoming, **options):
    """The gradients of a part have the bits of all, wherever that is promised."""
    x = tensors["input"]
    if x.is_cuda and x.numel() and form.other == "gate":  # see tests/kernels/test_accuracy.py
        assert_step(got, expected_of(form, tensors, incoming, **options), got.keys())
        return
    for name, grad in got.items():
        assert (grad is None) == (every[name] is None), name
        assert grad is None or torch.equal(grad, every[name]), name


@pytest.mark.parametrize("seed", range(24))
def test_drawn_parts_are_the_whole(device, served, way, seed, gradients_made):
    """All gradients in one pass, and in passes that share them out: the same bits."""
    rng = Random(seed)
    form = rng.choice([*FORMS.values()])
    tensors, incoming, names, options = draw(rng, form, rng.choice(DTYPES[:3]), device)
    given = recorded(tensors, [name for name in tensors if rng.random() < 0.5])
    given |= {name: t.detach() for name, t in given.items() if name not in names}
    outputs = FUNCTIONS[rng.choice([*FUNCTIONS])](form, given, **options)
    incoming = gradients_like(outputs) if incoming is None else incoming
    ys, dys = zip(
        *[p for p in zip(outputs, incoming, strict=True) if p[1] is not None], strict=True
    )
    every = dict(zip(names, by_grad(ys, [given[n] for n in names], dys), strict=True))
    while names:
        part = [names.pop() for _ in range(rng.randint(1, len(names)))]
        gradients_made.clear()
        found = WAYS[rng.choice([*WAYS])](ys, [given[n] for n in part], dys)
        if tensors["input"].numel() and form.op in NORMS and served != "extension":
            assert gradients_made == ([] if incoming[0] is None else passes(tensors, part))
        check_bits(form, tensors, dict(zip(part, found, strict=True)), every, incoming, **options)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_part_has_the_second_derivatives_of_the_whole(device, way, form, function):
    tensors = tensors_of(form, 5, 12, device=device)
    of = [n for n in tensors if n != "dropout_mask"]
    for asked in (("input",), ("weight",), of[1:]):
        given = recorded(tensors)
        incoming = [dy.requires_grad_() for dy in incoming_of(tensors)]
        outputs = FUNCTIONS[function](form, given)
        leaves = [given[n] for n in of]
        every = by_grad(outputs, leaves, incoming, create_graph=True)
        every = [dict(zip(of, every, strict=True))[n] for n in asked]
        for run in WAYS.values():
            part = run(outputs, [given[n] for n in asked], incoming, create_graph=True)
            wanted, got = (
                by_grad([g.square().sum() for g in grads], [*leaves, *incoming], None)
                for grads in (every, part)
            )
            for a, b in zip(wanted, got, strict=True):
                assert (a is None and b is None) or torch.equal(a, b) or added_otherwise(a, b)


def added_otherwise(a, b):
    """Whether the same terms may have been added up in another order.

    PyTorch's engine adds several terms in the order of its nodes, which are numbered in each
    thread. On a GPU two threads make them, so that the order depends on how many nodes each made
    before. On a CPU that differed by up to 1.4 units of the largest element.
    """
    if not a.is_cuda:
        return False
    return (a - b).abs().max() <= 4 * torch.finfo(a.dtype).eps * a.abs().max()


def test_nothing_is_computed_where_nothing_is_asked_for(device, way, gradients_made):
    """The engine runs the node of a tensor that backward is given as an input."""
    for function in FUNCTIONS.values():
        (y,) = function(RMS, recorded(tensors_of(RMS, 3, 8, device=device)))
        seen, dy = [], random(3, 8, device=device)
        y.grad_fn.register_hook(lambda grads, _, seen=seen: seen.extend(grads))
        (2 * y).backward(dy, inputs=[y])
        assert torch.equal(y.grad, 2 * dy)
        assert seen == [None] * 3
    assert not any(gradients_made)


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


def test_passes_of_several_threads_at_once(device, way):
    """Each thread asks for another part of one graph."""
    tensors = tensors_of(ADD, 5, 24, device=device)
    given, incoming = recorded(tensors), incoming_of(tensors)
    outputs = call(ADD, given)
    every = dict(zip(given, by_grad(outputs, list(given.values()), incoming), strict=True))

    def alike(name):
        found = (by_grad(outputs, [given[name]], incoming)[0] for _ in range(6))
        return all(torch.equal(grad, every[name]) for grad in found)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(alike, [*given, *given]))


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_selective_checkpointing_sees_the_op(device, keep):
    def policy(context, op, *args, **kwargs):
        wanted = keep and op == torch.ops.tilenorm.rms_norm.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE

    def sine(form, tensors):
        return (call(form, tensors)[0].sin(),)

    def selective(form, tensors):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(sine, form, tensors, use_reentrant=False, context_fn=contexts)

    tensors = tensors_of(RMS, 5, 40, device=device)
    with Seen() as seen:
        got = step(RMS, tensors, function=selective)
    assert seen.ops.count(torch.ops.tilenorm.rms_norm.default) == (1 if keep else 2)
    assert same(got, step(RMS, tensors, function=sine))


@pytest.mark.parametrize("served", ["reference", "extension"], indirect=True)
def test_compiled_autograd(device, way, dynamo):
    """It calls backward with an object that stands for the node."""
    tensors = tensors_of(RMS, 5, 24, device=device)
    given, incoming = recorded(tensors, leaves=("weight", "bias")), incoming_of(tensors)
    (expected,) = by_grad(call(RMS, given), [given["weight"]], incoming)
    with torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend="eager")):
        (grad,) = by_grad(call(RMS, given), [given["weight"]], incoming)
    assert torch.equal(grad, expected)


NEEDS_DISTRIBUTED = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)
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


@NEEDS_DISTRIBUTED
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


@NEEDS_DISTRIBUTED
@pytest.mark.parametrize("device", ["cpu"])
def test_the_engine_of_rpc_computes_all(device, gradients_made, tmp_path, monkeypatch):
    """It does not tell which nodes it runs; which one now, in the threads of GPUs alone."""
    from torch.distributed import autograd, rpc

    if not rpc.is_available():
        pytest.skip("needs torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
    try:
        x, w = random(3, N).requires_grad_(), random(N, seed=1).requires_grad_()
        with autograd.context() as context:
            y = tilenorm.rms_norm(x, (N,), w)
            monkeypatch.setattr(torch_private, "_running_node", lambda: y.grad_fn)
            autograd.backward(context, [y.square().sum()])
            found = autograd.get_gradients(context)
    finally:
        rpc.shutdown()
    assert gradients_made == [{"input", "weight"}]
    expected = torch.autograd.grad(tilenorm.rms_norm(x, (N,), w).square().sum(), [x, w])
    assert all(map(torch.equal, (found[x], found[w]), expected))
