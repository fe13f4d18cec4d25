"""The kernels of a step, and the bytes that each moves."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench import kernels
from bench.kernels import Launched, Ran, counted, listed
from tilenorm.launch import calls
from tilenorm.launch import kernel as launching


def test_kernels_of_one_name_take_their_bytes_in_the_order_of_their_launches():
    launches = [
        Launched("norm_backward", "norm_backward of 6 arrays", 600),
        Launched("triton_poi_fused_add_0", "triton_poi_fused_add_0", 50),
        Launched("norm_backward", "norm_backward of 7 arrays", 700),
        Launched("row_forward", "row_forward of 3 arrays", 300),  # which ran twice: not known
    ]
    ran = [
        Ran("norm_backward_Kt3_A2bf16", 20.0, 2000.0),
        Ran("norm_backward_Kt2_A2bf16", 10.0, 1000.0),
        Ran("triton_poi_fused_add_0", 15.0, 500.0),
        Ran("row_forward_Kt2", 30.0, 100.0),
        Ran("row_forward_Kt2", 35.0, 200.0),
    ]
    assert listed(ran, launches) == [
        {"name": "norm_backward of 7 arrays", "calls": 1, "ms": 2.0, "bytes": 700},
        {"name": "norm_backward of 6 arrays", "calls": 1, "ms": 1.0, "bytes": 600},
        {"name": "triton_poi_fused_add_0", "calls": 1, "ms": 0.5, "bytes": 50},
        {"name": "row_forward_Kt2", "calls": 2, "ms": pytest.approx(0.3), "bytes": None},
    ]


def bfloat16(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


class Tuner:
    """What Inductor's generated code runs, as far as it is looked at."""

    def __init__(self, name: str, arguments: list[str]):
        self.fn = SimpleNamespace(__name__=name, arg_names=arguments)
        self.ran = []

    def run(self, *arguments, stream):
        self.ran.append((arguments, stream))


@pytest.fixture
def inductor(monkeypatch):
    name = "torch._inductor.runtime.triton_heuristics"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "CachingAutotuner", Tuner, raising=False)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (["in_ptr0", "out_ptr0", "xnumel", "XBLOCK"], [bfloat16(8, 4), bfloat16(8, 4), 32], 128),
        (["in_out_ptr0", "in_ptr0", "xnumel"], [bfloat16(32), torch.zeros(32), 32], 2 * 64 + 128),
        # A row of a table of 1000 rows for each of 3 tokens.
        (
            ["in_ptr0", "in_ptr1", "out_ptr0", "xnumel"],
            [torch.zeros(3, dtype=torch.int64), bfloat16(1000, 8), bfloat16(3, 8), 24],
            24 + 48 + 48,
        ),
        # The statistics of rows: the index space is rows times columns.
        (
            ["in_ptr0", "out_ptr0", "xnumel", "r0_numel"],
            [bfloat16(4, 64), torch.zeros(4), 4, 64],
            528,
        ),
        # Two values of the input for each of the output.
        (["in_ptr0", "out_ptr0", "ks0", "xnumel"], [bfloat16(64), bfloat16(32), 0, 32], 192),
        (["in_ptr0", "out_ptr0", "seed"], [bfloat16(64), bfloat16(32), 0], 192),
    ],
)
def test_bytes_of_a_generated_kernel(inductor, names, given, expected):
    kernel = Tuner("triton_poi_fused_0", names)
    with counted() as launches:
        kernel.run(*given, stream=7)
    assert launches == [Launched("triton_poi_fused_0", "triton_poi_fused_0", expected)]
    assert kernel.ran == [(tuple(given), 7)]
    kernel.run(*given, stream=7)
    assert len(launches) == 1


def test_bytes_of_tilenorms_kernels_are_those_of_their_arrays(monkeypatch):
    done = []
    monkeypatch.setattr(launching, "launch_kernel", lambda *given, **how: done.append((given, how)))
    x, weight = bfloat16(8, 4), bfloat16(4)
    kernel = SimpleNamespace(_pyfunc=SimpleNamespace(__name__="row_forward"))
    launch = calls.Launch(kernel, (8,), (3,), lambda arrays: arrays, ((1, 2), True), True)
    with counted() as launches:
        launching.launch(5, [launch], (x, weight, calls.ABSENT, (x, x)))
    assert launches == [Launched("row_forward", "row_forward of 4 arrays", 3 * 64 + 8)]
    assert done == [
        (
            (5, (8,), kernel, (3, (x, weight, (), (x, x)), (1, 2), True)),
            {"programmatic_dependent_launch": True},
        )
    ]


def test_kernels_of_a_step_on_the_gpu(gpu):
    import tilenorm

    x = torch.zeros(64, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: (x * 2).sin())

    def step():
        compiled(x)
        tilenorm.rms_norm(x, (1024,)).sum().backward()

    step()
    found = {line["name"]: line for line in kernels.of_step(step)}
    moved = {name.split(" ")[0]: line["bytes"] for name, line in found.items()}
    size = x.nbytes
    assert moved["norm_backward"] >= 3 * size
    (generated,) = (moved[name] for name in moved if name.startswith("triton_"))
    assert generated == 2 * size
    assert all(line["ms"] > 0 for line in found.values())
