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
    "row": set(),
    "table": {"tilenorm.row"},
    "spec": {"tilenorm.row", "tilenorm.table"},
    "launch": {"tilenorm.kernels", "tilenorm.settings", "tilenorm.spec", "tilenorm.table"}
    | {"cuda.tile", "cutile_cache"},
    "ops": {
        "tilenorm.launch",
        "tilenorm.row",
        "tilenorm.settings",
        "tilenorm.spec",
        "tilenorm.table",
    }
    | {"torch"},
    "nn": {"tilenorm.ops", "torch"},
    "tools": {"tilenorm.launch", "tilenorm.ops", "tilenorm.settings", "tilenorm.spec"}
    | {"tilenorm.row", "tilenorm.table", "cuda.tile", "torch"},
    "integrations": {"tilenorm.nn", "tilenorm.ops", "tilenorm.spec", "tilenorm.launch.tuned"}
    | {"tilenorm.row", "tilenorm.settings", "tilenorm.table", "tilenorm.tools.fingerprint", "torch"}
    | {"sglang", "torchtitan", "transformers", "vllm"},
    "__init__": {"tilenorm.ops", "tilenorm.nn", "tilenorm.tools", "tilenorm.integrations"},
    "__main__": {"tilenorm.tools", "tilenorm.ops", "tilenorm.launch", "tilenorm.spec"}
    | {"tilenorm.__version__"},
}
# Device code: of the standard library, groups of constants and their types alone.
NO_STANDARD_LIBRARY = {"kernels"}
# The folders of tilenorm/ops from the lowest to the highest. The functions stand above them.
OPS_ROOMS = ("pytorch", "passes", "torch_ops")
ROOMS = [
    *(ROOT / "tilenorm" / name for name in ("kernels", "launch", "ops", "tools", "integrations")),
    *(ROOT / "tilenorm" / "ops" / name for name in OPS_ROOMS),
]
MAX_FLOORS = 8
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


def modules_of(room: Path) -> dict[str, Path]:
    """The modules in a folder and below it, or in the folder alone where it has rooms. Without the
    folder's own __init__.py, which gathers the names of the others.
    """
    files = room.glob("*.py") if room.name == "ops" else room.rglob("*.py")
    inner = [path for path in files if path != room / "__init__.py"]
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in inner}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


def arrows(room: Path) -> dict[str, set[str]]:
    """For each module of a room, the modules of that room that it imports.

    Imports inside of functions count, because a circle that a function hides is one too.
    """
    modules = modules_of(room)
    found = {}
    for module, path in modules.items():
        names = [name for _, name in imports(path)]
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        found[module] = targets & {*modules} - {module}
    return found


def no_room_has_a_circle_or_more_floors_than_one_can_follow() -> Violations:
    """A module stands one floor above the highest module that it imports."""
    for room in ROOMS:
        graph = arrows(room)
        floors: dict[str, int] = {}
        while ready := [m for m in graph if m not in floors and graph[m] <= {*floors}]:
            floors |= {m: 1 + max((floors[below] for below in graph[m]), default=0) for m in ready}
        for module in sorted({*graph} - {*floors}):
            yield modules_of(room)[module], 1, "imports itself by way of others"
        for module, floor in floors.items():
            if floor > MAX_FLOORS:
                yield modules_of(room)[module], 1, f"stands on floor {floor}"


def rooms_of_ops_import_downwards() -> Violations:
    for path in sorted((ROOT / "tilenorm" / "ops").rglob("*.py")):
        room = path.relative_to(ROOT / "tilenorm" / "ops").parts[0]
        height = OPS_ROOMS.index(room) if room in OPS_ROOMS else len(OPS_ROOMS)
        above = {f"tilenorm.ops.{name}" for name in OPS_ROOMS[height + 1 :]}
        for line, name in imports(path):
            folder = name.split(".")[2:3]
            top = name.startswith("tilenorm.ops.") and folder[0] not in OPS_ROOMS
            if inside(name, above) or (top and height < len(OPS_ROOMS)):
                yield path, line, f"{room} may not import {name}"


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
    no_room_has_a_circle_or_more_floors_than_one_can_follow,
    rooms_of_ops_import_downwards,
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
