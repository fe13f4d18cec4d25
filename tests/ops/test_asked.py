"""A pass of the engine computes the gradients that it was asked for, and no others.

A pass may want less than what requires a gradient: torch.autograd.grad(y, [x]) and
y.backward(inputs=[x]) want no dW.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilenorm.ops import autograd, library
from tilenorm.ops.torch_private import asked_of

from .helpers import (
    ADD,
    EACH_DEVICE,
    EACH_FORM,
    FAMILY,
    LAYER,
    RMS,
    assert_step,
    call,
    expected_of,
    incoming_of,
    random,
    tensors_of,
)
from .pretended import pretended_gpu
from .test_gradients import COMBINATIONS, computed

pytestmark = EACH_DEVICE
EACH_SERVED = pytest.mark.parametrize("served", ["reference", "kernels"])


@pytest.fixture(autouse=True)
def way(request, device):
    """On a CPU, the reference or, where a test says so, the interpreted kernels."""
    served = request.node.callspec.params.get("served", "reference")
    with pretended_gpu() if device == "cpu" and served == "kernels" else nullcontext():
        yield


class Mode(TorchDispatchMode):
    """Sees every operation, so that the functions call the op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def by_op(form, tensors, **options):
    with Mode():
        return call(form, tensors, **options)


def checkpointed(form, tensors, **options):
    """The tensors that checkpoint keeps for the recomputation are those that it is given."""

    def run(*given):
        return call(form, dict(zip(tensors, given, strict=True)), **options)

    return checkpoint(run, *tensors.values(), use_reentrant=False)


FUNCTIONS = {"function": call, "op": by_op, "checkpoint": checkpointed}


def by_grad(outputs, inputs, incoming, **options):
    return torch.autograd.grad(
        outputs, inputs, incoming, retain_graph=True, allow_unused=True, **options
    )


def by_inputs(outputs, inputs, incoming, **options):
    for tensor in inputs:
        tensor.retain_grad()
        tensor.grad = None
    torch.autograd.backward(outputs, incoming, inputs=inputs, retain_graph=True, **options)
    return [tensor.grad for tensor in inputs]


WAYS = {"grad": by_grad, "inputs": by_inputs}


def recorded(tensors, leaves=None):
    """Tensors that require gradients: leaves, and results of another operation."""
    found = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    return {n: t if leaves is None or n in leaves else t * 1 for n, t in found.items()}


def check_bits(form, tensors, got, every, incoming, device, **options):
    """The gradients of a part have the bits of all, wherever that is promised."""
    if device == "cuda" and form.other == "gate":  # see tests/kernels/test_backward.py
        assert_step(got, expected_of(form, tensors, incoming, **options), got.keys())
        return
    for name, grad in got.items():
        assert (grad is None) == (every[name] is None), name
        assert grad is None or torch.equal(grad, every[name]), name


@EACH_SERVED
@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(
    "name, asked", COMBINATIONS, ids=lambda v: v if v in FAMILY else "+".join(v)
)
def test_each_combination(device, served, name, asked, by, gradients_made):
    """As in a frozen norm, though everything requires a gradient here."""
    form = FAMILY[name]
    tensors = tensors_of(form, 7, 24, device=device)
    given, incoming = recorded(tensors), incoming_of(tensors)
    outputs = call(form, given)
    every = dict(zip(given, by_grad(outputs, list(given.values()), incoming), strict=True))
    gradients_made.clear()
    found = WAYS[by](outputs, [given[n] for n in asked], incoming)
    assert gradients_made == [computed(tensors, asked)]
    check_bits(form, tensors, dict(zip(asked, found, strict=True)), every, incoming, device)


@EACH_SERVED
@pytest.mark.parametrize("seed", range(40))
def test_drawn_parts_are_the_whole(device, served, seed, gradients_made):
    """All gradients in one pass, and in passes that share them out: the same bits."""
    draw = Random(seed)
    form = draw.choice(list(FAMILY.values()))
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32))
    other = draw.choice((dtype, dtype, torch.float32))
    shape = draw.choice(((3,), (2, 3), (13,))), draw.choice((8, 24, 37))
    tensors = tensors_of(form, *shape[0], shape[1], dtype=dtype, other=other, device=device)
    for name in ("weight", "bias"):
        if draw.random() < 0.2:
            del tensors[name]
    frozen = [name for name in tensors if draw.random() < 0.15]
    given = recorded(tensors, [name for name in tensors if draw.random() < 0.5])
    given |= {name: given[name].detach() for name in frozen}
    names = [name for name in given if name not in frozen]
    if not names:
        return
    incoming = incoming_of(tensors)
    used = draw.choice(((0,), (1,), (0, 1), (0, 1)) if len(incoming) == 2 else ((0,),))
    outputs = FUNCTIONS[draw.choice(list(FUNCTIONS))](form, given)
    pairs = [(outputs[i], incoming[i]) for i in used if outputs[i].requires_grad]
    ys, dys = zip(*pairs, strict=True)
    every = dict(zip(names, by_grad(ys, [given[n] for n in names], dys), strict=True))
    of_each = [None if i not in used else dy for i, dy in enumerate(incoming)]
    draw.shuffle(names)
    while names:
        part = [names.pop() for _ in range(draw.randint(1, len(names)))]
        gradients_made.clear()
        found = WAYS[draw.choice(list(WAYS))](ys, [given[n] for n in part], dys)
        assert gradients_made == ([computed(tensors, part)] if 0 in used else [])
        check_bits(form, tensors, dict(zip(part, found, strict=True)), every, of_each, device)


@EACH_SERVED
@EACH_FORM
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_part_has_the_second_derivatives_of_the_whole(device, served, form, function):
    tensors = tensors_of(form, 5, 12, device=device)
    for asked in (("input",), ("weight",), tuple(tensors)[1:]):
        given = recorded(tensors)
        incoming = [dy.requires_grad_() for dy in incoming_of(tensors)]
        outputs = FUNCTIONS[function](form, given)
        every = by_grad(outputs, list(given.values()), incoming, create_graph=True)
        every = [dict(zip(given, every, strict=True))[n] for n in asked]
        for by in WAYS.values():
            part = by(outputs, [given[n] for n in asked], incoming, create_graph=True)
            wanted, got = (
                by_grad([g.square().sum() for g in of], [*given.values(), *incoming], None)
                for of in (every, part)
            )
            for a, b in zip(wanted, got, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


@EACH_SERVED
def test_the_node_returns_and_hooks_see_what_was_asked_for(device, served):
    given = recorded(tensors_of(ADD, 3, 8, device=device), leaves=("weight",))
    y, total = call(ADD, given)
    returned, arrived = [], []
    y.grad_fn.register_hook(lambda grads, _: returned.append([g is not None for g in grads]))
    given["input"].register_hook(lambda _: arrived.append("input"))
    given["weight"].register_hook(lambda _: arrived.append("weight"))
    dy = random(3, 8, device=device)
    order = ["input", "residual", "weight", "bias"]
    for asked in (["weight"], ["input"], ["residual"], ["bias", "input"], order):
        by_grad([y], [given[n] for n in asked], [dy])
        assert [n for n, is_there in zip(order, returned.pop(), strict=True) if is_there] == [
            n for n in order if n in asked
        ]
        assert sorted(arrived) == sorted(n for n in asked if n in ("input", "weight"))
        arrived.clear()
    by_grad([total], [given["residual"]], [dy])
    assert returned.pop() == [False, True, False, False]


@EACH_SERVED
def test_nothing_is_computed_where_nothing_is_asked_for(device, served, gradients_made):
    """The engine runs the node of a tensor that backward is given as an input."""
    for function in FUNCTIONS.values():
        (y,) = function(RMS, recorded(tensors_of(RMS, 3, 8, device=device)))
        seen, dy = [], random(3, 8, device=device)
        y.grad_fn.register_hook(lambda grads, _, seen=seen: seen.extend(grads))
        (2 * y).backward(dy, inputs=[y])
        assert torch.equal(y.grad, 2 * dy)
        assert seen == [None] * 3
    assert not any(gradients_made)


@EACH_SERVED
def test_the_ordinary_pass_computes_all(device, served, gradients_made):
    given = recorded(tensors_of(LAYER, 3, 8, device=device), leaves=("weight",))
    (y,) = call(LAYER, given)
    y.sum().backward()
    assert gradients_made == [set(given)]


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


def test_passes_of_several_threads_at_once(device):
    """Each thread asks for another part of one graph."""
    tensors = tensors_of(LAYER, 5, 24, device=device)
    given, incoming = recorded(tensors), incoming_of(tensors)
    outputs = call(LAYER, given)
    every = dict(zip(given, by_grad(outputs, list(given.values()), incoming), strict=True))

    def same(name):
        found = (by_grad(outputs, [given[name]], incoming)[0] for _ in range(20))
        return all(torch.equal(grad, every[name]) for grad in found)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(same, [*given, *given]))


def test_reentrant_checkpoints(device, gradients_made):
    """The recomputed graph has a pass of its own, which wants all of its gradients."""
    given = recorded(tensors_of(RMS, 3, 8, device=device))
    y = checkpoint(lambda *t: call(RMS, dict(zip(given, t, strict=True)))[0], *given.values(),
                   use_reentrant=True)  # fmt: skip
    y.sum().backward()
    assert gradients_made == [set(given)]


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
