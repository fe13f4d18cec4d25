"""Norms of many columns, which patch tries with fewer: the same results, in little time."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

import tilenorm
from tests.support.calls import random
from tilenorm.integrations.patch import recognition, trials, wide

from .norms import Custom

WIDE = {
    "RMSNorm": lambda: nn.RMSNorm(16384),
    "LayerNorm of three dimensions": lambda: nn.LayerNorm((64, 64, 64)),
    "the widest": lambda: nn.LayerNorm(2**20),
    "RMSNorm, the widest": lambda: nn.RMSNorm(2**20),
    "without weight": lambda: nn.LayerNorm((8, 2**15), elementwise_affine=False),
    "Llama": lambda: LlamaRMSNorm(8192),
    "Cohere by heads": lambda: CohereLayerNorm((32, 128)),
}


@pytest.mark.parametrize("name", WIDE)
def test_few_wide_rows_are_tried(name, monkeypatch):
    """All others have few columns. The patched module computes what it computed."""
    module, rows, run = WIDE[name](), [], trials.run
    shape = wide.shape_of(module)

    def counted(twin, *inputs):
        rows.extend(len(t) for t in inputs if t.shape[t.dim() - len(shape) :] == shape)
        return run(twin, *inputs)

    for file in (recognition, trials, wide):
        monkeypatch.setattr(file, "run", counted)
    x = random(3, *shape)
    expected = module(x)
    report = tilenorm.patch(module)
    assert report.patched and 0 < sum(rows) <= 8, report
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


COMMAND = """
import resource, time, torch, tilenorm
from torch import nn
tilenorm.patch(nn.Sequential(nn.LayerNorm((5, 6, 7)), nn.RMSNorm(8)))
SHAPES = (nn.RMSNorm, 16384), (nn.LayerNorm, (64, 64, 64))
SHAPES += (nn.RMSNorm, 2**20), (nn.LayerNorm, 2**20)
modules = [kind(shape) for kind, shape in SHAPES]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for module in modules:
    start = time.process_time()
    assert tilenorm.patch(module).patched
    took, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert took < 1 and peak - before < 300_000, (module, took, peak - before)
"""


@pytest.mark.slow
def test_time_and_memory():
    """Less than a second of CPU time and 0.3 GB beyond the module."""
    subprocess.run([sys.executable, "-c", COMMAND], check=True)


class OfSize(Custom):
    """Its columns are in no attribute, or decide what it computes."""

    def __init__(self, columns, how):
        super().__init__(columns)
        self.how, self.part = how, 1 / columns

    def forward(self, x):
        if self.how == "part":
            square = x.float().square().sum(-1, keepdim=True) * self.part
            return (x.float() * torch.rsqrt(square + self.eps) * self.weight).to(x.dtype)
        return super().forward(x) * (2 if len(self.weight) > 1000 else 1)


def test_a_class_whose_columns_are_in_no_attribute():
    """It has all trials itself, if it is not very wide."""
    (entry,) = tilenorm.patch(OfSize(2048, "part")).patched
    assert entry.how == "rms_norm offset=0.0 rounding=late eps=1e-06"
    (left,) = tilenorm.patch(OfSize(2**17, "part")).left
    assert left.reason == "its outputs match no norm of tilenorm"


def test_a_class_that_computes_something_else_with_many_columns():
    assert tilenorm.patch(OfSize(999, "twice")).patched
    (left,) = tilenorm.patch(OfSize(2048, "twice")).left
    assert left.reason == "its outputs match no norm of tilenorm"
    (left,) = tilenorm.patch(OfSize(2**17, "twice")).left
    assert left.reason.endswith(
        "with fewer columns, but the gradient of the input does not with [131072]"
    )


def test_groups_of_wide_rows():
    (entry,) = tilenorm.patch(Zamba2RMSNormGated(2048, 512)).patched
    assert "groups=4 norm_before_gate=False" in entry.how


def test_a_narrow_module():
    module = nn.LayerNorm((16, 4, 300), dtype=torch.bfloat16, device="meta")
    module.other, module.sizes, module.elements = 300, [16, 4], 16 * 4 * 300
    narrow = wide.narrowed(module, (16, 4, 300))
    assert narrow.normalized_shape == (6, 4, 10) == narrow.weight.shape == narrow.bias.shape
    assert (narrow.other, narrow.sizes, narrow.elements) == (10, [6, 4], 240)
    assert type(narrow) is nn.LayerNorm and module.other == 300 and module.weight.shape[0] == 16
