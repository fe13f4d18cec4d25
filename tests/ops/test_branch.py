"""A dropout mask and a layer scale of the input of add_rms_norm and add_layer_norm.

A call has the bits of the same operations one after the other, and so have its gradients. That of
the layer scale, a sum over rows, is within the error of float32.
"""

import pytest
import torch

import tilenorm

from .helpers import EACH_DEVICE, EPS, leaves_of, name_of, op_call, random
from .pretended import EACH_WAY, by

pytestmark = EACH_DEVICE
N = 40
SCALE = 1 / 0.9
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Dtypes of the input, of the residual and of the layer scale.
DTYPES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, F32), (F16, F32, F16)]
DTYPES += [(BF16, F16, BF16), (F64, F64, F64)]
OPS = ("add_rms_norm", "add_layer_norm")
KINDS = {"mask": ("dropout_mask",), "scale": ("layer_scale",)}
KINDS["both"] = ("dropout_mask", "layer_scale")
EACH_OP = pytest.mark.parametrize("op", OPS)
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
EACH_DTYPES = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(map(name_of, d)))


def made(kind, *shape, dtypes=(F32, F32, F32), device="cpu", dims=1, parameter=None):
    """The tensors of a call, by the names of its arguments."""
    dtype, residual, scale = dtypes
    size, parameter = shape[-dims:], parameter or shape[-dims:]
    tensors = {
        "input": random(*shape, dtype=dtype, device=device),
        "residual": random(*shape, dtype=residual, device=device, seed=1),
        "weight": random(*parameter, dtype=dtype, device=device, seed=2),
        "bias": random(*parameter, dtype=dtype, device=device, seed=3),
        "dropout_mask": random(*shape, device=device, seed=4) > -1,
        "layer_scale": random(*size, dtype=scale, device=device, seed=5),
    }
    return {n: t for n, t in tensors.items() if n in kind or n not in KINDS["both"]}


def call(op, tensors, dims=1, **options):
    scale = {"dropout_scale": SCALE} if "dropout_mask" in tensors else {}
    shape = tensors["input"].shape[-dims:]
    return getattr(tilenorm, op)(
        **tensors, normalized_shape=shape, **{"eps": EPS} | scale | options
    )


def branched(tensors):
    """The input as it is added, by PyTorch's operations, which round once each."""
    x, dtype = tensors["input"], tensors["input"].dtype
    compute = F64 if dtype == F64 else F32
    if "dropout_mask" in tensors:
        x = (x.to(compute) * (tensors["dropout_mask"].to(compute) * SCALE)).to(dtype)
    if "layer_scale" in tensors:
        x = (x.to(compute) * tensors["layer_scale"].to(compute)).to(dtype)
    return x


def apart(op, tensors, dims=1, **options):
    rest = {n: t for n, t in tensors.items() if n not in KINDS["both"]}
    return call(op, rest | {"input": branched(tensors)}, dims, **options)


def step(op, tensors, function=call, used=(True, True), **options):
    """Outputs, and gradients under the names of what they are of. used: of each output."""
    leaves = leaves_of(tensors)
    outputs = function(op, leaves, **options)
    dys = [
        random(*y.shape, dtype=y.dtype, device=y.device, seed=9 + i) for i, y in enumerate(outputs)
    ]
    pairs = [p for p, on in zip(zip(outputs, dys, strict=True), used, strict=True) if on]
    torch.autograd.backward(*zip(*pairs, strict=True))
    found = {"output": outputs[0].detach(), "sum": outputs[1].detach()}
    return found | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def compare(found, expected, names=None):
    """Equal bits, but for the layer scale: PyTorch rounds each product before it adds them up.

    On a GPU a kernel without the mask and the scale may add up a row in another order.
    """
    for name in expected if names is None else names:
        if found[name].is_cuda and name not in ("sum", "layer_scale"):
            close = {F16: 2e-3, BF16: 2e-2, F32: 1e-5, F64: 1e-10}[found["output"].dtype]
            torch.testing.assert_close(found[name], expected[name], rtol=close, atol=close)
            continue
        if name == "layer_scale":
            bound = {F16: 2e-2, BF16: 1e-1, F32: 1e-4, F64: 1e-10}
            close = max(bound[found[name].dtype], bound[found["output"].dtype])
            torch.testing.assert_close(found[name], expected[name], rtol=close, atol=close)
        else:
            assert torch.equal(found[name], expected[name]), name


@EACH_WAY
@EACH_OP
@EACH_KIND
@EACH_DTYPES
def test_bits_are_those_of_the_operations_one_after_the_other(device, op, kind, dtypes, served):
    tensors = made(kind, 7, N, dtypes=dtypes, device=device)
    with by(served, device):
        for used in ((True, True), (True, False), (False, True)):
            found, expected = step(op, tensors, used=used), step(op, tensors, apart, used)
            assert found.keys() == expected.keys()
            assert {n: t.dtype for n, t in found.items()} == {
                n: t.dtype for n, t in expected.items()
            }
            compare(found, expected)


@EACH_WAY
@EACH_OP
def test_the_gradient_of_the_layer_scale(device, op, served):
    tensors = made(KINDS["both"], 300, N, dtypes=(BF16, BF16, F32), device=device)
    with by(served, device):
        found = step(op, tensors)["layer_scale"]
        rest = {n: t for n, t in tensors.items() if n not in KINDS["both"]}
        dsum = step(op, rest | {"input": branched(tensors)})["residual"]
    masked = {n: tensors[n] for n in ("input", "dropout_mask")}
    products = dsum.double() * branched(masked).double()
    torch.testing.assert_close(found.double(), products.sum(0), rtol=1e-5, atol=1e-4)


@EACH_OP
def test_the_mask_of_pytorchs_dropout(device, op):
    tensors = made((), 64, N, device=device)
    dropped, mask = torch.ops.aten.native_dropout(tensors["input"], 0.1, True)
    found = call(op, tensors | {"dropout_mask": mask})
    assert torch.equal(found[1], dropped + tensors["residual"])


def test_what_the_op_refuses(device):
    x = random(5, N, device=device)
    for message, residual, others in (
        ("take one residual", x, {"addend": x, "dropout_mask": x > 0}),
        ("third dtype has fewer bits", x.bfloat16(), {"addend": x}),
    ):
        given = {"input": x.half() if "third" in message else x, "residual": residual, **others}
        with pytest.raises(NotImplementedError, match=message):
            op_call("add_rms_norm", given, N, save=False)


def test_what_is_explained(device):
    x = random(5, N, device=device)
    how = {"dropout_mask": x > 0, "dropout_scale": 2.0, "layer_scale": x[0]}
    told = str(tilenorm.explain("add_rms_norm", x, x, (N,), eps=EPS, **how))
    assert "input masked, times 2" in told and "layer scale float32" in told
