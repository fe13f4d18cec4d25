"""Calls that the extension in C++ serves, told by what a call enters in Python, and modules,
processes and threads that share it.

The kernels are interpreted. Tests of other files run calls by the extension too: see `by`.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support.calls import made_by_inductor, random
from tests.support.passes import Seen
from tests.support.quantized import bits
from tests.support.served import THREE, WARM, N, entered, is_served, layer, leaves, warmed
from tests.support.uses import USES, of_kernels
from tilenorm.ops.passes import native
from tilenorm.table import OPS

pytestmark = pytest.mark.usefixtures("by_extension")

B, F = torch.bfloat16, torch.float32
MODULES = ("RMSNorm", "LayerNorm", "ModulatedRMSNorm", "ModulatedLayerNorm")
# What the backward pass of these makes by other operations, or norm by norm.
ONE_BY_ONE = ("layer_scale",)


def backward(outputs: dict, seed: int = 7) -> None:
    outputs = {n: t for n, t in outputs.items() if t.requires_grad}
    made = [random(*t.shape, dtype=t.dtype, seed=seed + i) for i, t in enumerate(outputs.values())]
    torch.autograd.backward(list(outputs.values()), made)


USED = [name for name, use in USES.items() if name in OPS or name in MODULES]


@pytest.mark.parametrize("dtypes", [(B, B), (F, F), (B, F)], ids=str)
@pytest.mark.parametrize("name", USED)
def test_each_function_and_module(name, dtypes):
    """Bits, gradients and what is asked for, from the call on from which the extension serves."""
    use = of_kernels(name)
    if dtypes[0] != dtypes[1] and not use.mixed:
        pytest.skip("takes one dtype")
    tensors = use.tensors(dtypes, "cpu")
    function, rows = use.bound(tensors)
    plain = [n for n in tensors if n not in ONE_BY_ONE]
    for asked in ([], plain, Random(f"{name} {dtypes}").sample(plain, 1)):
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
    use = of_kernels(name)
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


def test_views_of_one_projection():
    """Queries and keys are read in place, by strides that may be others in the next call."""
    cos = torch.rand(6, 16)
    for width in (3, 4, 3, 4):
        packed = random(6, width * 2, 32, seed=width)
        call = partial(tilenorm.rms_norm_rope, packed[:, :2], (32,), cos, cos, key=packed[:, 2:4])
        results = [call() for _ in range(WARM)]
        assert is_served(call)
        for later in results[1:]:
            assert all(map(torch.equal, results[0], later))


def test_a_reentrant_checkpoint():
    """test_asked.py has the others."""
    expected, given = warmed(), leaves(*THREE)
    for _ in range(2):
        for t in given.values():
            t.grad = None
        y = checkpoint(
            lambda x, w, b: layer(dict(zip(THREE, (x, w, b), strict=True))),
            *given.values(),
            use_reentrant=True,
        )
        y.backward(torch.ones_like(y))
        assert all(map(torch.equal, expected, [t.grad for t in given.values()]))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = tilenorm.RMSNorm(N), tilenorm.LayerNorm(N)

    def forward(self, x):
        return self.second(self.first(x))


def of_module(model: nn.Module) -> list[torch.Tensor]:
    """The output and the gradients of a step."""
    model.zero_grad()
    y = model(x := random(5, N).requires_grad_())
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def warmed_module() -> tuple[nn.Module, list[torch.Tensor]]:
    model = Two()
    expected = of_module(model)
    for _ in range(WARM):
        of_module(model)
    return model, expected


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "file"]
)
def test_copies_of_modules(copied):
    model, expected = warmed_module()
    other = copied(model)
    assert all(map(torch.equal, expected, of_module(other)))
    x = random(5, N)
    assert is_served(lambda: other.first(x), 3) == is_served(lambda: model.first(x), 3)


@pytest.mark.filterwarnings("ignore")
def test_export_of_a_module_that_has_been_served():
    model, expected = warmed_module()
    x = random(5, N)
    exported = torch.export.export(model, (x,), strict=True)
    calls = [node.name for node in exported.graph.nodes if node.op == "call_function"]
    assert any("rms_norm" in name for name in calls)
    torch.testing.assert_close(exported.module()(x), expected[0])
    assert all(map(torch.equal, expected, of_module(model)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd's threads do not live in a fork")
def test_a_forked_process():
    """It has the extension of its parent, and what that has learnt."""
    model, expected = warmed_module()
    context = torch.multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def child():
        found = []
        try:
            names = entered(lambda: found.extend(of_module(model)))
            told.put((all(map(torch.equal, expected, found)), "checked" in names))
        except Exception as error:
            told.put(repr(error))

    process = context.Process(target=child)
    process.start()
    assert told.get() == (True, False)
    process.join()
    assert process.exitcode == 0


def together(*functions: Callable) -> None:
    """Call functions, each in a thread. Raises what one of them raises."""
    start = threading.Barrier(len(functions))
    with ThreadPoolExecutor(len(functions)) as threads:
        for called in [threads.submit(lambda f=f: (start.wait(), f())) for f in functions]:
            called.result()


def test_threads_in_other_modes():
    """As of DataParallel: each thread has its own mode, and one module serves them all."""
    model, expected = warmed_module()
    x, wrong = random(5, N), []

    def infer():
        for _ in range(10):
            with torch.no_grad():
                y = model(x)
            wrong.extend([y] * (y.requires_grad or not torch.equal(y, expected[0])))

    def train():
        for _ in range(10):
            mine = copy.copy(x).requires_grad_()
            y = model(mine)
            (dx,) = torch.autograd.grad(y, mine, torch.ones_like(y))
            wrong.extend([dx] * (not torch.equal(dx, expected[1])))

    def transformed():
        for _ in range(3):
            y = torch.func.vmap(model)(x[None])[0].detach()
            wrong.extend([y] * (not torch.allclose(y, expected[0], atol=1e-5)))

    together(infer, train, infer, transformed)
    assert not wrong
