"""A norm, an addition and a norm as one call, which rounds where the two functions do. Of norms of
sums: the gradient of a layer scale, and tensors given twice.
test_drawn.py compares the bits of such sums with those of single operations.
"""

import pytest
import torch

import tilenorm
from tests.support.calls import (
    BRANCHED,
    EACH_JOINED,
    EPS,
    FAMILY,
    before,
    call,
    incoming_of,
    op_call,
    random,
    step,
    tensors_of,
)
from tests.support.pretended import by
from tilenorm.launch import kernel
from tilenorm.launch.plan import chain_refused
from tilenorm.launch.target import Target
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec

B, H, F, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = ((B, B), (F, F), (H, H), (B, F), (F, B), (D, D))


def chain(norm, rows, shape, parameters, **options):
    function = getattr(tilenorm, f"{norm}_norm_add_{norm}_norm")
    return function(*rows, shape, *parameters, **options)


def apart(norm, rows, shape, parameters, **options):
    end = len(parameters) // 2
    before, after = (getattr(tilenorm, f"{norm}_norm{last}") for last in ("_add", ""))
    total = before(*rows, shape, *parameters[:end], **options)
    return after(total, shape, *parameters[end:], **options), total


def made(norm, *shape, dtypes=(B, B), weights=(B, F)):
    """The tensors that have rows, and the weight, and bias if it has one, of each norm."""
    rows = [random(*shape, dtype=d, seed=i) for i, d in enumerate(dtypes)]
    each = [d for d in weights for _ in range(2 if norm == "layer" else 1)]
    return rows, [random(shape[-1], dtype=d, seed=7 + i) for i, d in enumerate(each)]


@pytest.fixture
def passes(monkeypatch):
    """What was launched in one pass."""
    found, launched = [], cutile.Kernels._launched

    def seen(self, *arguments):
        if self._plan.spec.inner:
            found.append(arguments)
        return launched(self, *arguments)

    monkeypatch.setattr(cutile.Kernels, "_launched", seen)
    return found


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_chain_of_one_dtype_is_one_pass(norm, dtypes, passes):
    rows, parameters = made(norm, 3, 40, dtypes=dtypes)
    with by("sm_100"):
        chain(norm, rows, (40,), parameters)
    assert len(passes) == (dtypes in DTYPES[:3])


def test_a_kernel_that_does_not_compile(monkeypatch):
    calls, launched = [], cutile.Kernels._launched

    def fail(self, *arguments):
        if self._plan.spec.inner:
            calls.append(arguments)
            raise kernel.CompileError("no")
        return launched(self, *arguments)

    rows, parameters = made("rms", 3, 40)
    with by("sm_100"):
        expected = apart("rms", rows, (40,), parameters)
        monkeypatch.setattr(cutile.Kernels, "_launched", fail)
        for _ in range(2):
            found = chain("rms", rows, (40,), parameters)
            assert all(map(torch.equal, found, expected))
    assert len(calls) == 1


def spec_of(hidden: int, norm: str = "rms") -> NormSpec:
    dtype = "bfloat16"
    fields = {"weight": dtype, "bias": dtype if norm == "layer" else None, "offset": 1.0}
    before, after = (NormSpec(norm, hidden, dtype, **fields, skip=s) for s in (dtype, None))
    return NormSpec.chained(before, after)


def test_what_one_pass_refuses():
    assert "blocks share a row" in chain_refused(spec_of(65536), Target.of("sm_90"))


N = 40
ADDS = {name: form for name, form in FAMILY.items() if form.other == "residual"}
EACH_ADD = pytest.mark.parametrize("form", ADDS.values(), ids=ADDS)


@pytest.mark.parametrize("name", [n for n, f in BRANCHED.items() if "layer_scale" in f.branch])
def test_the_gradient_of_the_layer_scale(device, name, served):
    form = BRANCHED[name]
    tensors = tensors_of(form, 300, N, dtype=B, device=device)
    tensors["layer_scale"] = tensors["layer_scale"].to(F)
    with by(served, device):
        found = step(form, tensors)
    masked = before(form._replace(branch=form.branch[:-1]), tensors)
    products = found["residual"].double() * masked.double()
    torch.testing.assert_close(found["layer_scale"].double(), products.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [B, H], ids=str)
def test_the_sum_of_each_number_of_16_bits_with_drawn_ones(device, dtype, served):
    """The kernels add in 16 bits. PyTorch adds in float32 and rounds. All bits are equal, also of
    subnormal numbers and of infinities. Those of a NaN may differ.
    """
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=device).view(dtype)
    for seed in range(4):
        order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
        x, residual = numbers.view(-1, 256), numbers[order.to(device)].view(-1, 256)
        with by(served, device):
            _, total = tilenorm.add_rms_norm(x, residual, (256,))
        expected = x + residual
        same = total.view(torch.int16) == expected.view(torch.int16)
        assert (same | (total.isnan() & expected.isnan())).all()
        assert expected.isnan().sum() < (1 << 15)


def test_what_the_op_refuses(device):
    x = random(5, N, device=device)
    for message, given in (
        ("take one residual", {"input": x, "residual": x, "addend": x, "dropout_mask": x > 0}),
        ("third dtype has fewer", {"input": x.half(), "residual": x.bfloat16(), "addend": x}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            op_call("add_rms_norm", given, N, save=False)


@EACH_ADD
def test_gradients_that_accumulate_leave_each_other_alone(device, form):
    """Input and residual may get one tensor, or be one. A second pass adds to a grad in place."""
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, 96, device=device).items()}
    once = step(form, tensors)
    both = tensors | {"residual": tensors["input"]}
    (total,) = torch.autograd.grad(call(form, both), tensors["input"], incoming_of(both))
    apart_from = step(form, both)
    assert torch.equal(total, apart_from["input"] + apart_from["residual"])
    for _ in range(2):
        torch.autograd.backward(call(form, tensors), incoming_of(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name]), name


@EACH_JOINED
def test_a_list_of_residuals_and_a_sequence_of_one(device, form):
    tensors = tensors_of(form, 5, N, device=device)
    x, a, r, w, b = tensors.values()
    function, how = getattr(tilenorm, form.op), {"weight": w, "bias": b, "eps": EPS}
    found = function(x, [a, r], (N,), **how)
    assert all(map(torch.equal, found, call(form, tensors)))
    assert all(map(torch.equal, function(x, (r,), (N,), **how), function(x, r, (N,), **how)))
