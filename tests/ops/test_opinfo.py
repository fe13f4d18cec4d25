"""PyTorch's own test samples of F.rms_norm and F.layer_norm (OpInfo), run with tilenorm.

A sample holds arguments of one call. PyTorch's tests run its functions with these samples. Here
tilenorm's functions have to give PyTorch's values, gradients and exceptions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import tilenorm
from tilenorm.ops.arguments import default_eps
from tilenorm.ops.tensor_checks import DTYPES

from .helpers import EACH_DEVICE, FAMILY, assert_within, expected_of, name_of, random
from .pretended import by

OPINFO = {
    name: info
    for name in ("rms_norm", "layer_norm")
    for info in op_db
    if info.name == f"nn.functional.{name}"
}
NAMES = {"rms_norm": ("weight", "eps"), "layer_norm": ("weight", "bias", "eps")}
pytestmark = [EACH_DEVICE, pytest.mark.parametrize("op", OPINFO)]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


class Call(NamedTuple):
    """The arguments of one sample: its tensors by name, normalized_shape and eps."""

    tensors: dict[str, Tensor]
    shape: tuple[int, ...]
    eps: float | None

    @classmethod
    def of(cls, op: str, sample: SampleInput) -> "Call":
        shape, *rest = sample.args
        named = dict(zip(NAMES[op], rest, strict=False)) | sample.kwargs
        eps = named.pop("eps", None if op == "rms_norm" else 1e-5)
        tensors = {"input": sample.input} | {n: t for n, t in named.items() if t is not None}
        return cls(tensors, tuple(shape), eps)

    def run(self, function) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output and its gradients."""
        leaves = {n: t.detach().requires_grad_() for n, t in self.tensors.items()}
        y = function(**leaves, normalized_shape=self.shape, eps=self.eps)
        dy = random(*y.shape, dtype=y.dtype, device=y.device, seed=1)
        return y, torch.autograd.grad(y, list(leaves.values()), dy)


def samples_of(info: OpInfo, device: str, dtype: torch.dtype) -> Iterator[SampleInput]:
    """Each sample, and the same sample with tensors that are not contiguous."""
    for make in (info.sample_inputs, info.reference_inputs):
        for sample in make(device, dtype):
            yield sample
            yield sample.noncontiguous()


def assert_budget(name: str, got: Tensor, exact: Tensor, peer: Tensor, *terms, **options) -> None:
    """assert_within, where a NaN has to stand for a NaN. A negative eps makes rows of NaN."""
    nan, peer = exact.isnan(), peer.detach().cpu()
    assert torch.equal(got.detach().cpu().isnan(), nan), f"{name}: other elements are NaN"
    exact = exact.masked_fill(nan, 0)
    peer = torch.where(peer.isfinite() & ~nan, peer.double(), exact)
    terms = [t if t is None else t.masked_fill(nan, 0) for t in terms]
    assert_within(name, got.detach().cpu().masked_fill(nan, 0), exact, peer, *terms, **options)


@EACH_DTYPE
@pytest.mark.parametrize("served", ["reference", "kernels"])
def test_samples_give_pytorchs_values_and_gradients(device, op, dtype, served):
    with by(served, device):
        check_samples(device, op, dtype)


def check_samples(device, op, dtype) -> None:
    count = 0
    for sample in samples_of(OPINFO[op], device, dtype):
        call = Call.of(op, sample)
        y, grads = call.run(getattr(tilenorm, op))
        theirs, _ = call.run(OPINFO[op].op)
        assert (y.shape, y.dtype, y.device) == (theirs.shape, theirs.dtype, theirs.device)
        eps = default_eps(call.tensors["input"]) if call.eps is None else call.eps
        incoming = [random(*y.shape, dtype=dtype, seed=1)]
        dims = len(call.shape)
        expected = expected_of(FAMILY[op], call.tensors, incoming, dims=dims, eps=eps)
        assert_budget("output", y, *expected["output"])
        rows = max(1, y.numel() // max(1, call.tensors["input"][:1].numel()))
        for (name, tensor), grad in zip(call.tensors.items(), grads, strict=True):
            assert (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)
            assert_budget(name, grad, *expected[name], rows=1 if name == "input" else rows)
        count += 1
    assert count >= 24


def test_dtypes_that_pytorch_takes_alone_are_refused(device, op):
    """README, Limits: complex numbers. Every other dtype of the samples is tested above."""
    kind = torch.device(device).type
    others = OPINFO[op].supported_dtypes(kind) - {*DTYPES}
    assert all(dtype.is_complex for dtype in others)
    assert {*DTYPES} <= OPINFO[op].supported_dtypes(kind)
    for dtype in others:
        sample = next(iter(OPINFO[op].sample_inputs(device, dtype)))
        with pytest.raises(NotImplementedError, match="argument 'input' takes float16"):
            getattr(tilenorm, op)(sample.input, *sample.args, **sample.kwargs)
