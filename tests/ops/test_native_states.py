"""The extension in C++ in PyTorch's states: modes, transforms, compilers, copies, forks, threads.

The kernels are interpreted, see test_native.py.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilenorm
from tilenorm.ops.passes import native

from .helpers import random
from .served import THREE, WARM, N, entered, is_served, layer, leaves, warmed

pytestmark = pytest.mark.usefixtures("by_extension")


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


class Other(torch.Tensor):
    pass


SEEN: list = []
DUAL = partial(forward_ad.make_dual)
STATES = {
    "a dispatch mode": lambda x, f: within(Operations(), x, f),
    "a function mode": lambda x, f: within(Functions(), x, f),
    "a subclass": lambda x, f: f(x.as_subclass(Other)),
    "vmap": lambda x, f: torch.func.vmap(f)(x[None]),
    "a constant of vmap": lambda x, f: torch.func.vmap(lambda i: i * f(x))(torch.ones(2)),
    "a gradient of torch.func": lambda x, f: torch.func.grad(lambda t: f(t).sum())(x),
    "strided": lambda x, f: f(torch.stack([x, x], -1)[..., 0]),
    "unaligned": lambda x, f: f(torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)),
    "other rows": lambda x, f: f(x[:2]),
    "another dtype": lambda x, f: f(x.bfloat16()),
    "an int for eps": lambda x, f: tilenorm.layer_norm(x, (N,), eps=1),
    "a list for the shape": lambda x, f: tilenorm.layer_norm(x, [N], eps=1e-6),
    "one size more": lambda x, f: f(x.unflatten(0, (5, 1))),
    "jit": lambda x, f: torch.jit.trace(f, x, check_trace=False)(x),
}


def within(context, x, f):
    SEEN.clear()
    with context:
        y = f(x)
    assert SEEN
    return y


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_plain_goes_to_python(name):
    """And computes what it computes where no call is remembered."""
    x, w = random(5, N), random(N, seed=1)

    def f(x):
        return tilenorm.layer_norm(x, (N,), w.to(x.dtype), None, 1e-6)

    native.state().forget()
    expected = STATES[name](x, f)
    for _ in range(WARM):
        f(x)
    assert is_served(lambda: f(x))
    made = []
    assert not is_served(lambda: made.append(STATES[name](x, f)), 3)
    torch.testing.assert_close(made[0], expected, rtol=0, atol=0)


def test_a_dual_level():
    x = random(5, N)
    for _ in range(WARM):
        tilenorm.layer_norm(x, (N,))
    with forward_ad.dual_level():
        y = tilenorm.layer_norm(forward_ad.make_dual(x, torch.ones_like(x)), (N,))
        assert forward_ad.unpack_dual(y).tangent is not None


def test_compiled_graphs(dynamo):
    warmed()
    given = leaves(*THREE)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(y, layer(given), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    expected, given = warmed(), leaves(*THREE)
    for _ in range(2):
        for t in given.values():
            t.grad = None
        y = checkpoint(
            lambda x, w, b: layer(dict(zip(THREE, (x, w, b), strict=True))),
            *given.values(),
            use_reentrant=reentrant,
        )
        y.backward(torch.ones_like(y))
        assert all(map(torch.equal, expected, [t.grad for t in given.values()]))


@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd(dynamo):
    expected = warmed()
    for _ in range(2):
        given = leaves(*THREE)
        y = layer(given)
        assert y.grad_fn.name() == "TilenormBackward"
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(torch.ones_like(y))
        for one, t in zip(expected, given.values(), strict=True):
            torch.testing.assert_close(t.grad, one)


def test_deterministic_mode(monkeypatch):
    """PyTorch then fills memory that is not written. The kernels write all of theirs."""
    expected = warmed()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, expected, warmed()))
    finally:
        torch.use_deterministic_algorithms(False)


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
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module_that_has_been_served(strict):
    model, expected = warmed_module()
    x = random(5, N)
    exported = torch.export.export(model, (x,), strict=strict)
    calls = [node.name for node in exported.graph.nodes if node.op == "call_function"]
    assert any("rms_norm" in name for name in calls)
    torch.testing.assert_close(exported.module()(x), expected[0])
    assert all(map(torch.equal, expected, of_module(model)))


def test_transforms_of_a_call_that_has_been_served():
    warmed()
    x, w = random(5, N), random(N, seed=1)

    def f(x, w):
        return tilenorm.rms_norm(x, (N,), w, 1e-6).square().mean()

    def g(x, w):
        return nn.functional.rms_norm(x, (N,), w, 1e-6).square().mean()

    for _ in range(WARM):
        f(x.clone().requires_grad_(), w).backward()
        f(x, w)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        if transform is torch.func.hessian:
            x = x[:1, :8]
            f, g = (
                lambda x, w, f=f: f(nn.functional.pad(x, (0, N - 8), value=0.5), w) for f in (f, g)
            )
        torch.testing.assert_close(transform(f)(x, w), transform(g)(x, w), rtol=1e-3, atol=1e-5)


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


def test_threads():
    """Four threads, whose backward passes run beside each other, have the bits of one."""
    expected, wrong = warmed(), []

    def run():
        for _ in range(10):
            given = leaves(*THREE)
            y = layer(given)
            y.backward(torch.ones_like(y))
            wrong.extend(
                n for n, t in zip(given, expected, strict=True) if not torch.equal(given[n].grad, t)
            )

    together(run, run, run, run)
    assert not wrong
