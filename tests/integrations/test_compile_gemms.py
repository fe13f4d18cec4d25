"""tilenorm.compile(gemms=True): sums of gradients are added up inside the multiplications."""

import pytest
import torch

import tilenorm
from tilenorm.integrations import compile as compiling
from tilenorm.integrations.fx.gemms import MM, MM_SUM

from ..ops.helpers import random
from .stepwise import counted, sums
from .test_compile_folds import BF16, GEMMS, ROWS, N, block, step
from .test_fold_models import LAYERS, SIZES, WIDTH, gradients, model

# A norm's gradient in a block reads products of 2 and 3 weights. Five multiplications become two.
MULTIPLICATIONS = ["2 multiplications", "3 multiplications"]


def errors(got: dict, exact: dict) -> dict[str, float]:
    """The root of the sum of squares of each tensor's error, in units of that of the tensor."""
    return {name: ((got[name] - e).norm() / e.norm()).item() for name, e in exact.items()}


def eager(module, x) -> dict:
    """As step, without a compiler."""
    x = x.detach().requires_grad_()
    y = module(x)
    dy = random(*y.shape, dtype=BF16, seed=9).to(y.dtype)
    named = {"input": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(y, list(named.values()), dy)
    return dict(zip(named, grads, strict=True)) | {"output": y.detach()}


def test_products_are_added_up_in_multiplications(stepwise):
    """Every gradient's error is at most twice eager's."""
    x = random(2, ROWS, N, dtype=BF16)
    got, report = step(block(), x, memory="low", **GEMMS)
    kinds = [kind for kind, _ in report.folded]
    assert kinds[:2] == MULTIPLICATIONS and sorted(kinds[2:]) == ["output", "output", "sum"]
    assert not report.unfolded and "3 multiplications folded" in str(report)
    (backward,) = stepwise.backward
    assert not sums(backward.graph, N) and counted(backward.graph, MM_SUM) == 2
    # Seven of weights, and those of o and down.
    assert counted(backward.graph, MM) == 9
    exact = eager(block().double(), x.double())
    most = errors(eager(block(), x), exact)
    for name, error in errors(got, exact).items():
        assert error <= 2 * most[name], name


@pytest.mark.slow
def test_one_graph_with_multiplications_for_every_batch(stepwise, dynamo):
    module = block(dtype=torch.float32)
    run = tilenorm.compile(module, fullgraph=True, dynamic=True, **GEMMS)
    for rows in (4, 7, 9):
        x = random(2, rows, N).requires_grad_()
        with dynamo.config.patch(error_on_recompile=rows != 4):
            y = run(x)
        dy = random(2, rows, N, seed=3)
        named = (x, *module.parameters())
        got = torch.autograd.grad(y, named, dy)
        for a, b in zip(got, torch.autograd.grad(module(x), named, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    assert [kind for kind, _ in run.tilenorm_report.folded] == [*MULTIPLICATIONS, "sum"]
    assert len(stepwise.backward) == 1


@pytest.mark.slow
def test_gradients_of_llama(stepwise):
    """Of every parameter: the error is at most twice that of eager PyTorch."""
    found, report = gradients("llama", **GEMMS)
    kinds = [kind for kind, _ in report.folded]
    assert [kinds.count(kind) for kind in MULTIPLICATIONS] == [LAYERS, LAYERS]
    assert not report.unfolded
    with_sums = stepwise.backward[-1].graph
    plain, _ = gradients("llama")
    without = stepwise.backward[-1].graph
    assert not sums(with_sums, WIDTH) and counted(with_sums, MM_SUM) == 2 * LAYERS
    assert counted(without, MM) - counted(with_sums, MM) == 5 * LAYERS
    assert not counted(without, MM_SUM)
    results = []
    for dtype in (torch.float64, BF16):
        module = model("llama").to(dtype)
        ids = torch.arange(32).view(2, 16) * 5 % SIZES["vocab_size"]
        y = module(input_ids=ids)[0]
        y.backward(random(*y.shape, dtype=BF16, seed=2).to(dtype))
        results.append({n: p.grad for n, p in module.named_parameters()})
    exact, in_bf16 = results
    most = errors(in_bf16, exact)
    assert found.keys() == exact.keys() == plain.keys()
    for name, error in errors(found, exact).items():
        assert error <= 2 * most[name], name
    assert any(not torch.equal(found[name], grad) for name, grad in plain.items())


def test_code_with_multiplications_is_not_shared():
    """Layers that are compiled alone share the code of equal backends."""
    backends = [
        compiling._ReplacingBackend(print, None, None, gemms, True) for gemms in (False, True, True)
    ]
    assert backends[0] != backends[1] == backends[2]


def test_wrong_values_of_gemms():
    with pytest.raises(TypeError, match="compile: argument 'gemms' takes a bool, got str"):
        tilenorm.compile(block(), gemms="all")
    message = "'gemms' takes True with backend 'inductor' alone, got backend 'aot_eager'"
    with pytest.raises(ValueError, match=message):
        tilenorm.compile(block(), backend="aot_eager", **GEMMS)
