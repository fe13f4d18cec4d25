"""torch.onnx.export of every function and module, of a patched model, and what it refuses."""

import io

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilenorm

from .test_export import (
    BITS,
    BLOCK,
    CASES,
    PARAMETERS,
    Case,
    assert_alike,
    each,
    exported,
    table,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnx.reference")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:# 'dynamic_axes'"),
]
# The exporter by TorchScript knows no 8-bit floats.
WITHOUT_8_BITS = each(
    *(name for name in CASES if "uantized" in name), quick=("RMSNorm", "gated_rms_norm, 16 bits")
)


def run(model, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What onnx's own evaluator makes of a model."""
    session = onnx.reference.ReferenceEvaluator(model)
    given = zip(session.input_names, inputs, strict=True)
    return [_as_tensor(t) for t in session.run(None, {n: _as_array(t) for n, t in given})]


def _as_array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(onnx.helper.tensor_dtype_to_np_dtype(16))
    return tensor.numpy()


def _as_tensor(array: np.ndarray) -> Tensor:
    """numpy knows bfloat16 and 8-bit floats by the dtypes of ml_dtypes."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    numbers = torch.from_numpy(array.view(f"i{array.dtype.itemsize}"))
    return numbers.view(getattr(torch, array.dtype.name))


def assert_same_numbers(model, case: Case) -> None:
    assert {node.domain for node in model.graph.node} <= {""}
    for inputs in (case.inputs, case.of_rows(7)):
        for got, expected in zip(run(model, inputs), case.outputs(inputs), strict=True):
            assert_alike(got, expected)


def by_dynamo(case: Case):
    program = torch.onnx.export(
        case.module, case.inputs, dynamo=True, dynamic_shapes=case.dynamic_shapes, verbose=False
    )
    return program.model_proto


@pytest.mark.slow
@pytest.mark.parametrize("name", each(*BITS, quick=("RMSNorm", "gated_rms_norm, 16 bits")))
def test_a_module(name):
    assert_same_numbers(by_dynamo(CASES[name]), CASES[name])


def test_an_exported_program():
    program = exported(CASES[BLOCK]).run_decompositions(table())
    model = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    assert_same_numbers(model, CASES[BLOCK])


def by_torchscript(case: Case):
    file, rows = io.BytesIO(), {n: {0: "rows"} for n in case.tensors if n not in PARAMETERS}
    names = {"input_names": list(case.tensors), "dynamic_axes": rows}
    torch.onnx.export(case.module, case.inputs, file, dynamo=False, **names)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("name", WITHOUT_8_BITS)
def test_the_exporter_by_torchscript(name):
    assert_same_numbers(by_torchscript(CASES[name]), CASES[name])


def test_the_exporter_by_torchscript_knows_no_8_bit_floats():
    with pytest.raises(NotImplementedError, match="pass dynamo=True"):
        by_torchscript(CASES[BLOCK])


def test_a_patched_model():
    model = nn.Sequential(nn.RMSNorm(256), nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256))
    assert len(tilenorm.patch(model).patched) == 2
    case = Case(model.requires_grad_(False), CASES["RMSNorm"].tensors)
    assert_same_numbers(by_torchscript(case), case)
