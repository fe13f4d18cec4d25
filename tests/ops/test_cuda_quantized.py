"""On a GPU: quantised norms, and norms in chains."""

from random import Random

import pytest
import torch
from torch.nn import functional as F

import tilenorm
from tests.guarded import guarded
from tilenorm.ops.quantize import quantize
from tilenorm.spec import NormSpec, Quantization

from . import test_chain
from .helpers import NEEDS_GPU, random

pytestmark = NEEDS_GPU
B = torch.bfloat16


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
