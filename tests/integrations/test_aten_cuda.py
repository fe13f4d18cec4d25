"""tilenorm.override on a GPU: PyTorch's functions and modules return tilenorm's exact results."""

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tests.support.calls import NEEDS_GPU, name_of, random
from tests.support.on_gpu import capture
from tilenorm.integrations import aten
from tilenorm.ops.passes import cutile

from .aten_helpers import registered
from .graphs import step

pytestmark = NEEDS_GPU
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def kernels(no_memory, monkeypatch):
    """A list to which each pass that tilenorm's kernels run is added: "forward" or "backward"."""
    passes = []
    for name in ("forward", "backward"):
        bind = getattr(cutile, f"bind_{name}")

        def bound(*args, name=name, bind=bind):
            function = bind(*args)
            return lambda *a: passes.append(name) or function(*a)

        monkeypatch.setattr(cutile, f"bind_{name}", bound)
    # The override remembers its runners, which call the functions that were there before.
    monkeypatch.setattr(aten, "_CUDA", aten.Override("CUDA", aten.Kernels(aten._cuda_runner)))
    yield passes
    tilenorm.disable()


@pytest.fixture(autouse=True)
def restored():
    """Check that every test leaves PyTorch's kernels registered as before."""
    before = registered()
    yield
    tilenorm.disable()
    assert registered() == before


def inputs_of(norm: str, *shape: int, dtype=BF16) -> list[torch.Tensor]:
    """An input, a weight and, for a LayerNorm, a bias."""
    sizes = [shape] + [shape[-1:]] * (2 if norm == "layer" else 1)
    return [random(*size, dtype=dtype, device="cuda", seed=s) for s, size in enumerate(sizes)]


def output_and_grads(function, tensors) -> list[torch.Tensor]:
    return step(lambda x, *others: function(x, x.shape[-1:], *others), tensors)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


EACH_NORM = pytest.mark.parametrize("norm", ["rms", "layer"])


@EACH_NORM
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name_of)
@pytest.mark.parametrize("n", [64, 1001, 4096, 65536])
def test_functional_norms_return_tilenorms_bits(kernels, norm, dtype, n):
    tensors = inputs_of(norm, 37, n, dtype=dtype)
    expected = output_and_grads(getattr(tilenorm, f"{norm}_norm"), tensors)
    kernels.clear()
    with tilenorm.override():
        got = output_and_grads(getattr(F, f"{norm}_norm"), tensors)
    assert kernels == ["forward", "backward"]
    assert equal(got, expected)


@EACH_NORM
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name_of)
def test_statistics_have_pytorchs_shapes_and_dtypes(norm, dtype):
    x, *parameters = inputs_of(norm, 2, 3, 64, dtype=dtype)
    op = torch.ops.aten.native_layer_norm if norm == "layer" else torch.ops.aten._fused_rms_norm
    expected = op(x, (64,), *parameters, 1e-5)
    with tilenorm.override():
        got = op(x, (64,), *parameters, 1e-5)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(a, b)


@EACH_NORM
def test_capture_in_a_cuda_graph(norm):
    tensors = inputs_of(norm, 300, 4096)
    leaves = [t.clone().requires_grad_() for t in tensors]
    dy = random(300, 4096, dtype=BF16, device="cuda", seed=9)

    def step() -> dict:
        y = getattr(F, f"{norm}_norm")(leaves[0], (4096,), *leaves[1:])
        return dict(enumerate((y.detach(), *torch.autograd.grad(y, leaves, dy))))

    with tilenorm.override():
        graph, captured = capture(step)
    graph.replay()
    torch.cuda.synchronize()
    expected = output_and_grads(getattr(tilenorm, f"{norm}_norm"), tensors)
    assert equal(captured.values(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EACH_NORM
def test_kernels_run_on_the_inputs_device(kernels, norm):
    tensors = inputs_of(norm, 37, 4096)
    with tilenorm.override():
        expected = output_and_grads(getattr(F, f"{norm}_norm"), tensors)
        leaves = [t.to("cuda:1").requires_grad_() for t in tensors]
        y = getattr(F, f"{norm}_norm")(leaves[0], (4096,), *leaves[1:])
        assert y.get_device() == 1 and torch.cuda.current_device() == 0
        assert torch.equal(y.to("cuda:0"), expected[0])
    assert kernels == ["forward", "backward", "forward"]
