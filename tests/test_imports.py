"""Rules for every file: which imports it may have, what a module may hold, how long it may be.

Each test collects every violation of one rule, and names the file and the line of each.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    | {"tilenorm.table", "torch"},
    "__init__": {"tilenorm.ops", "tilenorm.nn", "tilenorm.tools", "tilenorm.integrations"},
    "__main__": {"tilenorm.tools", "tilenorm.ops", "tilenorm.launch", "tilenorm.spec"}
    | {"tilenorm.__version__"},
}
# Device code: of the standard library, groups of constants and their types alone.
NO_STANDARD_LIBRARY = {"kernels"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 9  # of a function that a kernel calls


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def at(path: Path, line: int, problem: str) -> str:
    """A violation: where it is, and what it is."""
    return f"{path.relative_to(ROOT)}:{line}: {problem}"


def listed(violations: list[str]) -> str:
    """One violation a line."""
    return "\n" + "\n".join(violations)


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


def test_each_folder_imports_only_what_the_design_allows():
    missing = {part(path) for path in PACKAGE} - set(ALLOWED)
    assert not missing, "ALLOWED names no imports for these parts of tilenorm"
    violations = []
    for path in PACKAGE:
        mine = part(path)
        standard = set() if mine in NO_STANDARD_LIBRARY else set(sys.stdlib_module_names)
        allowed = ALLOWED[mine] | {f"tilenorm.{mine}"} | standard
        for line, name in imports(path):
            if not inside(name, allowed):
                violations.append(at(path, line, f"{mine} may not import {name}"))
    assert not violations, listed(violations)


def test_nothing_imports_tests_or_bench():
    """But tests import tests, bench imports bench, and tests/bench imports both."""
    violations = []
    for path in ALL:
        folders = path.relative_to(ROOT).parts
        refused = {"tests", "bench"} - {folders[0]}
        if folders[:2] == ("tests", "bench"):
            refused = set()
        for line, name in imports(path):
            if inside(name, refused):
                violations.append(at(path, line, f"{folders[0]} may not import {name}"))
    assert not violations, listed(violations)


def test_importing_touches_no_cuda():
    code = """
import torch
def refuse(*_): raise AssertionError("CUDA was initialised")
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice"):
    if hasattr(torch._C, name): setattr(torch._C, name, refuse)
import tilenorm, tilenorm.__main__
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_modules_hold_no_mutable_state():
    """Tables in capitals are data, and nothing in the package writes to one."""
    violations = []
    for path in PACKAGE:
        violations += mutable_names(path) + globals_written(path)
    assert not violations, listed(violations)


def mutable_names(path: Path) -> list[str]:
    """Lists, dicts and sets at the top of a module whose names are not in capitals."""
    found = []
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets):
                if not name.strip("_").isupper() and name != "__all__":
                    found.append(at(path, node.lineno, f"{name} is mutable"))
    return found


def globals_written(path: Path) -> list[str]:
    """`global` statements, and assignments to an element of a name in capitals."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Global):
            found.append(at(path, node.lineno, f"global {', '.join(node.names)}"))
        elif isinstance(node, ast.Assign | ast.AugAssign):
            for target in getattr(node, "targets", None) or [node.target]:
                name = getattr(getattr(target, "value", None), "id", "")
                if isinstance(target, ast.Subscript) and name.isupper():
                    found.append(at(path, node.lineno, f"{name} is written"))
    return found


def test_files_are_short():
    violations = []
    for path in ALL:
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            violations.append(at(path, lines, f"longer than {MAX_FILE_LINES} lines"))
    assert not violations, listed(violations)


def test_kernel_functions_are_short_and_helpers_take_few_parameters():
    """A kernel itself may take more: its arrays, and its constants in groups."""
    violations = []
    for path in KERNELS:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                violations.append(at(path, node.lineno, f"{node.name} has {lines} lines"))
            taken = len(parameters(node))
            if taken > MAX_PARAMETERS and not is_kernel(node):
                violations.append(at(path, node.lineno, f"{node.name} takes {taken} parameters"))
    assert not violations, listed(violations)


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters, without the instance of a method."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [a.arg for a in every if a and a.arg not in ("self", "cls")]


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether a function is decorated with ct.kernel or with ct.kernel(...)."""
    return any("ct.kernel" in ast.unparse(decorator) for decorator in function.decorator_list)
