"""PyTorch's private names: each is taken away, raises or answers wrongly in turn, and the ops take
the public way, which gives the same results.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.support.private_names import NAMES, VARIABLES, absent, loaded
from tilenorm.ops.pytorch import torch_checks, torch_private

ROOT = Path(__file__).parents[2]
CUDA = {
    "_C._dynamo.guards._empty_strided_cuda": "empty_strided_cuda",
    "_C._cuda_getCurrentRawStream": "current_stream",
}
ENGINE = (
    "autograd.Variable._execution_engine.is_checkpoint_valid",
    "_C._will_engine_execute_node",
    "_C._current_autograd_node",
)
CHECKED = [name for name in NAMES if name not in (*CUDA, *ENGINE)]


def raises(*_, **__):
    raise RuntimeError("a name with another meaning")


class Raises:
    """Raises, whatever is done with it."""

    __call__ = raises

    def __getattr__(self, name):
        raise TypeError("a name with another meaning")


def as_guards(answer):
    return lambda *tensors, **_: SimpleNamespace(check=lambda *given: answer)


def without_sizes(*tensors, dynamic_dims_sizes, dynamic_dims_strides):
    free = [[None] * t.dim() for t in tensors]
    kind = torch._C._dynamo.guards.TensorGuards
    return kind(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)


def no_bits(*_):
    return SimpleNamespace(raw_repr=lambda: 0)


def every_bit(*_):
    return SimpleNamespace(raw_repr=lambda: (1 << 63) - 1)


# Of each name, stand-ins that answer wrongly.
WRONG = {
    "_C._dynamo.guards.TensorGuards": [as_guards(True), as_guards(False), without_sizes],
    "_C._dynamo.guards._reinterpret_tensor": [
        torch.as_strided,  # autograd sees it
        lambda x, shape, strides: x.detach().clone().as_strided(shape, strides),
        lambda x, shape, strides: x.detach(),
    ],
    "_C._len_torch_dispatch_stack": [lambda: 0, lambda: 1],
    "_C._dispatch_keys": [no_bits, every_bit],
    "_C._dispatch_tls_local_include_set": [no_bits, every_bit],
    "_C.DispatchKeySet": [no_bits],
    "_C.DispatchKey": [SimpleNamespace()],
    "_C._functorch.peek_interpreter_stack": [lambda: None],
    "_C._functorch.CInterpreter": [object, type(None)],
    "autograd.forward_ad._current_level": [],  # torch_private asks forward_ad for it each time
    "autograd.Function._backward_cls": [],  # and a Function for this
    "_C._AutoDispatchBelowAutograd": [nullcontext],
    "_fused_rms_norm": [lambda x, *_: (x, x[:, :1]), torch.native_layer_norm],
    "ops.aten._unsafe_view.default": [torch.Tensor.view, lambda x, shape: x],
    "nn.modules.module._has_any_global_hook": [lambda: False, dict],
}


def test_every_checked_name_has_wrong_stand_ins():
    assert [*WRONG] == CHECKED


def assert_public(module, name: str) -> None:
    """Only the name, and those that are used with it, are not found."""
    for other in CHECKED:
        values = [getattr(module, variable) for variable in VARIABLES[other]]
        assert any(values) == (VARIABLES[other] != VARIABLES[name]), other


@pytest.mark.parametrize("name", CHECKED)
def test_another_meaning_leads_to_the_public_way(name):
    for found in (absent, Raises, *(lambda wrong=wrong: wrong for wrong in WRONG[name])):
        assert_public(loaded({name: found}), name)


@pytest.mark.parametrize("name", ["_current_level", "_backward_cls"])
def test_another_meaning_of_an_attribute(name, monkeypatch):
    """Of those that are read again at each use."""
    path = next(path for path in CHECKED if path.endswith(name))
    if name == "_current_level":
        monkeypatch.setattr(torch.autograd.forward_ad, "dual_level", nullcontext)
    else:  # whose node finds its function elsewhere
        monkeypatch.setattr(torch_checks._Double, "backward", staticmethod(lambda ctx, dy: dy))
    assert_public(loaded({}), path)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, wrong) for name in ENGINE for wrong in (raises, lambda *_: None)),
        *((name, lambda *_: True) for name in ENGINE[:2]),
        (ENGINE[0], lambda: False),
    ],
)
def test_another_meaning_of_what_the_engine_tells(name, wrong):
    module = loaded({name: lambda: wrong})
    assert not module._engine_tells()
    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen = []

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x + w

        @staticmethod
        def backward(ctx, dy):
            seen.append(module.asked_of(ctx))
            return dy, dy

    torch.autograd.grad(Sum.apply(x, w).sum(), [x])
    assert seen == [(True, True)]


def imitated_cuda(monkeypatch) -> list[int]:
    """torch.cuda with one device and no GPU. Returns the current stream's number in a list."""
    streams = [7]

    class Stream(nullcontext):
        cuda_stream = 8

        def __init__(self, index=None):
            pass

        def __enter__(self):
            streams.append(8)

        def __exit__(self, *_):
            streams.pop()

    for name, function in {
        "current_device": lambda: 0,
        "current_stream": lambda index=None: SimpleNamespace(cuda_stream=streams[-1]),
        "Stream": Stream,
        "stream": lambda stream: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return streams


def test_the_stream_is_checked_at_the_first_call(monkeypatch):
    streams = imitated_cuda(monkeypatch)
    for given in (right := lambda index: streams[-1], raises, lambda *_: 7, lambda *_: None):
        module = loaded({"_C._cuda_getCurrentRawStream": lambda given=given: given})
        for _ in range(2):
            assert module.current_stream(0) == 7
        assert (module.current_stream is given) == (given is right)


def test_the_allocation_is_checked_at_the_first_call(monkeypatch):
    imitated_cuda(monkeypatch)
    name, made = "_C._dynamo.guards._empty_strided_cuda", object()
    wrong = torch.empty_strided  # on the CPU, and the strides of an argument by name
    for given in (raises, wrong, lambda *_: None):
        module = loaded({name: lambda given=given: given})
        monkeypatch.setattr(module, "_empty_cuda_public", lambda *_: made)
        public = module._at_first_call(
            CUDA[name], module.checks.allocates_on_cuda, given, module._empty_cuda_public
        )
        assert public((2,), (1,), torch.float32) is made
        assert module.empty_strided_cuda is module._empty_cuda_public


def test_this_pytorch_has_every_name(device):
    """Were one missing, calls would take longer, and nothing would tell."""
    missing = [name for name in CHECKED if not all(map(_value, VARIABLES[name]))]
    assert not missing and torch_private._engine_tells()
    if device == "cuda":
        torch.ones(1, device="cuda")
        for path, name in CUDA.items():
            arguments = {"current_stream": (0,), "empty_strided_cuda": ((1,), (1,), torch.int8)}
            getattr(torch_private, name)(*arguments.get(name, ()))
            assert getattr(torch_private, name) is torch_private._named(path)


def _value(variable: str) -> object:
    return getattr(torch_private, variable)


@pytest.mark.parametrize(
    "state", [FakeTensorMode, torch.inference_mode, torch.no_grad, lambda: torch.device("meta")]
)
def test_the_state_at_the_import_does_not_matter(state):
    with state():
        module = loaded({})
    assert all(getattr(module, v) for name in CHECKED for v in VARIABLES[name])


# PyTorch is loaded once. For each name a process forks, in which torch_private does not find it.
# The first one finds every name, and keeps its results for the others.
WITHOUT_EACH = """
import os, sys, traceback
import cuda.tile, torch, torch._dynamo
from tests.support.private_names import absent, stand_ins

def results():
    from tests.support.calls import CALLS, FEW, step, tensors_of
    from tests.support.pretended import by
    found = []
    for form in map(CALLS.get, FEW):
        tensors = tensors_of(form, 5, 40, dtype=torch.bfloat16)
        for served in ("reference", "kernels"):
            with by(served):
                found += [step(form, tensors) for _ in range(4)]
    return found

def check(file, name):
    with stand_ins({name: absent}):
        import tilenorm
    if not name:
        torch.save(results(), file)
    for one, other in zip(results(), torch.load(file), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one), name

file, *names = sys.argv[1:]
for name in ("", *names):
    child = os.fork()
    if child == 0:
        try:
            check(file, name)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], f"fails without {name}"
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_results_are_right_without_each(tmp_path):
    """Right, as test_drawn.py holds them where every name is there."""
    one_of_each = {together: name for name, together in VARIABLES.items()}.values()
    command = [sys.executable, "-c", WITHOUT_EACH, tmp_path / "results", *one_of_each]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
