"""Second derivatives of every function, forward-mode derivatives and torch.func's transforms; whose
memory gradients are, and what may be done to outputs and inputs.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tests.support.calls import (
    CALLS,
    FEW,
    by_pytorch,
    call,
    incoming_of,
    leaves_of,
    op_call,
    random,
    slow,
    step,
    tensors_of,
)
from tilenorm.ops.passes import registry


def second(form, function, tensors, incoming, options):
    """Derivatives of a function of the gradients, by every tensor and the incoming gradients."""
    tensors = leaves_of(tensors)
    leaves = [t for t in tensors.values() if t.requires_grad]
    incoming = [t.detach().requires_grad_() for t in incoming]
    outputs = function(form, tensors, **options)
    grads = torch.autograd.grad(outputs, leaves, incoming, create_graph=True)
    loss = sum((g * random(*g.shape, seed=20).to(g)).sum() + g.square().sum() for g in grads)
    return torch.autograd.grad(loss, (*leaves, *incoming), allow_unused=True)


def test_second_derivatives_agree_with_those_in_float64(device, form):
    """The reference in float64 on the CPU, which the next test holds to differences."""
    tensors = tensors_of(form, 5, 12, device=device)
    incoming = [random(5, 12, device=device, seed=9)] * (2 if form.other == "residual" else 1)
    got = second(form, call, tensors, incoming, {"offset": 1.0})
    double = {n: t.cpu() if n == "dropout_mask" else t.cpu().double() for n, t in tensors.items()}
    expected = second(form, call, double, [t.cpu().double() for t in incoming], {"offset": 1.0})
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            scale = b.abs().max().item()
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=2e-5 * scale)


EACH_WAY = pytest.mark.usefixtures("way")
PARAMETERS = {"none": (), "weight": ("weight",), "both": ("weight", "bias"), "bias": ("bias",)}
CHECKED = [("rms_norm", kept, float(kept == "weight")) for kept in PARAMETERS]
CHECKED += [(name, "both", 1.0) for name in CALLS if name != "rms_norm"]


@pytest.mark.parametrize("name, parameters, offset", CHECKED)
def test_derivatives_of_the_reference_agree_with_differences(name, parameters, offset):
    """With a weight by heads, or else with two normalised dimensions."""
    form, kept = CALLS[name], PARAMETERS[parameters]
    tensors = tensors_of(form, 2, 3, 2, dtype=torch.float64, parameter_shape=(3, 2))
    tensors = {n: t for n, t in tensors.items() if n in kept or n not in ("weight", "bias")}
    names = [n for n in tensors if n != "dropout_mask"]

    for dims in (1, 2):
        if dims == 2 and "layer_scale" in tensors:
            tensors["layer_scale"] = random(3, 2, dtype=torch.float64)

        def function(*given, dims=dims):
            named = tensors | dict(zip(names, given, strict=True))
            return call(form, named, dims, 1e-3, offset=offset)

        inputs = [tensors[n].requires_grad_() for n in names]
        assert torch.autograd.gradcheck(
            function, inputs, check_forward_ad=True, check_batched_grad=dims == 1
        )
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def tangent_by_dual_numbers(function, x, v):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent


TRANSFORMS = {
    "forward mode": tangent_by_dual_numbers,
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "vjp": lambda f, x, v: torch.func.vjp(f, x)[1](v)[0],
    "grad": lambda f, x, v: torch.func.grad(lambda x: f(x).mul(v).sum())(x),
    "vmap": lambda f, x, v: torch.func.vmap(f)(torch.stack([x, v])),
    "gradients of samples": lambda f, x, v: torch.func.vmap(
        torch.func.grad(lambda x: f(x).mul(v).sum())
    )(torch.stack([x, v])),
    "jacrev": lambda f, x, v: torch.func.jacrev(f)(x),
    "hessian": lambda f, x, v: torch.func.hessian(lambda x: f(x).mul(v).sum())(x),
}


def summed(function, form, names, x, w, z):
    """The sum of a function's outputs. A layer scale is the weight, and the rest is other rows."""
    own = {"input": x, "weight": w, "layer_scale": w, "dropout_mask": z > -1}
    return sum(function(form, {name: own.get(name, z) for name in names}))


def composed(name: str) -> tuple:
    """The sum by tilenorm's function, and by PyTorch's, without a bias."""
    form = CALLS[name]
    names = [n for n in form.names if n != "bias"]  # Dynamo of PyTorch 2.9 reads no NamedTuple
    return tuple(partial(summed, function, form, names) for function in (call, by_pytorch))


LAYER = tilenorm.LayerNorm(8)
# Functions of x, a weight and other rows, by tilenorm and by PyTorch.
PAIRS = {
    "weights, one for each row": (
        lambda x, w, z: tilenorm.rms_norm(z, (8,), x, 1e-5),
        lambda x, w, z: F.rms_norm(z, (8,), None, 1e-5) * x,
    ),
    "a module": (
        lambda x, w, z: torch.func.functional_call(LAYER, {"weight": w, "bias": w}, x),
        lambda x, w, z: F.layer_norm(x, (8,), w, w),
    ),
} | {name: composed(name) for name in (*FEW, "layer_norm", "add_layer_norm, masked and scaled")}


def both(device, name, transform, around=lambda f: f):
    """What a transform makes of tilenorm's function, within another, and of PyTorch's."""
    x, v, w, z = (random(3, 8, device=device, seed=s) for s in range(4))
    ours, pytorchs = (lambda x, f=f: f(x, w[0], z) for f in PAIRS[name])
    run = TRANSFORMS[transform]
    return around(lambda x: run(ours, x, v))(x), run(pytorchs, x, v)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PAIRS)
def test_transforms(device, name, transform):
    torch.testing.assert_close(*both(device, name, transform), rtol=2e-6, atol=2e-6)


COMPILED = [("rms_norm", transform) for transform in ("forward mode", "vmap", "grad")]
COMPILED += slow(("layer_norm", "hessian"), ("add_rms_norm, two residuals", "jvp"))


@pytest.mark.parametrize("name, transform", COMPILED)
def test_compiled_transforms(device, name, transform, dynamo):
    compiled = partial(torch.compile, fullgraph=transform != "forward mode", backend="aot_eager")
    torch.testing.assert_close(*both(device, name, transform, compiled), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("transform", ["forward mode", "jvp"])
def test_the_op_itself_refuses_forward_mode(device, transform):
    def norm(x):
        return op_call("rms_norm", {"input": x}, 8, save=False)["output"]

    x, v = random(3, 8, device=device), random(3, 8, device=device, seed=1)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        TRANSFORMS[transform](norm, x, v)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transforms_do_not_take_the_kernels(compiled, monkeypatch, dynamo):
    """As on a GPU: on the CPU, cutile refuses whatever calls it."""
    monkeypatch.setattr(registry, "select", lambda *_: registry.REGISTRY[0])
    run = torch.func.vmap(lambda x: tilenorm.rms_norm(x, (8,), backend="cutile"))
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with pytest.raises(RuntimeError, match=r"'cutile' was asked for, but torch\.func"):
        run(random(3, 8))


@EACH_WAY
def test_outputs_may_be_detached_in_place(device, form):
    """As zero-bubble pipelines do with what a stage returns. PyTorch refuses it for views."""
    tensors = tensors_of(form, 2, 3, 16, device=device)
    tensors["input"].requires_grad_()
    for y in call(form, tensors):
        assert not y.detach_().requires_grad


@EACH_WAY
def test_no_gradient_is_the_callers_memory(device, form):
    """Nor that of an output, nor is an output that of an input."""
    tensors = leaves_of(tensors_of(form, 7, 40, device=device))
    leaves = [t for t in tensors.values() if t.requires_grad]
    outputs, incoming = call(form, tensors), incoming_of(tensors)
    for used in [slice(None), slice(1, 2), slice(1)][: 3 if outputs[1:] else 1]:
        grads = torch.autograd.grad(
            outputs[used], leaves, incoming[used], allow_unused=True, retain_graph=True
        )
        theirs = [*outputs, *tensors.values()]
        theirs += () if form.other == "skip" else incoming  # a skip's gradient is the output's
        starts = [t.untyped_storage().data_ptr() for t in theirs]
        assert len({*starts}) == len(starts)
        made = {g.untyped_storage().data_ptr() for g in grads if g is not None}
        assert not made & {*starts}


@EACH_WAY
def test_what_the_backward_pass_needs_may_not_be_written_to(device, form):
    tensors = leaves_of(tensors_of(form, 5, 8, device=device))
    tensors["input"] = tensors["input"] * 1
    outputs = call(form, tensors)
    saved = outputs[-1] if form.other == "residual" else tensors["input"]
    with torch.no_grad():
        saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@EACH_WAY
def test_an_output_is_changed_in_place_and_a_graph_is_used_once(device):
    form, ones = CALLS["layer_norm"], torch.ones(5, 8, device=device)
    tensors = tensors_of(form, 5, 8, device=device)
    once, given = step(form, tensors, [ones]), leaves_of(tensors)
    (y,) = call(form, given)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        y.backward(torch.ones(2, 8, device=device))
    y.backward(ones)
    assert all(torch.equal(t.grad, 2 * once[name]) for name, t in given.items())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(ones)
