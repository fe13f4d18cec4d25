"""The compiled code that transposes and quantises rows writes what the reference writes."""

import pytest
import torch

from tests.ops.helpers import EPS, random
from tilenorm.ops.quantized import cutile, transposed
from tilenorm.ops.tensors import Saved
from tilenorm.spec import NormSpec, Quantization

from .code import nvdisasm
from .executor import Compiled

B = torch.bfloat16


@pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("rows, size", [(130, 72), (128, 64)])
def test_codes_are_those_of_the_reference(rows, size):
    executor, x = Compiled("sm_90"), random(rows, size, dtype=B)
    w, b = random(size, dtype=B, seed=1), random(size, dtype=B, seed=2)
    # Powers of two have no rounding that two orders of operations would do differently.
    rstd = torch.exp2(torch.arange(rows) % 5 - 2.0)
    x_hat = (x * rstd[:, None]).to(B)
    y = ((x_hat * w).float() + b.float()).to(B)
    how = {"rounding": "early", "quantized": Quantization("row")}
    affine = NormSpec("rms", size, "bfloat16", "bfloat16", "bfloat16", **how)
    bare = NormSpec("rms", size, "bfloat16", **how)
    for spec, saved, rows_of in (
        (bare, Saved(x, *[None] * 5), x),
        (affine, Saved(x, None, w, b, None, rstd), y),
    ):
        q, scale = cutile.transposed(spec, executor.target, saved, EPS, run=executor.run())
        expected = transposed.reference(bare, Saved(rows_of, *[None] * 5), EPS)
        assert torch.equal(q.float(), expected[0].float()) and torch.equal(scale, expected[1])
