"""The kernels of a step."""

import pytest
import torch

from bench import kernels
from bench.kernels import listed


def test_kernels_of_one_function_are_counted_together_and_the_longest_are_first():
    ran = [
        ("row_forward_Kt2_A2bf16", 100.0),
        ("norm_backward_Kt3_A2bf16", 2000.0),
        ("norm_backward_Kt2_A2bf16", 1000.0),
        ("triton_poi_fused_add_0", 500.0),
    ]
    assert listed(ran) == [
        {"name": "norm_backward", "calls": 2, "ms": 3.0},
        {"name": "triton_poi_fused_add_0", "calls": 1, "ms": 0.5},
        {"name": "row_forward", "calls": 1, "ms": pytest.approx(0.1)},
    ]


def test_kernels_of_a_step_on_the_gpu(gpu):
    import tilenorm

    x = torch.zeros(64, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)

    def step():
        tilenorm.rms_norm(x, (1024,)).sum().backward()

    step()
    found = {line["name"]: line for line in kernels.of_step(step)}
    assert "norm_backward" in found and all(line["ms"] > 0 for line in found.values())
