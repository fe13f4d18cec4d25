"""The FX pass on aten's fused norms and their gradients, with their statistics and masks."""

import itertools
import operator

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from tests.support.calls import (
    EACH_DEVICE,
    EPS,
    LAYER,
    RMS,
    assert_step,
    expected_of,
    name_of,
    random,
    tensors_of,
)
from tilenorm.integrations.fx import replace_norms

from .graphs import ATEN, NORM_BACKWARD, argument, by_hand, calls, kinds_of

BF16, F32 = torch.bfloat16, torch.float32
N = 40
FORMS = {"rms": RMS, "layer": LAYER}
MODULES = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
NAMES = {"rms": ("input", "weight"), "layer": ("input", "weight", "bias")}
EACH_NORM = pytest.mark.parametrize("norm", FORMS)


def aten_tensors(norm, *shape, **options):
    """Every tensor that aten's norm takes, by name."""
    tensors = tensors_of(FORMS[norm], *shape, **options)
    return {name: tensors[name] for name in NAMES[norm]}


def both_passes(norm, mask):
    """A builder for graphs.by_hand: a norm's forward and backward pass in aten's ops."""

    def build(call, x, weight, *bias_and_dy):
        def items(node, count):
            return [call(operator.getitem, node, i) for i in range(count)]

        *bias, dy = bias_and_dy
        if norm == "rms":
            y, *stats = items(call(ATEN._fused_rms_norm.default, x, [N], weight, EPS), 2)
            gradient, affine = ATEN._fused_rms_norm_backward.default, (*stats, weight)
        else:
            y, *stats = items(call(ATEN.native_layer_norm.default, x, [N], weight, *bias, EPS), 3)
            gradient, affine = ATEN.native_layer_norm_backward.default, (*stats, weight, *bias)
        grads = items(call(gradient, dy, x, [N], *affine, mask), len(mask))
        return (y, *grads, *stats)

    return build


MASKS = [
    (norm, list(mask))
    for norm, names in NAMES.items()
    for mask in itertools.product([True, False], repeat=len(names))
    if any(mask)
]


@EACH_DEVICE
@pytest.mark.parametrize("dtype, parameter", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=name_of)
@pytest.mark.parametrize("norm, mask", MASKS, ids=str)
def test_only_requested_gradients_are_computed(device, norm, mask, dtype, parameter):
    """With the names, shapes, strides and dtypes of aten's, and the statistics of its LayerNorm."""
    tensors = aten_tensors(norm, 2, 3, N, dtype=dtype, parameter=parameter, device=device)
    dy = random(2, 3, N, dtype=dtype, device=device, seed=9)
    given = (*tensors.values(), dy)
    graph_module = by_hand(both_passes(norm, mask), *given)
    before = [(n.name, n.meta.get("val")) for n in graph_module.graph.output_node().args[0]]
    stats = graph_module(*given)[-2:] if norm == "layer" and dtype == parameter else ()
    report = replace_norms(graph_module)
    assert kinds_of(report) == [f"{norm}_norm", f"{norm}_norm_backward"] and not report.left
    (call,) = calls(graph_module, NORM_BACKWARD)
    assert sum(argument(call, "output_mask")) == sum(mask)
    nodes, results = graph_module.graph.output_node().args[0], graph_module(*given)
    for (name, like), node, got in zip(before, nodes, results, strict=True):
        assert (node is None) == (got is None) and (node is None or node.name == name)
        for value in () if got is None else (like, node.meta["val"]):
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert got.stride() == value.stride()
    step = dict(zip(("output", *tensors), results, strict=False))
    assert [step[name] is not None for name in tensors] == mask
    if dtype == F32:
        step = {name: result for name, result in step.items() if result is not None}
        assert_step(step, expected_of(FORMS[norm], tensors, [dy]), step)
    for got, expected in zip(results[-2:], stats, strict=False):
        eps = torch.finfo(expected.dtype).eps
        torch.testing.assert_close(got, expected, rtol=8 * eps, atol=8 * torch.finfo(F32).eps)


@EACH_DEVICE
@EACH_NORM
def test_separate_forward_and_backward_graphs_of_aot_autograd(device, norm, dynamo):
    reports = []

    def compiler(graph_module, _):
        reports.append(replace_norms(graph_module))
        return make_boxed_func(graph_module)

    module = MODULES[norm](N, eps=EPS).to(device)
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    run = torch.compile(module, backend=backend, dynamic=True, fullgraph=True)
    parameters = dict(module.named_parameters())
    for rows in (3, 5):
        x = random(2, rows, N, device=device).requires_grad_()
        dy = random(2, rows, N, device=device, seed=9)
        y = run(x)
        grads = torch.autograd.grad(y, (x, *parameters.values()), dy)
        got = dict(zip(("output", "input", *parameters), (y, *grads), strict=True))
        assert_step(got, expected_of(FORMS[norm], {"input": x} | parameters, [dy]))
    kinds = [kind for report in reports for kind, _ in report.replaced]
    fused = norm == "layer" or device == "cuda"
    assert kinds[:2] == ([f"{norm}_norm", f"{norm}_norm_backward"] if fused else [])


@EACH_NORM
@pytest.mark.parametrize("decomposed", [False, True], ids=["exported", "decomposed"])
def test_export_with_dynamic_rows(norm, decomposed):
    module = MODULES[norm](N, eps=EPS)
    shapes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("rows", min=2)}
    program = torch.export.export(module, (random(2, 3, N),), dynamic_shapes=(shapes,))
    program = program.run_decompositions() if decomposed else program
    assert len(replace_norms(program.graph_module).replaced) == 1
    x = random(4, 7, N)
    expected = expected_of(FORMS[norm], {"input": x, **dict(module.named_parameters())}, [x])
    assert_step({"output": program.module()(x)}, expected, ["output"])
