"""The parts of a quantised norm with a linear: transposed codes, and products of 8-bit floats."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional as F

import tilenorm
from tests.executors import described
from tests.guarded import guarded
from tilenorm.launch.calls import bound
from tilenorm.launch.target import Target
from tilenorm.ops.quantized import cutile, product, reference, transposed
from tilenorm.ops.tensors import Saved
from tilenorm.spec import NormSpec, Options, Quantization
from tilenorm.tools.precompile import compile_call

from .helpers import EPS, random
from .pretended import pretended_gpu

SERVED = pytest.mark.parametrize("served", ["reference", "sm_90", "sm_100"])
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])
B, F32 = torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")


@SERVED
@pytest.mark.parametrize("rows", [1, 128, 200])
def test_transposed_codes(served, rows):
    """Of a matrix and of normalised rows, which are those of the forward pass."""
    x, w = random(rows, 72, dtype=B), random(72, dtype=B, seed=1)
    x[0, 3] = torch.nan
    with nullcontext() if served == "reference" else pretended_gpu(served):
        y = tilenorm.rms_norm(x, (72,), w, EPS, bias=w, rounding="early")
        rstd = torch.ops.tilenorm.norm(
            *(x, None, None, w, w, *Options(72, "rms", rounding="early"), EPS, True)
        )[-1]
        target = Target.of("sm_90" if served == "reference" else served)
        for normalized, m in ((False, x), (True, y)):
            saved = Saved(x, None, w, w, None, rstd) if normalized else Saved(x, *[None] * 5)
            spec = spec_of(rounding="early", affine=normalized)
            if served == "reference":
                q, scale = transposed.reference(spec, saved, EPS)
            else:
                with guarded():
                    q, scale = cutile.transposed(spec, target, saved, EPS)
            check_codes(q, scale, m.t())


def spec_of(norm="rms", dtype="bfloat16", affine=True, **fields) -> NormSpec:
    if affine:
        fields |= {"weight": dtype, "bias": "float32" if norm == "layer" else dtype}
    return NormSpec(norm, 72, dtype, quantized=Quantization("row"), **fields)


def check_codes(q: Tensor, scale: Tensor, matrix: Tensor) -> None:
    """That they are the codes of a matrix (N, M), padded to whole groups with zeros."""
    count = -(-matrix.shape[1] // 128) * 128
    expected = F.pad(matrix.contiguous(), (0, count - matrix.shape[1]))
    assert scale.shape == (72, count // 128) and scale.stride() == (1, 72)
    how = Quantization("block", layout="row")
    spec = NormSpec("rms", count, "bfloat16", quantized=how)
    codes, scales, _ = reference.quantize(spec, expected)
    assert torch.equal(q.float().nan_to_num(999), codes.float().nan_to_num(999))
    assert torch.equal(scale.nan_to_num(999), scales.nan_to_num(999))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_kernel_compiles_and_does_not_spill(arch):
    compiled = []

    def run(launches, arrays, index):
        calls = bound(launches, described(arrays))
        compiled.extend(compile_call(call, arch) for call in calls)

    w, v = random(72, dtype=B), random(300)
    bare = Saved(random(300, 72, dtype=B), *[None] * 5)
    layer = Saved(random(300, 72), None, random(72), random(72), v, v)
    rms = bare._replace(weight=w, bias=w, rstd=v)
    cases = [(spec_of(affine=False), bare), (spec_of(), rms), (spec_of("layer", "float32"), layer)]
    for spec, saved in cases:
        cutile.transposed(spec, Target.of(arch), saved, EPS, run=run)
    assert [c.kernel for c in compiled] == ["transposed"] * len(cases)
    assert not any(c.spill_bytes for c in compiled)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="F.scaled_mm is of PyTorch 2.10")
@pytest.mark.parametrize("rows", [1, 6, 128])
@pytest.mark.parametrize("groups", [1, 2])
def test_scaled_mm_takes_the_layouts(rows, groups, monkeypatch):
    """PyTorch checks the shapes and strides of tensors that pretend to be on CUDA."""
    monkeypatch.setattr(product, "refused", lambda blocks, device: None)
    with FakeTensorMode():
        empty, size = torch.empty, 128 * groups
        a = empty(rows, size, dtype=E4M3, device="cuda")
        b = empty(48, size, dtype=E4M3, device="cuda")
        scale_a, scale_b = (empty(groups, n, device="cuda").t() for n in (rows, 48))
        bias = empty(48, device="cuda")
        for dtype, given in ((B, bias), (F32, None)):
            found = product.scaled_product(a, b, scale_a, scale_b, given, dtype)
            assert found.shape == (rows, 48) and found.dtype == dtype and found.is_contiguous()


@NORMS
def test_opcheck(norm):
    x, g = random(5, 32, dtype=B), random(5, 16, dtype=B, seed=1)
    mean, rstd = random(5, seed=2) if norm == "layer" else None, random(5, seed=3).abs()
    tests = ("test_schema", "test_faketensor")
    given = (g, x, x[0], None, mean, rstd, 32, norm, 0.0, "late", EPS, F32)
    opcheck(torch.ops.tilenorm.norm_linear_weight_gradient.default, given, test_utils=tests)
    a, b = x.to(E4M3), random(16, 32).to(E4M3)
    given = (a, b, torch.ones(5, 1), torch.ones(16, 1), torch.ones(16), B)
    # The other test compares 8-bit floats by operations that PyTorch does not have for them.
    opcheck(torch.ops.tilenorm.scaled_product.default, given, test_utils=tests[1])


REFUSED = [
    ((9, 0), "13.0", None, None),
    ((9, 0), "12.8", None, "blocks take cuBLAS of CUDA 12.9, got 12.8"),
    ((10, 0), "13.0", None, "blocks take a GPU of sm_90, got sm_100"),
    ((8, 9), "13.0", None, "blocks take a GPU of sm_90, got sm_89"),
    ((8, 0), "13.0", "sm_80 has no products of 8-bit floats", "blocks take a GPU of sm_90"),
]


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="F.scaled_mm is of PyTorch 2.10")
@pytest.mark.parametrize("found, toolkit, by_row, by_block", REFUSED)
def test_what_gpus_do_not_serve(found, toolkit, by_row, by_block, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    for blocks, expected in ((False, by_row), (True, by_block)):
        reason = product.refused.__wrapped__(blocks, torch.device("cuda"))
        assert reason == expected or reason.startswith(expected)
        assert product.refused(blocks, torch.device("cpu")) is None
