"""The decomposition table: what it makes of every op, of exported programs and of gradients."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tilenorm

from .exported import CASES, assert_alike, each
from .helpers import CALLS, FEW, call, leaves_of, random, tensors_of
from .helpers import each as each_form
from .test_library import ABSENT, MASKS, backward_arguments, made, targets
from .test_split import GATED as GATED_PIECE
from .test_split import LAYER as LAYER_PIECE
from .test_split import arguments_of

OPS = torch.ops.tilenorm
# Of the ATen operators that are left, those that are not core.
NOT_CORE = {"aten.view.dtype", "aten.__rshift__.Scalar", "aten.__lshift__.Scalar"}
NOT_CORE |= {"aten._assert_tensor_metadata.default"}


def table():
    """As the documentation of decompositions has it."""
    found = torch.export.default_decompositions()
    found.update(tilenorm.decompositions())
    return found


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


def check(op, arguments: tuple, **by_name) -> None:
    """The decomposition's results are those of the op, absent ones included."""
    op = getattr(OPS, op).default
    results = tilenorm.decompositions()[op](*arguments, **by_name), op(*arguments, **by_name)
    results = [(r,) if isinstance(r, torch.Tensor) else r for r in results]
    for got, wanted in zip(*results, strict=True):
        assert got.stride() == wanted.stride() or not wanted.numel()
        assert_alike(got.detach(), wanted.detach())


@pytest.mark.parametrize("case", ["residual float32", "gate float32"])
def test_norm_backward_of_one_gradient(case):
    for mask in (*MASKS, (False,) * 5):
        check("norm_backward", backward_arguments(*made(case, "cpu"), False, mask))


def test_norm_backward_of_several_terms_and_the_output():
    form, tensors = made("matrix", "cpu")
    terms = {f"grad_output_{i}": random(3, 40, seed=20 + i) for i in (2, 3)}
    arguments = backward_arguments(form, tensors)
    check("norm_backward", arguments, **terms, output=True)
    check("norm_backward", backward_arguments(*made("matrix", "cpu", ABSENT[0])))


@pytest.mark.parametrize("spec", [LAYER_PIECE, GATED_PIECE], ids=["layer", "gated"])
def test_rows_in_pieces(spec):
    for name, arguments in arguments_of(spec, 40).items():
        check(name.strip(), arguments)


@each_form(CALLS, FEW)
def test_the_graph_of_a_training_step(form):
    """make_fx, and whatever else takes a table, decomposes both directions."""
    tensors = tensors_of(form, 3, 40)

    def step(*given):
        outputs = call(form, dict(zip(tensors, given, strict=True)), offset=1.0)
        of = [t for t in given if t.requires_grad]
        return *outputs, *torch.autograd.grad(outputs, of, [y.sin() for y in outputs])

    given = [*leaves_of(tensors).values()]
    for mode in ("real", "symbolic"):
        traced = make_fx(step, tilenorm.decompositions(), mode)(*given)
        assert not [t for t in names_of(traced.graph) if "tilenorm" in t]
        for got, expected in zip(traced(*given), step(*given), strict=True):
            torch.testing.assert_close(got, expected)
