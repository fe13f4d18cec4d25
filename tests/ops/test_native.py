"""Calls that the extension in C++ serves: the bits, gradients and errors of Python's path.

The kernels are interpreted. What a call enters in Python tells which path has served it.
test_native_states.py tests what is not plain.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import tilenorm
from tests.quantized import bits
from tilenorm.ops.passes import cutile, native
from tilenorm.table import OPS

from .helpers import FAMILY, made_by_inductor, random, same, step, tensors_of
from .passes import Seen
from .served import THREE, WARM, N, entered, is_served, layer, leaves, warmed
from .uses import USES

pytestmark = pytest.mark.usefixtures("by_extension")

B, F = torch.bfloat16, torch.float32
MODULES = ("RMSNorm", "LayerNorm", "ModulatedRMSNorm", "ModulatedLayerNorm")
# What the backward pass of these makes by other operations, or norm by norm.
ONE_BY_ONE = ("layer_scale",)


@pytest.fixture
def launches(by_extension, monkeypatch) -> list[str]:
    """A list that gets a word for each pass that repeats launches."""
    seen, prepare = [], cutile.prepare

    def preparing(*given):
        repeat = prepare(*given)
        return lambda *called: seen.append("repeated") or repeat(*called)

    monkeypatch.setattr(cutile, "prepare", preparing)
    return seen


def backward(outputs: dict, seed: int = 7) -> None:
    outputs = {n: t for n, t in outputs.items() if t.requires_grad}
    made = [random(*t.shape, dtype=t.dtype, seed=seed + i) for i, t in enumerate(outputs.values())]
    torch.autograd.backward(list(outputs.values()), made)


USED = [name for name, use in USES.items() if name in OPS or name in MODULES]


@pytest.mark.parametrize("dtypes", [(B, B), (F, F), (B, F)], ids=str)
@pytest.mark.parametrize("name", USED)
def test_each_function_and_module(name, dtypes):
    """Bits, gradients and what is asked for, from the call on from which the extension serves."""
    use = USES[name]
    if dtypes[0] != dtypes[1] and not use.mixed:
        pytest.skip("takes one dtype")
    if "rms" in name.lower() and name in OPS:
        use = use._replace(parameters=tuple(n for n in use.parameters if n != "bias"))
    tensors = use.tensors(dtypes, "cpu")
    function, rows = use.bound(tensors)
    plain = [n for n in tensors if n not in ONE_BY_ONE]
    for asked in ([], plain, plain[:1], plain[-1:], plain[:2]):
        for n, t in tensors.items():
            t.requires_grad_(n in asked)
        calls = []
        for number in range(WARM + 1):
            for t in tensors.values():
                t.grad = None
            watched = entered if number == WARM else lambda call: call() or []
            made: list[dict] = []
            forward = watched(lambda made=made: made.append(function(*rows)))
            [outputs] = made
            behind = watched(partial(backward, outputs)) if asked else []
            calls.append([*outputs.values(), *[t.grad for t in tensors.values()]])
        for later in calls[1:]:
            for one, other in zip(calls[0], later, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(bits(one), bits(other))
                assert one is None or one.stride() == other.stride()
        assert "call" in forward and set(forward[forward.index("call") + 1 :]) <= {"of"}, forward
        assert behind == [], behind
        if asked:
            assert {t.grad_fn.name() for t in outputs.values() if t.requires_grad} == {
                "TilenormBackward"
            }


@pytest.mark.parametrize("name", FAMILY)
def test_each_form(name):
    """What a form makes by single operations, as the gradient of a layer scale, Python makes."""
    form = FAMILY[name]
    tensors = tensors_of(form, 5, N, dtype=B)
    expected = step(form, tensors)
    for _ in range(WARM):
        assert same(step(form, tensors), expected)


def test_the_graph_of_a_call():
    expected, given = warmed(), leaves(*THREE)
    y = layer(given)
    y.backward(torch.ones_like(y), retain_graph=True)
    assert all(map(torch.equal, expected, [t.grad for t in given.values()]))
    found = torch.autograd.grad(y, list(given.values()), torch.ones_like(y))
    assert all(map(torch.equal, expected, found))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(torch.ones_like(y))


def test_only_what_is_asked_for():
    expected, given = dict(zip(THREE, warmed(), strict=True)), leaves(*THREE)
    y = layer(given)
    for names in (["input"], ["weight"], ["input", "bias"]):
        wanted = [given[n] for n in names]
        for _ in range(WARM):
            ask = partial(torch.autograd.grad, y, wanted, torch.ones_like(y), retain_graph=True)
            found = ask()
        assert all(torch.equal(expected[n], t) for n, t in zip(names, found, strict=True))
        assert entered(ask) == []


def test_second_derivatives():
    warmed()
    found = []
    for function in (
        layer,
        lambda g: nn.functional.layer_norm(g["input"], (N,), *[*g.values()][1:], 1e-6),
    ):
        given = leaves(*THREE)
        y = function(given)
        (dx,) = torch.autograd.grad(
            y, given["input"], torch.ones_like(y) + y.detach(), create_graph=True
        )
        found.append(torch.autograd.grad(dx.square().sum(), list(given.values())[:2]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_errors_of_autograd():
    warmed()
    given = leaves(*THREE)
    x = given["input"] * 1
    y = layer(given | {"input": x})
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))
    given = leaves(*THREE)
    y = layer(given)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        y.backward(torch.ones(2, N))


def test_an_output_that_is_changed_in_place():
    expected, given = warmed(), leaves(*THREE)
    y = layer(given)
    y.mul_(2)
    y.backward(torch.ones_like(y))
    assert torch.equal(given["input"].grad, 2 * expected[0])


def test_hooks_of_saved_tensors():
    expected, seen = warmed(), []
    given = leaves(*THREE)

    def pack(t):
        seen.append(t.shape)
        return t if t.requires_grad else t.numpy().copy()

    def unpack(t):
        return t if isinstance(t, torch.Tensor) else torch.from_numpy(t)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = layer(given)
    y.backward(torch.ones_like(y))
    assert len(seen) == 5  # x, weight, bias, mean, rstd
    assert all(map(torch.equal, expected, [t.grad for t in given.values()]))

    def refuse(t):
        raise ZeroDivisionError

    with torch.autograd.graph.saved_tensors_hooks(refuse, unpack), pytest.raises(ZeroDivisionError):
        layer(leaves(*THREE))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.double()):
        y = layer(leaves(*THREE))
    assert "backward" in entered(partial(y.backward, torch.ones_like(y)))


def test_hooks_of_outputs_and_nodes():
    expected, given, ran = warmed(), leaves(*THREE), []
    y = layer(given)
    y.register_hook(lambda g: 2 * g)
    y.grad_fn.register_hook(lambda into, out: ran.append((len(into), len(out))))
    y.grad_fn.register_prehook(lambda out: ran.append(len(out)))
    y.backward(torch.ones_like(y))
    assert ran == [1, (3, 1)] and torch.equal(given["input"].grad, 2 * expected[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode():
        for _ in range(WARM):
            y = layer(given := leaves(*THREE))
        assert is_served(lambda: layer(given)) and not y.requires_grad
        assert y.is_inference() == (mode is torch.inference_mode)
    warmed()


WRONG = (
    {"normalized_shape": (N + 1,)},
    {"normalized_shape": (True,)},
    {"eps": "x"},
    {"weight": 1},
    {"rounding": "x"},
    {"backend": "x"},
)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_calls_have_the_same_errors(wrong):
    right = {"input": random(5, N), "weight": random(N), "normalized_shape": (N,), "eps": 1e-6}
    told = []
    for _ in range(2):
        with pytest.raises((TypeError, RuntimeError, ValueError)) as raised:
            tilenorm.layer_norm(**right | wrong)
        told.append((raised.type, str(raised.value)))
        for _ in range(WARM):
            tilenorm.layer_norm(**right)
    assert told[0] == told[1]


def test_the_profiler_and_anomaly_mode_see_a_call():
    warmed()
    given = leaves(*THREE)
    with torch.profiler.profile() as seen:
        y = layer(given)
        y.backward(torch.ones_like(y))
    names = {event.name for event in seen.events()}
    assert {"tilenorm::layer_norm", "TilenormBackward"} <= names
    with torch.autograd.detect_anomaly(check_nan=False):
        y = layer(given)
        assert "traceback_" in y.grad_fn.metadata
        y.backward(torch.ones_like(y))


def test_nothing_keeps_the_tensors_of_a_call():
    given = leaves("input", "residual", "weight", "bias")
    for _ in range(WARM):
        y, total = tilenorm.add_layer_norm(
            *[given[n] for n in ("input", "residual")], (N,), eps=1e-6
        )
    alive = [weakref.ref(t) for t in (y, total)]
    del y, total
    gc.collect()
    assert [t() for t in alive] == [None, None]


def test_calls_of_other_dtypes_and_heads_are_other_calls():
    """Also where only a parameter differs: what serves the backward pass is chosen by all dtypes
    and sizes.
    """
    weights = [random(*shape, dtype=d) for shape in ((N,), (2, N), (2, 1, N)) for d in (F, B)]
    x, expected = random(3, 2, N, dtype=B), {}
    for _ in range(WARM + 1):
        for i, values in enumerate(weights):
            w = values.clone().requires_grad_()
            shape = (1, N) if w.dim() == 3 else (N,)
            y = tilenorm.rms_norm(x.view(3, 2, *shape), shape, w, 1e-6)
            y.backward(torch.ones_like(y))
            made = y.detach(), w.grad
            first = expected.setdefault(i, made)
            assert made[1].shape == w.shape and made[1].dtype == w.dtype
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, made, strict=True))
    assert native.state().extension.kinds() == len(weights)


@pytest.mark.parametrize("name", [name for name in OPS if "quantized" not in name])
def test_what_inductors_code_calls(name):
    """Of each op that a step calls, of its own and of its backward pass; also with other rows."""
    use = USES[name]
    if "rms" in name:
        use = use._replace(parameters=tuple(n for n in use.parameters if n != "bias"))
    tensors = use.tensors((B, B), "cpu")
    function, rows = use.bound(tensors)
    tensors.get("layer_scale", rows[0]).requires_grad_("layer_scale" not in tensors)
    with Seen() as seen:
        backward(function(*rows))
    assert {op._opname for op, _ in seen.calls} > {name}
    for op, arguments in seen.calls:
        expected = op(*arguments)
        expected = expected if isinstance(expected, tuple) else (expected,)
        call = made_by_inductor(op._opname, *arguments)
        for _ in range(WARM + 1):
            found = []
            seen_python = entered(lambda call=call, found=found: found.append(call()))
            for one, other in zip(*found, expected, strict=True):
                assert other.numel() == 0 if one is None else torch.equal(one, other)
                assert one is None or one.stride() == other.stride()
        assert seen_python == [], op
        with Seen():
            assert entered(call)[0] in ("bound_forward", "bound_backward")


def test_many_shapes(launches):
    for rows in range(1, 12):
        warmed(rows)
    launches.clear()
    for rows in range(1, 12):
        given = leaves(*THREE, rows=rows)
        y = layer(given)
        y.backward(torch.ones_like(y))
    assert len(launches) == 22


def test_views_of_one_projection():
    """Queries and keys that are views of one projection are read in place, by their strides."""
    cos = torch.rand(6, 16)
    for width in (3, 4, 3, 4):
        packed = random(6, width * 2, 32, seed=width)
        call = partial(tilenorm.rms_norm_rope, packed[:, :2], (32,), cos, cos, key=packed[:, 2:4])
        results = [call() for _ in range(WARM)]
        assert is_served(call)
        for made in results[1:]:
            assert all(map(torch.equal, results[0], made))
    shifted = torch.zeros(6, 3, 64)
    other = [shifted[:, 0], shifted[:, 1:].mean(1)]
    for scale in other * 3:
        x = random(2, 3, 64)
        y = tilenorm.modulated_layer_norm(x.flatten(0, 1), (64,), scale, scale)
        torch.testing.assert_close(y, nn.functional.layer_norm(x.flatten(0, 1), (64,)))
