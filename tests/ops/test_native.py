"""Calls that the extension in C++ serves: the bits of Python's path, and whatever is not plain goes
to Python.

The kernels are interpreted. What a call enters in Python tells which path has served it.
"""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.quantized import bits
from tilenorm.ops import cutile, native
from tilenorm.ops.native import build
from tilenorm.table import OPS

from .helpers import FAMILY, made_by_inductor, random, same, step, tensors_of
from .passes import Seen
from .pretended import pretended_gpu
from .uses import USES

N = 64
B, F = torch.bfloat16, torch.float32
PACKAGE = Path(tilenorm.__file__).parent
ROOMS = ("kernels", "launch")  # of which the interpreter calls functions
WARM = 4  # calls after which the extension serves
MODULES = ("RMSNorm", "LayerNorm", "ModulatedRMSNorm", "ModulatedLayerNorm")
# What the backward pass of these makes by other operations, or norm by norm.
ONE_BY_ONE = ("layer_scale",)


@pytest.fixture(scope="module", autouse=True)
def extension(extension_file):
    """The extension is in service."""
    if extension_file is None:
        pytest.skip(build.refused() or build.missing())
    before = native.state().extension
    native.state().use(before or build.load(extension_file))
    yield native.state().extension
    native.state().use(before)


@pytest.fixture(autouse=True)
def gpu(extension, no_memory):
    with pretended_gpu():
        yield


@pytest.fixture
def launches(gpu, monkeypatch) -> list[str]:
    """A list that gets a word for each pass that repeats launches."""
    seen, prepare = [], cutile.prepare

    def preparing(*given):
        repeat = prepare(*given)
        return lambda *called: seen.append("repeated") or repeat(*called)

    monkeypatch.setattr(cutile, "prepare", preparing)
    return seen


@cache
def _counts(file: str) -> bool:
    path = Path(file)
    return PACKAGE in path.parents and path.parent.name not in ROOMS


def entered(call: Callable) -> list[str]:
    """The functions of the package that a call enters, kernels left out."""
    seen: list[str] = []

    def profile(frame, event, _):
        if event == "call" and _counts(frame.f_code.co_filename):
            seen.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def is_served(call: Callable, most: int = 2) -> bool:
    """Whether the extension serves a call: nothing of the package runs below `call.call`."""
    seen = entered(call)
    return len(seen) <= most and seen[-1:] in (["call"], [])


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


def leaves(*names: str, rows: int = 5, **how) -> dict[str, torch.Tensor]:
    shapes = {"input": (rows, N), "residual": (rows, N), "weight": (N,), "bias": (N,)}
    made = {n: random(*shapes[n], seed=i, **how) for i, n in enumerate(names)}
    return {n: t.requires_grad_() for n, t in made.items()}


THREE = ("input", "weight", "bias")


def layer(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return tilenorm.layer_norm(given["input"], (N,), given["weight"], given["bias"], 1e-6)


def warmed(rows: int = 5) -> list[torch.Tensor]:
    """Repeats a step of layer_norm until the extension serves it; its gradients."""
    for _ in range(WARM):
        given = leaves(*THREE, rows=rows)
        y = layer(given)
        y.backward(torch.ones_like(y))
    assert is_served(lambda: layer(given))
    return [t.grad for t in given.values()]


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
        with Operations():
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
