"""The torch.library ops: their contracts, and what compilers and tracers make of them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tilenorm

from .helpers import DEVICES, name_of, random

OPS = torch.ops.tilenorm
ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)


def parameters(names, n, dtype, device):
    """Weight and bias as `names` tells, None where it does not."""
    return tuple(
        random(n, dtype=dtype, device=device, seed=seed).requires_grad_() if name in names else None
        for seed, name in enumerate(("weight", "bias"), 1)
    )


INPUTS = {
    "matrix": lambda device: random(3, 40, device=device),
    "bfloat16": lambda device: random(3, 40, dtype=torch.bfloat16, device=device),
    "float64": lambda device: random(3, 40, dtype=torch.float64, device=device),
    "three dimensions": lambda device: random(2, 3, 40, device=device),
    "one row": lambda device: random(40, device=device),
    "no rows": lambda device: random(0, 40, device=device),
    "transposed": lambda device: random(40, 3, device=device).t(),
    "rows apart": lambda device: random(3, 48, device=device)[:, :40],
}


@ON_EACH_DEVICE
@pytest.mark.parametrize("names", ["", "weight", "bias", "weight bias"], ids=lambda n: n or "none")
@pytest.mark.parametrize("case", INPUTS)
def test_opcheck_forward(device, case, names):
    x = INPUTS[case](device).detach().requires_grad_()
    weight, bias = parameters(names, 40, x.dtype, device)
    opcheck(OPS.rms_norm.default, (x, weight, bias, 40, 1e-6, 1.0, True))


@ON_EACH_DEVICE
@pytest.mark.parametrize("case", INPUTS)
def test_opcheck_forward_without_saving(device, case):
    x = INPUTS[case](device)
    assert OPS.rms_norm(x, None, None, 40, 1e-6, 0.0, False)[1].shape == (0,)
    opcheck(OPS.rms_norm.default, (x, None, None, 40, 1e-6, 0.0, False))


@ON_EACH_DEVICE
@pytest.mark.parametrize("mask", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=name_of)
@pytest.mark.parametrize("case", INPUTS)
def test_opcheck_backward(device, case, mask):
    x = INPUTS[case](device)
    weight, bias = (p.detach() for p in parameters("weight bias", 40, torch.float32, device))
    _, rstd = OPS.rms_norm(x, weight, bias, 40, 1e-6, 0.0, True)
    dy = torch.ones_like(x)
    mask = [bool(m) for m in mask]
    opcheck(OPS.rms_norm_backward.default, (dy, x, weight, bias, rstd, 40, 1e-6, 0.0, mask))


def test_a_backward_pass_without_rstd_says_so():
    x = random(3, 8).requires_grad_()
    y, _ = OPS.rms_norm(x, None, None, 8, 1e-6, 0.0, False)
    with pytest.raises(RuntimeError, match="save was False, its backward needs rstd; pass True"):
        y.sum().backward()


def step(x, weight, bias):
    y = tilenorm.rms_norm(x, x.shape[-1:], weight, bias=bias, offset=1.0)
    return y, torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y) * 0.5)


def function(x, weight, bias):
    return tilenorm.rms_norm(x, x.shape[-1:], weight, bias=bias, offset=1.0)


def counting(device):
    """A backend that counts graphs: inductor, where it needs no C++ compiler."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


@ON_EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("n", [40, 1001])
def test_compiled_the_same_bits_without_recompiling(device, n, dtype, dynamo):
    counter = counting(device)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    weight, bias = parameters("weight bias", n, torch.float32, device)
    for rows in (3, 16, 17, 1000):
        x = random(rows, n, dtype=dtype, device=device).requires_grad_()
        dy = random(rows, n, dtype=dtype, device=device, seed=9)
        with dynamo.config.patch(error_on_recompile=rows != 3):
            got = compiled(x, weight, bias)
        expected = function(x, weight, bias)
        assert torch.equal(got, expected)
        grads = [torch.autograd.grad(y, (x, weight, bias), dy) for y in (got, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), rows
    assert counter.frame_count == 1
    assert not dynamo.utils.counters["graph_break"]


@ON_EACH_DEVICE
def test_compiled_without_gradients(device, dynamo):
    counter = counting(device)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    weight, bias = (p.detach() for p in parameters("weight bias", 40, torch.float32, device))
    for rows in (3, 5):
        x = random(rows, 40, device=device)
        assert torch.equal(compiled(x, weight, bias), function(x, weight, bias))
    assert counter.frame_count == 1


@ON_EACH_DEVICE
@pytest.mark.parametrize("layout", ["rows apart", "transposed"])
def test_compiled_strided_input(device, layout, dynamo):
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counting(device))
    x = INPUTS[layout](device)
    weight, bias = parameters("weight bias", 40, torch.float32, device)
    assert torch.equal(compiled(x, weight, bias), function(x, weight, bias))


@ON_EACH_DEVICE
def test_compiled_between_other_operations(device, dynamo):
    def block(x, weight):
        return (tilenorm.rms_norm(x * 2, (40,), weight, 1e-5) + 1).relu()

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting(device))
    x, weight = random(5, 40, device=device), random(40, device=device, seed=1)
    torch.testing.assert_close(compiled(x, weight), block(x, weight), rtol=1e-6, atol=1e-6)


def targets(graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_ops(mode):
    inputs = random(3, 40).requires_grad_(), *parameters("weight bias", 40, torch.float32, "cpu")
    seen = targets(make_fx(step, tracing_mode=mode)(*inputs).graph)
    assert seen.count(OPS.rms_norm.default) == seen.count(OPS.rms_norm_backward.default) == 1
    assert not [t for t in seen if "mean" in str(t)], "the reference was traced, not the op"


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_export_sees_the_op_for_any_number_of_rows(strict):
    class Module(torch.nn.Module):
        def forward(self, x, weight):
            return tilenorm.rms_norm(x, (40,), weight)

    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    inputs = random(3, 40), random(40, seed=1)
    program = torch.export.export(Module(), inputs, dynamic_shapes=({0: rows}, None), strict=strict)
    assert OPS.rms_norm.default in targets(program.graph)
    x = random(7, 40, seed=2)
    assert torch.equal(program.module()(x, inputs[1]), tilenorm.rms_norm(x, (40,), inputs[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40), (40,), (0, 40)], ids=name_of)
def test_meta_tensors(shape, dtype):
    x = torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(shape[-1:], dtype=torch.float32, device="meta")
    y, rstd = OPS.rms_norm(x, weight, None, shape[-1], 1e-6, 0.0, True)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, "meta")
    assert rstd.shape == (x.numel() // shape[-1],)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grads = OPS.rms_norm_backward(
        y, x, weight, None, rstd, shape[-1], 1e-6, 0.0, [True, True, False]
    )
    assert [g.shape for g in grads] == [x.shape, weight.shape, (0,)]
    assert [g.dtype for g in grads[:2]] == [dtype, torch.float32]


def test_a_fake_of_any_number_of_rows():
    inputs = random(6, 40).requires_grad_(), *parameters("weight bias", 40, torch.float32, "cpu")
    graph = make_fx(step, tracing_mode="symbolic")(*inputs).graph
    (forward,) = (node for node in graph.nodes if node.target is OPS.rms_norm.default)
    (backward,) = (node for node in graph.nodes if node.target is OPS.rms_norm_backward.default)
    y, rstd = forward.meta["val"]
    dx, dw, db = backward.meta["val"]
    for tensor in (y, rstd, dx):
        assert isinstance(tensor.shape[0], torch.SymInt), "the number of rows became a constant"
    assert dw.shape == db.shape == y.shape[1:]
