"""Under torch.autocast the outputs have the dtypes that PyTorch's own functions would give them."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import tilenorm

from .helpers import (
    DTYPES,
    EACH_FORM,
    NEEDS_GPU,
    arguments_by_port,
    by_pytorch,
    call,
    name_of,
    op_call,
    tensors_of,
)
from .use_states import autocast

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@EACH_FORM
@pytest.mark.parametrize("parameter", [None, F32], ids=["parameters alike", "parameters float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_dtypes(kind, form, dtype, parameter):
    with torch.autocast("cpu", BF16) if kind == "cpu" else autocast(F16), FakeTensorMode():
        tensors = tensors_of(form, 5, 40, dtype=dtype, parameter=parameter)
        tensors = {n: torch.empty_like(t, device=kind) for n, t in tensors.items()}
        without_bias = {n: t for n, t in tensors.items() if n != "bias"}
        got, expected = call(form, tensors), by_pytorch(form, without_bias)
        assert [y.dtype for y in got] == [y.dtype for y in expected]
        assert [y.shape for y in got] == [y.shape for y in expected]
        by_op = op_call(form.op, arguments_by_port(tensors), 40, **form.options)
        assert [y.dtype for y in [*by_op.values()][: len(got)]] == [y.dtype for y in got]


def test_the_cpu_is_not_concerned_by_autocast_for_cuda():
    with autocast(F16), FakeTensorMode():
        x = torch.empty(5, 40, dtype=BF16)
        assert tilenorm.rms_norm(x, (40,)).dtype == F.rms_norm(x, (40,)).dtype == BF16


@NEEDS_GPU
def test_on_a_gpu_a_region_without_autocast_keeps_the_dtype():
    x = torch.randn(5, 64, device="cuda", dtype=BF16)
    with torch.autocast("cuda", BF16), torch.autocast("cuda", enabled=False):
        assert tilenorm.rms_norm(x, (64,)).dtype == BF16
