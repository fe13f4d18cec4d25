"""On a GPU: quantised norms, and norms in chains."""

from itertools import cycle
from random import Random

import pytest
import torch
from torch.nn import functional as F

import tilenorm
from tests.guarded import guarded
from tests.quantized import HOWS, label
from tilenorm.ops.quantize import quantize
from tilenorm.spec import NormSpec, Quantization

from . import test_chain
from .helpers import NEEDS_GPU, RMS, random, tensors_of
from .test_quantized import EACH_QUANTIZED, compared

pytestmark = NEEDS_GPU
B, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Tiles of several rows, tiles of one, tile loads, and rows that blocks share.
WHOLE = (128, 512, 2048, 4096, 5120, 8192, 10240, 16384, 32768, 65536)
ANY = (1, 7, 36, 1000, 1001, *WHOLE)


@EACH_QUANTIZED
@pytest.mark.parametrize("how", HOWS, ids=label)
def test_codes_are_those_of_the_plain_norm(form, how):
    rng = Random(f"{form.op} {label(how)}")
    for hidden, dtype in zip(WHOLE if how.group else ANY, cycle((B, F16, B, F32)), strict=False):
        dtypes = {"dtype": dtype, "parameter": rng.choice((dtype, F32))}
        tensors = tensors_of(form, rng.choice((1, 130, 333)), hidden, **dtypes, device="cuda")
        if "rms" in form.op and rng.random() < 0.7:
            del tensors["bias"]
        compared(form, how, tensors, backend="cutile")


def test_rows_of_zeros_nan_and_infinity():
    x = random(9, 256, dtype=B, device="cuda")
    x[1], x[2, 5], x[3, 7], x[4] = 0.0, torch.nan, torch.inf, 1e-38
    for how in HOWS:
        for rows in (x, x[:0]):
            compared(RMS, how, {"input": rows}, backend="cutile")


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="needs the F.scaled_mm of PyTorch 2.10")
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_what_scaled_mm_makes_of_the_codes(scaling):
    """As near to the product in float32 as 8-bit floats allow."""
    x, w = (random(n, 2048, dtype=B, device="cuda", seed=n) for n in (512, 256))
    q, scale, *_ = tilenorm.rms_norm_quantized(x, (2048,), scaling=scaling)
    how = Quantization(scaling, layout="column" if scaling == "block" else "row")
    codes, scales, _ = quantize(NormSpec("rms", 2048, "bfloat16", quantized=how), w)
    recipe = F.ScalingType.RowWise if scaling == "row" else F.ScalingType.BlockWise1x128
    scales = scales.t() if scaling == "row" else scales
    found = F.scaled_mm(q, codes.t(), scale, recipe, scales, recipe, output_dtype=B).float()
    expected = F.rms_norm(x.float(), (2048,)) @ w.float().t()
    noise = (found - expected).square().sum() / expected.square().sum()
    assert 10 * noise.log10() < -25  # decibels: an 8-bit float has 3 bits of mantissa


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")  # float64
@pytest.mark.parametrize("dtypes", test_chain.DTYPES[:3], ids=str)
def test_chains(norm, dtypes):
    """The error is at most twice that of the two functions; rows have the same bits anywhere."""
    rng = Random(f"{norm} {dtypes}")
    for hidden in (7, 128, 1001, 2304, 4096, 5376, 16384):
        kinds = rng.choice(dtypes), rng.choice(dtypes)
        tensors = test_chain.made(norm, 257, hidden, dtypes=dtypes, weights=kinds)
        rows, parameters = ([t.cuda() for t in group] for group in tensors)
        options = {"offset": rng.choice((0.0, 1.0)), "rounding": rng.choice(("late", "early"))}
        with guarded():
            found = test_chain.chain(norm, rows, (hidden,), parameters, **options)
        apart = test_chain.apart(norm, rows, (hidden,), parameters, **options)
        doubled = ([t.double() for t in group] for group in (rows, parameters))
        exact = test_chain.apart(norm, next(doubled), (hidden,), next(doubled), **options)
        for one, other, true in zip(found, apart, exact, strict=True):
            few = 4 * torch.finfo(one.dtype).eps * true.abs().max()
            assert (one - true).abs().max() <= 2 * (other - true).abs().max() + few
        order = torch.randperm(257, device="cuda")
        moved = [t[order] for t in rows]
        permuted = test_chain.chain(norm, moved, (hidden,), parameters, **options)
        assert all(torch.equal(p, t[order]) for p, t in zip(permuted, found, strict=True))
