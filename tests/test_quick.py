"""What the quick run, which leaves out the cases marked `slow`, still tests.

Each test looks at the cases of the whole suite, and needs that all files are collected.
"""

from collections import defaultdict
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

import tilenorm
from tilenorm.launch.target import MULTIPROCESSORS
from tilenorm.spec import OPS, QUANTIZED_OPS, NormSpec

from . import cases
from .conftest import COLLECTED
from .executed import COMPILER, executor_of, parameters
from .ops.helpers import DTYPES, FAMILY
from .quick import arch_of, directions_of, name_of, schedules_of, spec_of

# Tests that have no quick case, and what the quick run tests of the same.
ALL_SLOW = {
    # 45 s of the C++ compiler. The quick run exports, saves, loads and runs the same modules.
    "tests/ops/test_export.py::test_aot_inductor_calls_the_op_of_the_process",
    # 28 s of the C++ compiler. test_fx_training has the same graphs without Inductor.
    "tests/integrations/test_compile.py::test_training_is_deterministic_with_inductors_caches",
    # 20 s of the C++ compiler. test_compile_folds compares what the caches know code by.
    "tests/integrations/test_compile_folds.py::test_caches_hit_and_keep_what_was_folded",
    # 60 s of nine models. test_compile_folds has a transformer block.
    "tests/integrations/test_fold_models.py::test_sums_and_outputs_of_models",
    # 40 s of 60 models. test_table_has_the_norms_of compares some of them.
    "tests/integrations/test_families.py::test_table_has_the_norms_of_many",
    # 40 s of the C++ compiler. test_decompositions has the same programs without a package.
    "tests/ops/test_decompositions.py::test_a_package_of_aot_inductor_runs_without_tilenorm",
    # 10 s of the C++ compiler. test_compiled_without_a_break_for_any_number_of_rows has the graph.
    "tests/ops/test_quantized.py::test_compiled_by_inductor",
    # 4 s of graphs. test_op checks the op with sizes that are known.
    "tests/ops/test_chain.py::test_op_with_symbolic_sizes",
    # 30 s of a process for each name. The oldest PyTorch, which lacks some of them, runs all ops.
    "tests/ops/test_torch_private.py::test_the_same_results_without",
    # 11 s of new processes. test_precompile_fills_the_cache compiles the same in one process.
    "tests/test_main.py::test_precompile_in_processes_fills_the_same_cache",
    # 5 s of the compiler in a new process. test_kernel has threads and a program in its place.
    "tests/launch/test_origin.py::test_threads_that_launch_at_once_compile_once_for_each_architecture",
    # 30 s of graphs with one malformed call. test_drawn_malformed_calls draws fewer of the same.
    "tests/integrations/test_fx_malformed.py::test_many_drawn_malformed_calls",
    # 60 s of compiled code, run by instructions. The quick run has the specs that once failed.
    "tests/machine/test_machine.py::test_drawn_rows_have_the_same_bits_in_every_place_and_variant",
    # 40 s of compiled code. test_terms compares the same bits in the interpreter.
    "tests/machine/test_machine.py::"
    "test_the_backward_pass_writes_y_with_the_bits_of_the_forward_pass",
    # 13 s of mypy, over a copy with a fault. ./format.sh --check runs it over the package.
    "tests/test_types.py::test_the_checker_finds_a_function_that_was_renamed",
}
# Parameters whose values are sizes, or which other tests of this file count.
COUNTED = {"spec", "hidden", "job", "arch", "examples", "calls", "of_kernels"}
# (test, parameter) with values that are slow alone.
SLOW_VALUES = {
    # 8 s of the C++ compiler a value.
    ("tests/ops/test_nested.py::test_tensors_made_inside_a_compiled_function", "backend"),
    ("tests/ops/test_nested.py::test_more_that_is_made_inside_a_compiled_function", "backend"),
    # A second of an exporter a value.
    ("tests/ops/test_onnx.py::test_a_module", "name"),
    ("tests/ops/test_onnx.py::test_the_exporter_by_torchscript", "name"),
}
# Its cases run in several processes. The quick run has the first value of most parameters alone.
OF_RANKS = "tests/distributed/"
# (function, whether the gate comes first).
FORMS = {(op, False) for op in OPS} | {("gated_rms_norm", True), ("gated_layer_norm", True)}


@pytest.fixture
def every(request) -> list[pytest.Item]:
    """Every case, whatever -m and -k choose."""
    items = request.config.stash[COLLECTED]
    folder = Path(__file__).parent
    if set(folder.rglob("test_*.py")) - {item.path for item in items}:
        pytest.skip("needs all test files: run pytest without a path")
    return items


@pytest.fixture
def collected(every) -> list[pytest.Item]:
    """Every case that needs no GPU."""
    return [item for item in every if executor_of(item) != "gpu"]


@pytest.fixture
def quick(collected) -> list[pytest.Item]:
    return [item for item in collected if not item.get_closest_marker("slow")]


@pytest.fixture
def interpreted(quick) -> list[pytest.Item]:
    return [item for item in quick if is_of_kernels(item)]


def is_of_kernels(item: pytest.Item) -> bool:
    """Whether a case runs kernels on a spec."""
    return item.path.parent.name == "kernels" and spec_of(item) is not None


def test_every_test_has_a_quick_case(collected, quick):
    assert {name_of(i) for i in collected} - {name_of(i) for i in quick} == ALL_SLOW


def test_a_gpu_runs_every_function(every):
    """What no GPU has run may fail at its first launch, as quantised norms did."""
    run = {
        word
        for item in every
        if executor_of(item) == "gpu"
        for word in item.name.partition("[")[2].removesuffix("]").split("-")
    }
    functions = {name for name in tilenorm.__all__ if name.islower() and "_norm" in name}
    assert {*OPS, *QUANTIZED_OPS} <= functions <= run


def test_every_value_of_a_parameter_has_a_quick_case(collected, quick):
    every, found = parameter_values(collected), parameter_values(quick)
    missing = {
        key: values - found[key]
        for key, values in every.items()
        if not key[0].startswith(OF_RANKS)
        and key[0] not in ALL_SLOW
        and key not in SLOW_VALUES
        and key[1] not in COUNTED
        and values - found[key]
    }
    assert not missing


def parameter_values(items: list[pytest.Item]) -> dict[tuple[str, str], set[str]]:
    """(test, parameter) -> its values."""
    found = defaultdict(set)
    for item in items:
        for name, value in parameters(item).items():
            found[name_of(item), name].add(str(value))
    return found


def test_kernels_of_every_op_direction_and_dtype(interpreted):
    found = {
        (direction, form_of(spec_of(item)), spec_of(item).dtype)
        for item in interpreted
        for direction in directions_of(item)
    }
    assert set(product(cases.DIRECTIONS, FORMS, cases.DTYPES)) <= found


def form_of(spec: NormSpec) -> tuple[str, bool]:
    return spec.op, spec.gate_first


def test_kernels_with_every_value_of_every_field_of_a_spec(collected, interpreted):
    every = [item for item in collected if is_of_kernels(item)]
    assert values_of_fields(every) == values_of_fields(interpreted)


def values_of_fields(items: list[pytest.Item]) -> set[tuple[str, str, object]]:
    """(direction, field of a spec, value), sizes left out."""
    return {
        (direction, field.name, getattr(spec_of(item), field.name))
        for item in items
        for direction in directions_of(item)
        for field in fields(NormSpec)
        if field.name != "hidden"
    }


def test_kernels_of_every_schedule_and_architecture(collected, interpreted):
    every = [item for item in collected if is_of_kernels(item)]
    schedules = set().union(*map(schedules_of, every))
    assert set().union(*map(schedules_of, interpreted)) == schedules
    assert {direction for direction, _ in schedules} == set(cases.DIRECTIONS)
    found = {(arch_of(item), d) for item in interpreted for d in directions_of(item)}
    assert found == set(product(cases.INTERPRETED, cases.DIRECTIONS))


def test_compiles_for_every_architecture_of_every_op_direction_and_dtype(quick):
    jobs = [parameters(item)["job"] for item in quick if executor_of(item) == COMPILER]
    specs = [value for _, _, given in jobs for value in given if isinstance(value, NormSpec)]
    assert {arch for arch, *_ in jobs} == set(MULTIPROCESSORS)
    assert {form_of(spec) for spec in specs} == FORMS
    assert {spec.dtype for spec in specs} == set(cases.DTYPES)
    directions = {(arch, d) for arch, _, given in jobs for d in cases.DIRECTIONS if d in given}
    assert directions == set(product(MULTIPROCESSORS, cases.DIRECTIONS))


@pytest.mark.parametrize("file", ["test_forward", "test_gradients"])
def test_ops_of_every_form_and_dtype(quick, file):
    found = set()
    for item in quick:
        params = parameters(item)
        if name_of(item) == f"tests/ops/{file}.py::test_accuracy":
            form = params["form"] if "form" in params else FAMILY[params["name"]]
            gate_first = not form.options.get("norm_before_gate", True)
            found.add(((form.op, gate_first), params["dtype"]))
    assert found == set(product(FORMS, DTYPES))
