"""Rules for every file: which imports it may have, and what a module may hold."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import tilenorm

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "tilenorm").rglob("*.py"))
KERNELS = sorted((ROOT / "tilenorm" / "kernels").glob("*.py"))
ALL = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]

# What each folder or module of tilenorm may import beside itself and the standard library.
ALLOWED = {
    "kernels": {"cuda.tile", "dataclasses", "typing"},
    "settings": set(),
    "table": set(),
    "spec": {"tilenorm.table"},
    "launch": {"tilenorm.kernels", "tilenorm.settings", "tilenorm.spec", "tilenorm.table"}
    | {"cuda.tile", "cutile_cache"},
    "ops": {"tilenorm.launch", "tilenorm.settings", "tilenorm.spec", "tilenorm.table", "torch"},
    "nn": {"tilenorm.ops", "torch"},
    "tools": {"tilenorm.launch", "tilenorm.ops", "tilenorm.settings", "tilenorm.spec"}
    | {"tilenorm.table", "cuda.tile", "torch"},
    "integrations": {"tilenorm.nn", "tilenorm.ops", "tilenorm.spec", "tilenorm.launch.tuned"}
    | {"tilenorm.settings", "tilenorm.table", "tilenorm.tools.fingerprint", "torch"}
    | {"sglang", "torchtitan", "transformers", "vllm"},
    "__init__": {"tilenorm.ops", "tilenorm.nn", "tilenorm.tools", "tilenorm.integrations"},
    "__main__": {"tilenorm.tools", "tilenorm.ops", "tilenorm.launch", "tilenorm.spec"}
    | {"tilenorm.__version__"},
}
# Device code: of the standard library, groups of constants and their types alone.
NO_STANDARD_LIBRARY = {"kernels"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 9  # of a function that a kernel calls


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path in paths for node in ast.walk(tree_of(path)))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the absolute name of each import, those inside functions included."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *filter(None, [node.module]))
            names = [".".join((*base, alias.name)) for alias in node.names]
        else:
            continue
        for name in names:
            yield node.lineno, name


def part(path: Path) -> str:
    """The folder of tilenorm, or the module at its top."""
    return path.relative_to(ROOT / "tilenorm").with_suffix("").parts[0]


def inside(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


# A violation: the file, the line and the problem.
Violations = Iterable[tuple[Path, int, str]]


def folders_import_only_what_the_design_allows() -> Violations:
    for path in PACKAGE:
        mine = part(path)
        standard = set() if mine in NO_STANDARD_LIBRARY else set(sys.stdlib_module_names)
        allowed = ALLOWED[mine] | {f"tilenorm.{mine}"} | standard
        for line, name in imports(path):
            if not inside(name, allowed):
                yield path, line, f"{mine} may not import {name}"


def nothing_imports_tests_or_bench() -> Violations:
    """But tests import tests, bench imports bench, and tests/bench imports both."""
    for path in ALL:
        folders = path.relative_to(ROOT).parts
        if folders[:2] != ("tests", "bench"):
            for line, name in imports(path):
                if inside(name, {"tests", "bench"} - {folders[0]}):
                    yield path, line, f"{folders[0]} may not import {name}"


def modules_hold_no_mutable_state() -> Violations:
    """No lists, dicts and sets at the top of a module. Tables in capitals are data."""
    for path in PACKAGE:
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (target.id for target in targets):
                    if not name.strip("_").isupper() and name != "__all__":
                        yield path, node.lineno, f"{name} is mutable"


def nothing_writes_to_a_table() -> Violations:
    """No `global` statements, and no assignments to an element of a name in capitals."""
    for path, node in nodes(PACKAGE):
        if isinstance(node, ast.Global):
            yield path, node.lineno, f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                name = getattr(getattr(target, "value", None), "id", "")
                if isinstance(target, ast.Subscript) and name.isupper():
                    yield path, node.lineno, f"{name} is written"


def kernel_functions_are_short_and_helpers_take_few_parameters() -> Violations:
    """A kernel itself may take more: its arrays, and its constants in groups."""
    for path, node in nodes(KERNELS):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield path, node.lineno, f"{node.name} has {lines} lines"
            taken = len(parameters(node))
            if taken > MAX_PARAMETERS and not is_kernel(node):
                yield path, node.lineno, f"{node.name} takes {taken} parameters"


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters, without the instance of a method."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [a.arg for a in every if a and a.arg not in ("self", "cls")]


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether a function is decorated with ct.kernel or with ct.kernel(...)."""
    return any("ct.kernel" in ast.unparse(decorator) for decorator in function.decorator_list)


RULES = (
    folders_import_only_what_the_design_allows,
    nothing_imports_tests_or_bench,
    modules_hold_no_mutable_state,
    nothing_writes_to_a_table,
    kernel_functions_are_short_and_helpers_take_few_parameters,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    found = [f"{path.relative_to(ROOT)}:{line}: {problem}" for path, line, problem in rule()]
    assert not found, "\n" + "\n".join(found)


def test_the_program_runs_without_touching_cuda():
    code = """
import runpy, sys, torch
def refuse(*_): raise AssertionError("CUDA was initialised")
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice"):
    if hasattr(torch._C, name): setattr(torch._C, name, refuse)
sys.argv = ["tilenorm", "--version"]
runpy.run_module("tilenorm", run_name="__main__")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, tilenorm.__version__), run.stderr
