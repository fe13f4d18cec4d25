"""From the third call with a shape on, a call repeats the launches of an earlier one."""

import pytest
import torch

import tilenorm
from tests.quantized import bits
from tilenorm.ops import bound, call, cutile
from tilenorm.table import NORMS, OPS

from .cuda_helpers import forms_and_widths, train
from .cuda_helpers import made as made_on_gpu
from .helpers import DEVICES, LAYER, NEEDS_GPU, RMS, random, same, step, tensors_of
from .pretended import by
from .test_dispatch import one_element_in
from .wrong_calls import right_of

N = 64


@pytest.fixture(params=DEVICES)
def device(request):
    """Where the tensors are: on a GPU, or on a CPU that stands for one."""
    with by("kernels", request.param):
        for cache in (bound._bound, bound.norm_of, call.remembered):
            cache.cache_clear()
        yield request.param


@pytest.fixture
def made(device, monkeypatch):
    """Of each call: whether it was made by the driver ("repeated"), or prepared."""
    done, prepare = [], cutile.prepare

    def preparing(*given):
        done.append("prepared")
        repeat = prepare(*given)

        def repeated(*called):
            done.append("repeated")
            return repeat(*called)

        return repeat and repeated

    monkeypatch.setattr(cutile, "prepare", preparing)
    return done


def taken(done: list) -> list:
    found = list(done)
    done.clear()
    return found


@pytest.mark.parametrize("shape", [(3, N), (2, 2, N)], ids=["matrix", "batch"])
def test_has_the_same_bits(form, shape, device, made):
    tensors = tensors_of(form, *shape, dtype=torch.bfloat16, device=device)
    first = step(form, tensors)
    step(form, tensors)
    assert taken(made) == ["prepared"] * 2  # forward and backward
    for seed in range(2):
        other = {n: t if seed == 0 else t.clone() for n, t in tensors.items()}
        assert same(step(form, other), first)
        assert taken(made) == ["repeated"] * 2


@pytest.mark.parametrize("op", [op for op in OPS if op not in NORMS])
def test_other_functions_have_the_same_bits(op, device, made):
    """What lies by group is read in place from a chunk, and copied from every second element."""
    right = right_of(op)
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in right.items()}
    by_group = [port.name for port in OPS[op].takes if port.lies == "group"]
    chunks = {name: torch.cat([given[name]] * 2, -1)[..., :8] for name in by_group}
    uneven = {name: given[name].repeat_interleave(2, -1)[..., ::2] for name in by_group}
    for changes in (chunks, uneven):
        results = [getattr(tilenorm, op)(**given | changes) for _ in range(4)]
        assert ("repeated" in taken(made)) == (changes is chunks or not by_group)
        first, *later = (r if isinstance(r, tuple) else (r,) for r in results)
        for outputs in later:
            pairs = zip(first, outputs, strict=True)
            assert all(a is b or torch.equal(bits(a), bits(b)) for a, b in pairs)


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("change", [strided, one_element_in])
@pytest.mark.parametrize("name", ["input", "weight", "dy"])
def test_a_tensor_that_lies_otherwise_is_launched_by_cutile(name, change, device, made):
    tensors, dy = tensors_of(RMS, 3, N, device=device), random(3, N, device=device)
    expected = [step(RMS, tensors, [dy]) for _ in range(3)][-1]
    assert taken(made)[-2:] == ["repeated"] * 2
    if name == "dy":
        dy = change(dy)
    else:
        tensors = tensors | {name: change(tensors[name])}
    for _ in range(3):
        assert same(step(RMS, tensors, [dy]), expected)
    assert len(taken(made)) == (3 if name == "dy" else 0)  # the forward passes alone


def test_a_weight_of_another_shape_gets_its_gradient_in_that_shape(device, made):
    tensors = tensors_of(RMS, 3, 1, N, device=device)
    for shape in ((N,), (1, N)) * 3:
        given = tensors | {n: tensors[n].view(shape) for n in ("weight", "bias")}
        x, w, b = (given[n].detach().requires_grad_() for n in ("input", "weight", "bias"))
        tilenorm.rms_norm(x, shape, w, bias=b).sum().backward()
        y = tilenorm.rms_norm(x, shape, w, bias=b)
        w.grad = b.grad = None
        y.backward(torch.ones_like(y))
        assert w.grad.shape == b.grad.shape == shape


def test_another_shape_or_eps_is_another_call(device, made):
    x = random(4, N, device=device)
    for eps in (1e-6, 1e-5, 1e-6):
        for rows in (4, 3):
            tilenorm.rms_norm(x[:rows], (N,), eps=eps)
    assert taken(made) == ["prepared"] * 2
    expected = x[:3] * (x[:3].square().mean(1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(tilenorm.rms_norm(x[:3], (N,), eps=1e-6), expected)
    assert taken(made) == ["repeated"]


def test_a_few_eps_are_kept(device, made):
    x = random(4, N, device=device)
    for i in range(3 * (cutile.MOST_EPS + 2)):
        tilenorm.rms_norm(x, (N,), eps=1e-6 * (1 + i % (cutile.MOST_EPS + 2)))
    assert taken(made).count("prepared") == cutile.MOST_EPS


def test_while_a_graph_is_captured_nothing_is_kept(device, monkeypatch):
    asked = []
    monkeypatch.setattr(cutile, "prepare", lambda *given: asked.append(given))
    tensors = tensors_of(LAYER, 3, N, device=device)
    first = step(LAYER, tensors)
    for _ in range(3):
        assert same(step(LAYER, tensors), first)
    assert len(asked) == 6


@NEEDS_GPU
@forms_and_widths([64, 1001, 4096, 16384, 65536], [4096])
def test_in_a_graph(form, n):
    """Of calls that a graph captures, the first two prepare nothing and the third repeats. A replay
    reads what its tensors hold then.
    """
    tensors, incoming = made_on_gpu(form, 300, n)
    train(form, tensors, incoming)
    for calls in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = train(form, tensors, incoming)
        with torch.no_grad():
            for number, tensor in enumerate((*tensors.values(), *incoming)):
                tensor.copy_(random(*tensor.shape, seed=8 * calls + number))
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, train(form, tensors, incoming)), f"after {calls} more calls"
