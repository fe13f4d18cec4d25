"""Exported programs: decompositions, AOTInductor, and programs that version 0.2 exported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.cpp_extension import CUDA_HOME

import tilenorm

from .exported import CASES, assert_alike, each
from .helpers import CALLS, FEW, TORCH, call, leaves_of, random, tensors_of
from .helpers import each as each_form

OPS = torch.ops.tilenorm
# Of the ATen operators that are left, those that are not core.
NOT_CORE = {"aten.view.dtype", "aten.__rshift__.Scalar", "aten.__lshift__.Scalar"}
NOT_CORE |= {"aten._assert_tensor_metadata.default"}


def table():
    """As the documentation of decompositions has it."""
    found = torch.export.default_decompositions()
    found.update(tilenorm.decompositions())
    return found


def targets(graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def names_of(graph) -> set[str]:
    return {str(t) for t in targets(graph) if isinstance(t, torch._ops.OpOverload)}


def exported(case) -> torch.export.ExportedProgram:
    return torch.export.export(case.module, case.inputs, dynamic_shapes=case.dynamic_shapes)


def test_the_cases_are_every_function_and_module():
    apart = {"compile", "decompositions", "disable", "enable", "explain", "override", "patch"}
    apart |= {"unpatch", "QuantizedNorm", "ReferenceWarning", "__version__"}
    called = {name.partition(",")[0] for name in CASES}
    assert called == {*tilenorm.__all__} - apart


def test_every_op_has_a_decomposition():
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("tilenorm::")}
    legacy = {f"tilenorm::{name}" for name in ("norm", "norm_quantized", "norm_add_norm")}
    assert {op.name() for op in tilenorm.decompositions()} == registered - legacy


@pytest.mark.parametrize("name", each())
def test_an_exported_program_of_aten_operators(name):
    case = CASES[name]
    program = exported(case)
    assert [t for t in names_of(program.graph) if t.startswith("tilenorm")]  # as without a table
    decomposed = program.run_decompositions(table())
    left = {t for t in targets(decomposed.graph) if isinstance(t, torch._ops.OpOverload)}
    left = {str(t) for t in left if torch.Tag.core not in t.tags}
    assert left <= NOT_CORE
    for inputs in (case.inputs, case.of_rows(7)):
        found = decomposed.module()(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for got, expected in zip(found, case.outputs(inputs), strict=True):
            assert_alike(got, expected)


def test_a_process_that_insists_on_the_kernels_exports_too(monkeypatch):
    monkeypatch.setenv("TILENORM_BACKEND", "cutile")
    exported(CASES["rms_norm"]).run_decompositions(table())


@each_form(CALLS, FEW)
def test_the_graph_of_a_training_step(form):
    """make_fx, and whatever else takes a table, decomposes both directions."""
    tensors = tensors_of(form, 3, 40)

    def step(*given):
        outputs = call(form, dict(zip(tensors, given, strict=True)), offset=1.0)
        of = [t for t in given if t.requires_grad]
        return *outputs, *torch.autograd.grad(outputs, of, [y.sin() for y in outputs])

    given = [*leaves_of(tensors).values()]
    for mode in ("real", "fake", "symbolic"):
        called = targets(make_fx(step, tracing_mode=mode)(*given).graph)
        for op in (getattr(OPS, form.op), OPS.norm_backward):
            assert called.count(op.default) == 1
        assert not [t for t in called if "mean" in str(t)], "the reference was traced, not the op"
        traced = make_fx(step, tilenorm.decompositions(), mode)(*given)
        assert not [t for t in names_of(traced.graph) if "tilenorm" in t]
        for got, expected in zip(traced(*given), step(*given), strict=True):
            torch.testing.assert_close(got, expected)


def program_of(device, strict=False):
    """Two modules, because whatever Inductor generates beside norms takes the C++ compiler seconds;
    and a program of any number of rows.
    """
    block = nn.Sequential(tilenorm.RMSNorm(16, offset=1.0), tilenorm.LayerNorm(16)).to(device)
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    given, shapes = (random(3, 16, device=device),), ({0: rows},)
    block.requires_grad_(False)
    return block, torch.export.export(block, given, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_runs_for_any_number_of_rows(device, strict, tmp_path):
    block, program = program_of(device, strict)
    called = targets(program.graph)
    assert all(called.count(op.default) == 1 for op in (OPS.rms_norm, OPS.layer_norm))
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for rows in (2, 7):
        x = random(rows, 16, device=device, seed=rows)
        assert torch.equal(loaded(x), block(x))


WITHOUT_TILENORM = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
found = package(torch.ones(3, 16, device=sys.argv[2]))
torch.testing.assert_close(found, torch.zeros_like(found))
assert "tilenorm" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.skipif(TORCH < (2, 13), reason="AOTInductor of PyTorch 2.11 crashes on the op")
@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor(device, decomposed, tmp_path):
    """It calls the op of the process. With the table of decompositions it needs no tilenorm."""
    if device == "cuda" and CUDA_HOME is None:
        pytest.skip("AOTInductor needs CUDA's headers")
    block, program = program_of(device)
    program = program.run_decompositions(tilenorm.decompositions()) if decomposed else program
    path = str(tmp_path / "block.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    package = torch._inductor.aoti_load_package(path)
    for rows in (3, 7):
        x = random(rows, 16, device=device, seed=rows)
        torch.testing.assert_close(package(x), block(x), rtol=1e-5, atol=1e-5)
    command = [sys.executable, "-c", WITHOUT_TILENORM, path, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if decomposed:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode and "Could not find schema for tilenorm::" in done.stderr


N = 64
BEFORE = Path(__file__).parent / "exported_before.pt2"
OF_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="the file is one of PyTorch 2.13")


def now(x, r, w, b, v) -> tuple:
    """What the program does, by the functions of this version."""
    y, total = tilenorm.add_rms_norm(
        x, r, (N,), w, dropout_mask=r > 0, dropout_scale=2.0, layer_scale=v
    )
    q = tilenorm.rms_norm_quantized(x, (N,), w, scaling="row", return_output=True)
    m = tilenorm.add_layer_norm_quantized(x, r, (N,), w, b, scaling="mx", return_amax=True)
    return (
        tilenorm.rms_norm(x, (N,), w),
        tilenorm.layer_norm(x, (N,), w, b),
        *(y, total),
        *tilenorm.add_layer_norm(x, (x, r), (N,), w, b),
        tilenorm.rms_norm_add(x, r, (N,), w),
        tilenorm.gated_rms_norm(x, r, (N,), w, norm_before_gate=False, activation="sigmoid"),
        *tilenorm.rms_norm_add_rms_norm(x, r, (N,), w, v),
        *(q.q.float(), q.scale, q.output),
        *(m.q.float(), m.scale.float(), m.amax, m.residual_out),
    )


@OF_2_13
@pytest.mark.parametrize("rows", [5, 9])
def test_an_exported_program_runs(rows):
    program = torch.export.load(BEFORE)
    called = {node.target.name() for node in program.graph.nodes if "tilenorm" in str(node.target)}
    assert called == {f"tilenorm::{op}" for op in ("norm", "norm_quantized", "norm_add_norm")}
    x, r = random(rows, N), random(rows, N, seed=1)
    parameters = [program.state_dict[name] for name in ("w", "b", "v")]
    found, expected = program.module()(x, r), now(x, r, *parameters)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@OF_2_13
def test_gradients_and_decompositions_of_the_ops_of_before():
    x, w = random(3, N).requires_grad_(), random(N, seed=1).requires_grad_()
    how = (N, "layer", 0.0, False, "late", "silu", 1.0, 1e-5, True)
    y, _, mean, rstd = torch.ops.tilenorm.norm(x, None, None, w, None, *how)
    expected = tilenorm.layer_norm(x, (N,), w)
    assert torch.equal(y, expected) and mean.shape == rstd.shape == (3,)
    pairs = zip(*(torch.autograd.grad(t.sum(), (x, w)) for t in (y, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    program = torch.export.load(BEFORE)
    table = torch.export.default_decompositions()
    table.update(tilenorm.decompositions())
    left = {str(n.target) for n in program.run_decompositions(table).graph.nodes}
    assert not [name for name in left if "tilenorm" in name]
