"""The direction of the imports, what importing does, and what a module may hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "tilenorm").rglob("*.py"))
ALL = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]

# What a folder or module of tilenorm may import beside itself and the standard library.
ALLOWED = {
    "kernels": {"cuda.tile", "dataclasses", "typing"},
    "settings": set(),
    "spec": set(),
    "launch": {"tilenorm.kernels", "tilenorm.settings", "tilenorm.spec", "cuda.tile"}
    | {"cutile_cache"},
    "ops": {"tilenorm.launch", "tilenorm.settings", "tilenorm.spec", "torch"},
    "tools": {"tilenorm.launch", "tilenorm.ops", "tilenorm.settings", "tilenorm.spec"}
    | {"cuda.tile", "torch"},
    "nn": {"tilenorm.ops", "torch"},
    "integrations": {"tilenorm.nn", "tilenorm.ops", "tilenorm.spec", "torch"},
    "__init__": {"tilenorm.ops", "tilenorm.nn", "tilenorm.tools", "tilenorm.integrations"},
    "__main__": {"tilenorm"},
}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

each_module = pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *filter(None, [node.module]))
            found |= {".".join((*base, alias.name)) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(path: Path) -> str:
    """The folder of tilenorm, or the module at its top."""
    return path.relative_to(ROOT / "tilenorm").with_suffix("").parts[0]


@each_module
def test_direction(path):
    mine = part(path)
    assert mine in ALLOWED, f"where does {mine} belong? see ALLOWED"
    allowed = ALLOWED[mine] | {f"tilenorm.{mine}"}
    refused = {
        name
        for name in imports(path)
        if not any(name == a or name.startswith(a + ".") for a in allowed)
        and (mine == "kernels" or name.split(".")[0] not in sys.stdlib_module_names)
    }
    assert not refused


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_depends_on_tests_or_bench(path):
    folder = path.relative_to(ROOT).parts[0]
    others = {"tests", "bench"} - {folder}
    if folder == "tests" and path.relative_to(ROOT).parts[1] == "bench":
        others -= {"bench"}
    assert not {name for name in imports(path) if name.split(".")[0] in others}


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


@each_module
def test_no_mutable_state(path):
    """Tables in capitals are data, and nothing in the package writes to one."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets]
            assert all(n.strip("_").isupper() or n == "__all__" for n in names), names
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"global in line {node.lineno}"
        written = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in written:
                name = getattr(getattr(target, "value", None), "id", "")
                indexed = isinstance(target, ast.Subscript)
                assert not (indexed and name.isupper()), f"{name} is written, line {node.lineno}"


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    tables = path.parent.name == "tuned"  # data
    assert tables or len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", sorted((ROOT / "tilenorm" / "kernels").glob("*.py")), ids=str)
def test_kernels_keep_their_annotations(path):
    # cuda.tile reads ct.Constant from the annotation itself, not from its text.
    assert "__future__.annotations" not in imports(path)
