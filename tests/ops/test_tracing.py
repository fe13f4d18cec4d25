"""What traces or changes a program sees the op: torch.jit.trace, make_fx, modes, dispatch keys."""

import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilenorm
from tilenorm.ops.direct import is_plain

from .helpers import FAMILY, RMS, call, random, same, step, tensors_of

pytestmark = [
    pytest.mark.usefixtures("way"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
FORMS = ["rms_norm", "add_layer_norm", "gated_rms_norm, gate first"]
EACH_FORM = pytest.mark.parametrize("form", [FAMILY[name] for name in FORMS], ids=FORMS)
N = 16


class Called(nn.Module):
    """A function of a form's tensors, in their order."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, *tensors):
        return call(self.form, dict(zip(self.form.names, tensors, strict=True)))


def changed(tensors):
    return {
        n: random(*t.shape, device=t.device, seed=20 + i)
        for i, (n, t) in enumerate(tensors.items())
    }


@EACH_FORM
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_records_the_op(device, form, grad):
    """It follows other values and numbers of rows, and has gradients, wherever it was traced."""
    tensors = tensors_of(form, 3, N, device=device)
    call(form, tensors)  # what is remembered is not taken while tracing
    with torch.set_grad_enabled(grad):
        of = [t.clone().requires_grad_(grad) for t in tensors.values()]
        traced = torch.jit.trace(Called(form), of, check_trace=True)
    assert f"tilenorm::{form.op}" in str(traced.graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    other = changed(tensors_of(form, 5, N, device=device))
    for function in (traced, torch.jit.load(file)):
        got = step(form, other, function=lambda _, given: function(*given.values()))  # noqa: B023
        assert same(got, step(form, other))


def test_jit_trace_of_modules_and_of_a_traced_shape(device):
    model = nn.Sequential(tilenorm.RMSNorm(N), nn.Linear(N, N), tilenorm.LayerNorm(N)).to(device)
    x, other = random(3, N, device=device), random(7, N, device=device, seed=1)
    assert torch.equal(torch.jit.trace(model, x)(other), model(other))
    traced = torch.jit.trace(lambda x: tilenorm.rms_norm(x, x.shape[-1:]), x)
    assert torch.equal(traced(other), tilenorm.rms_norm(other, (N,)))


def traced_by_jit(run, x):
    torch.jit.trace(run, x, check_trace=False)


def fake(run, x):
    with FakeTensorMode() as mode:
        run(mode.from_tensor(x))


def functionalized(run, x):
    torch._enable_functionalization(reapply_views=True)
    try:
        run(torch._to_functional_tensor(x))
    finally:
        torch._disable_functionalization()


def beside_functionalization(run, x):
    torch._enable_functionalization(reapply_views=True)
    try:
        run(x)
    finally:
        torch._disable_functionalization()


def with_a_key_of_the_thread(run, x):
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Negative):
        run(x)


SURROUNDINGS = {
    "jit": traced_by_jit,
    "make_fx": lambda run, x: make_fx(run)(x),
    "fake": fake,
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
    "functional wrappers": functionalized,
    "functionalization of the thread": beside_functionalization,
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "grad": lambda run, x: torch.func.grad(lambda x: run(x).sum())(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
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
