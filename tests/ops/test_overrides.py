"""What traces or changes a program sees the public functions, as PyTorch's own, under
__torch_function__, and the ops below it: torch.fx, torch.jit.trace, modes, subclasses.

PyTorch's dispatcher resolves the state of a tensor whose memory does not hold its values before it
calls a kernel. Such calls are compared with calls on the same values in memory of their own.
"""

import inspect
import io
import pickle
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

import tilenorm
from tests.support.calls import (
    DTYPES,
    FAMILY,
    LAYER,
    RMS,
    arguments_of,
    by_inductor,
    call,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)
from tests.support.passes import Seen, SeenFunctions, Subclass, changed
from tests.support.wrong_calls import right_of
from tilenorm.ops.pytorch.plain import is_plain
from tilenorm.table import OPS, QUANTIZED_NORMS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
EACH_WAY = pytest.mark.usefixtures("way")
N = 16
OPTIONS = {"offset": 1.0, "rounding": "early", "backend": "reference"}


def options_of(form) -> dict:
    """Every keyword of a function, none with its default value."""
    gated = {"norm_before_gate": False, "activation": "sigmoid"}
    return {**OPTIONS, **(gated if form.other == "gate" else {})}


class Answers:
    """No tensor, but something that says what a function gives for it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function, args, kwargs


def bound(op, args, kwargs) -> dict:
    """The arguments of a call by the function's own names."""
    return inspect.signature(getattr(tilenorm, op)).bind(*args, **kwargs).arguments


def test_a_mode_sees_the_public_function_with_its_arguments(device, form):
    """Before a call is remembered, and after that."""
    tensors, options = tensors_of(form, 3, N, device=device), options_of(form)
    given = {**arguments_of(tensors), **options, "normalized_shape": (N,), "eps": 1e-6}
    for _ in range(2):
        with SeenFunctions() as seen:
            got = call(form, tensors, **options)
        [(function, args, kwargs)] = [c for c in seen.calls if "tilenorm" in c[0].__module__]
        assert function is getattr(tilenorm, form.op)
        found = bound(form.op, args, kwargs)
        assert all(alike(found[name], value) for name, value in given.items())
        assert all(map(torch.equal, got, call(form, tensors, **options)))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_mode_sees_what_it_sees_of_pytorchs_function(op):
    x, w = random(3, N), random(N, seed=1)
    seen = {}
    for library in (F, tilenorm):
        with SeenFunctions() as mode:
            getattr(library, op)(x, (N,), w)
        (_, args, kwargs), *_ = mode.calls
        seen[library] = args, kwargs
    (args, kwargs), (ours, our_kwargs) = seen[F], seen[tilenorm]
    assert len(ours) == len(args) and ours[0] is args[0] and ours[1:] == args[1:]
    assert kwargs.items() <= {n: v for n, v in our_kwargs.items() if n in kwargs}.items()


def test_a_subclass_stays_one(device, form):
    tensors = tensors_of(form, 3, N, device=device)
    for name in tensors.keys() - {"addend"}:
        got = call(form, tensors | {name: tensors[name].as_subclass(Subclass)})
        for y, plain in zip(got, call(form, tensors), strict=True):
            assert type(y) is Subclass and torch.equal(y.as_subclass(Tensor), plain)


@pytest.mark.parametrize("op", [op for op in OPS if op not in QUANTIZED_NORMS])
def test_any_tensor_argument_may_answer(op):
    given = right_of(op)
    for name in [name for name, value in given.items() if isinstance(value, Tensor)]:
        answers = Answers()
        function, args, kwargs = getattr(tilenorm, op)(**given | {name: answers})
        assert function is getattr(tilenorm, op)
        assert bound(op, args, kwargs)[name] is answers


def alike(found, value) -> bool:
    if isinstance(value, tuple):
        return all(map(alike, found, value))
    return found is value or (not isinstance(value, Tensor) and found == value)


def test_fx_traces_modules_and_a_shape_that_is_traced():
    model, x = nn.Sequential(tilenorm.RMSNorm(N), tilenorm.LayerNorm(N, offset=1.0)), random(3, N)
    graph = symbolic_trace(model)
    norms = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert norms == [tilenorm.rms_norm, tilenorm.layer_norm]
    for copy in (graph, pickle.loads(pickle.dumps(graph)), symbolic_trace(graph)):
        assert torch.equal(copy(x), model(x))
    graph = symbolic_trace(lambda x: tilenorm.rms_norm(x, x.shape[-1:]))
    for n in (8, N):
        assert torch.equal(graph(random(3, n)), tilenorm.rms_norm(random(3, n), (n,)))


FORMS = ["rms_norm", "add_layer_norm", "gated_rms_norm, gate first"]
EACH_FORM = pytest.mark.parametrize("form", [FAMILY[name] for name in FORMS], ids=FORMS)


@EACH_WAY
@EACH_FORM
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_records_the_op(device, form, grad):
    """It follows other values and numbers of rows, and has gradients, wherever it was traced."""
    tensors = tensors_of(form, 3, N, device=device)
    call(form, tensors)  # what is remembered is not taken while tracing
    with torch.set_grad_enabled(grad):
        of = [t.clone().requires_grad_(grad) for t in tensors.values()]
        traced = torch.jit.trace(
            lambda *given: call(form, dict(zip(tensors, given, strict=True))), of, check_trace=True
        )
    assert f"tilenorm::{form.op}" in str(traced.graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    other = tensors_of(form, 5, N, device=device)
    for function in (traced, torch.jit.load(file)):
        got = step(form, other, function=lambda _, given: function(*given.values()))  # noqa: B023
        assert same(got, step(form, other))


@EACH_WAY
def test_jit_trace_of_modules_and_of_a_traced_shape(device):
    model = nn.Sequential(tilenorm.RMSNorm(N), nn.Linear(N, N), tilenorm.LayerNorm(N)).to(device)
    x, other = random(3, N, device=device), random(7, N, device=device, seed=1)
    assert torch.equal(torch.jit.trace(model, x)(other), model(other))
    traced = torch.jit.trace(lambda x: tilenorm.rms_norm(x, x.shape[-1:]), x)
    assert torch.equal(traced(other), tilenorm.rms_norm(other, (N,)))


def functionalized(run, x, wrapped=True):
    torch._enable_functionalization(reapply_views=True)
    try:
        run(torch._to_functional_tensor(x) if wrapped else x)
    finally:
        torch._disable_functionalization()


def with_a_key_of_the_thread(run, x):
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Negative):
        run(x)


SURROUNDINGS = {
    "fake": lambda run, x: run(FakeTensorMode().from_tensor(x)),
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
    "functional wrappers": functionalized,
    "functionalization of the thread": partial(functionalized, wrapped=False),
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "a key of the thread": with_a_key_of_the_thread,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_no_call_is_direct_where_something_else_has_to_see_it(device, name):
    x = random(3, N, device=device)
    assert is_plain(x)
    asked = []

    def run(x):
        asked.append(is_plain(x))
        return x * 2

    SURROUNDINGS[name](run, x)
    assert asked and not any(asked)
    assert is_plain(x)


def test_under_autocast_a_plain_call_stays_direct(device):
    x = random(3, N, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert is_plain(x)
    with torch.inference_mode():
        assert is_plain(x) and is_plain(call(RMS, {"input": x})[0])


# What gives a tensor of some values a state. A zero tensor has values of its own.
STATES = {
    "plain": lambda x: x,
    "negative": lambda x: torch._neg_view(-x),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else x,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "copy on write": torch._lazy_clone,
    "subclass": lambda x: x.as_subclass(Subclass),
}
DIFFERENTIABLE = ("plain", "negative", "imaginary", "subclass")  # as functions of x


def materialised(x: Tensor | None) -> Tensor | None:
    """The values in memory of their own."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def results(form, tensors, incoming, recorded: bool) -> dict:
    """What a call gives. Gradients go to the tensors as they are, states included."""
    if recorded and any(dy is not None for dy in incoming):
        return step(form, tensors, incoming)
    return dict(enumerate(call(form, tensors)))


@EACH_WAY
def test_any_states_of_any_tensors(device, served):
    rng = Random(served)
    for _ in range(15 if served == "extension" else 50):
        form, recorded = rng.choice([*FAMILY.values()]), rng.random() < 0.5
        shape, dtype = (rng.randint(0, 4), rng.choice((7, 16, 40))), rng.choice(DTYPES[1:3])
        plain = tensors_of(form, *shape, dtype=dtype, device=device)
        states = DIFFERENTIABLE if recorded else [*STATES]
        tensors = {name: STATES[rng.choice(states)](t) for name, t in plain.items()}
        drawn = [(rng.choice((None, *STATES)), dy) for dy in incoming_of(plain)]
        incoming = [None if state is None else STATES[state](dy) for state, dy in drawn]
        plain = {name: materialised(t) for name, t in tensors.items()}
        expected = results(form, plain, [*map(materialised, incoming)], recorded)
        for _ in range(2):
            assert same(results(form, tensors, incoming, recorded), expected)


EACH_STATE = pytest.mark.parametrize("state", [name for name in STATES if name != "subclass"])


def check_each_in_turn(function, arguments, state) -> None:
    """Each tensor in turn in a state, after a call of plain tensors."""
    function(*arguments)
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            other = [*arguments[:place], STATES[state](value), *arguments[place + 1 :]]
            plain = [*arguments[:place], materialised(other[place]), *arguments[place + 1 :]]
            for got, expected in zip(function(*other), function(*plain), strict=True):
                absent = expected is None or not expected.numel()
                assert absent or torch.equal(got, expected)


@EACH_WAY
@EACH_STATE
@pytest.mark.parametrize("of_inductor", [False, True], ids=["op", "bound"])
def test_the_ops_and_what_inductor_calls(device, state, of_inductor):
    form = FAMILY["gated_layer_norm"]
    terms = {f"grad_output_{i}": random(3, 16, device=device, seed=8 + i) for i in (2, 3)}
    with Seen() as ops_seen:
        step(form, tensors_of(form, 3, 16, device=device))
    backward, given = ops_seen.calls[-1]
    for op, arguments in (*ops_seen.calls, (backward, changed(backward, given, **terms))):
        function = by_inductor(op._opname) if of_inductor else op
        check_each_in_turn(function, arguments, state)


@EACH_WAY
@pytest.mark.parametrize("state", ["negative", "imaginary"])
def test_hooks_of_saved_tensors_may_return_any_state(device, state):
    tensors = tensors_of(LAYER, 3, 16, device=device)
    expected = step(LAYER, tensors)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), STATES[state])
    for _ in range(2):
        with hooks:
            got = step(LAYER, tensors)
        assert same(got, expected)


@EACH_WAY
def test_a_sparse_gradient_is_refused_by_the_dispatcher(device):
    x, dy = random(4, 16, device=device).requires_grad_(), random(4, 16, device=device)
    torch.autograd.grad(call(RMS, {"input": x})[0], x, dy)
    with pytest.raises(NotImplementedError, match="norm_backward"):
        torch.autograd.grad(call(RMS, {"input": x})[0], x, dy.to_sparse())
