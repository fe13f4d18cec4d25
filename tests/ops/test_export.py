"""Exported programs of every function and module: decompositions, AOTInductor, and programs that
version 0.2 exported.
"""

import shutil
import subprocess
import sys
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.cpp_extension import CUDA_HOME

import tilenorm
from tests.support.calls import (
    CALLS,
    FAMILY,
    FEW,
    TORCH,
    arguments_of,
    call,
    leaves_of,
    random,
    slow,
    tensors_of,
    tensors_of_op,
)
from tests.support.calls import each as each_form
from tests.support.quantized import HOWS, arguments, label
from tilenorm.table import NORMS, OPS, QUANTIZED_NORMS, ROTATED_NORMS

N = 256
TAKEN = [port for op in OPS.values() for port in op.takes]
PARAMETERS = {p.name for p in TAKEN if p.parameter or p.dims in ("t? r", "t?")}


class Called(nn.Module):
    """A function of tilenorm. names: of the tensors that it is given, in their order."""

    def __init__(self, op: str, names: tuple[str, ...], options: dict):
        super().__init__()
        self.op, self.names, self.options = op, names, options

    def forward(self, a, b=None, c=None, d=None, e=None, f=None, g=None):
        """With names, because PyTorch 2.9 exports guards of *tensors that it cannot run."""
        tensors = [t for t in (a, b, c, d, e, f, g) if t is not None]
        given = arguments_of(dict(zip(self.names, tensors, strict=True)))
        found = getattr(tilenorm, self.op)(**given, normalized_shape=(N,), **self.options)
        return found if isinstance(found, Tensor) else tuple(t for t in found if t is not None)


class Case(NamedTuple):
    """A module, and the tensors that it takes by name."""

    module: nn.Module
    tensors: dict[str, Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors.values())

    @property
    def dynamic_shapes(self) -> tuple:
        """Of torch.export: any number of rows."""
        rows = torch.export.Dim("rows", min=2, max=1 << 20)
        return tuple(None if n in PARAMETERS else {0: rows} for n in self.tensors)

    def of_rows(self, rows: int) -> tuple[Tensor, ...]:
        """Other inputs, with so many rows."""

        def other(t: Tensor, seed: int) -> Tensor:
            numbers = random(rows, *t.shape[1:], seed=seed)
            return numbers > -1 if t.dtype == torch.bool else numbers.to(t.dtype)

        named = enumerate(self.tensors.items())
        return tuple(t if n in PARAMETERS else other(t, 7 + i) for i, (n, t) in named)

    def outputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)


def called(op: str, tensors: dict[str, Tensor], **options) -> Case:
    return Case(Called(op, tuple(tensors), options), tensors)


VARIANTS = ("gated_rms_norm, sigmoid", "add_rms_norm, two residuals")
VARIANTS += ("add_layer_norm, masked and scaled",)
CASES = {
    name: called(CALLS[name].op, tensors_of(CALLS[name], 3, N), **CALLS[name].options)
    for name in (*NORMS, *VARIANTS)
}
CASES |= {
    f"{op}, 16 bits": called(
        op, tensors_of(FAMILY[op], 3, N, dtype=dtype), offset=1.0, rounding="early"
    )
    for op, dtype in (("add_layer_norm", torch.bfloat16), ("gated_rms_norm", torch.float16))
}
CASES["rms_norm, by heads"] = called(
    "rms_norm", {"input": random(3, 4, N), "weight": random(4, N, seed=1)}
)
OPTIONS = {name: {"interleaved": True} for name in ROTATED_NORMS}
OPTIONS |= {name: {"scaling": "row"} for name in QUANTIZED_NORMS}
CASES |= {
    name: called(name, tensors_of_op(name, lead=(3, 2), n=N), **OPTIONS.get(name, {}))
    for name in OPS
    if name not in NORMS
}
for name in ("RMSNorm", "LayerNorm", "ModulatedRMSNorm", "ModulatedLayerNorm"):
    tensors = CASES["modulated_rms_norm"].tensors
    taken = ("input", "scale", "shift") if name.startswith("Mod") else ("input",)
    module = getattr(tilenorm, name)(N).requires_grad_(False)
    CASES[name] = Case(module, {n: tensors[n] for n in taken})
CASES |= {
    f"rms_norm_quantized, {label(how)}": called(
        "rms_norm_quantized",
        tensors_of_op("rms_norm_quantized", lead=(3, 2), n=N),
        **arguments(how),
    )
    for how in (HOWS[2], HOWS[4], HOWS[6])
}
BLOCK = f"rms_norm_quantized, {label(HOWS[2])}"
QUICK = ("add_rms_norm, two residuals", "rms_norm_add_rms_norm", "RMSNorm")
QUICK += ("gated_rms_norm, 16 bits", BLOCK)
# They look at the bits of numbers, for which ONNX has no operator.
BITS = tuple(f"rms_norm_quantized, {label(how)}" for how in (HOWS[4], HOWS[6]))


def each(*left_out: str, quick: tuple[str, ...] = QUICK, count: int = 10) -> list:
    """The names of cases, as parameters: the quick ones, and so many others, drawn."""
    names = [name for name in CASES if name not in (*left_out, *quick)]
    return [*quick, *slow(*Random(0).sample(names, count))]


def assert_alike(got: Tensor, expected: Tensor) -> None:
    """8-bit numbers: but for few, which another last place of the norm rounds to their neighbours.
    Others: by the tolerances of torch.testing.
    """
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if expected.dtype.itemsize == 1:
        differ = got.view(torch.uint8).int() - expected.view(torch.uint8).int()
        assert differ.abs().max() <= 1 and (differ != 0).double().mean() < 0.01
    else:
        torch.testing.assert_close(got, expected)


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
    apart |= {"fingerprint", "unpatch", "QuantizedNorm", "ReferenceWarning", "__version__"}
    called = {name.partition(",")[0] for name in CASES}
    assert called == {*tilenorm.__all__} - apart


def test_every_op_has_a_decomposition():
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("tilenorm::")}
    assert {op.name() for op in tilenorm.decompositions()} == registered


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


@each_form({name: CALLS[name] for name in FEW})
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
        for op in (form.op, "norm_backward"):
            assert called.count(getattr(torch.ops.tilenorm, op).default) == 1
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
    for op in (torch.ops.tilenorm.rms_norm, torch.ops.tilenorm.layer_norm):
        assert called.count(op.default) == 1
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
