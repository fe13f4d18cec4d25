"""The norm's argument list is written out in few places: elsewhere its groups travel."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = {"residual", "gate", "weight", "bias"}
MOST = 10


def written_lists(source: str) -> int:
    """How many lists name all of the norm's tensors beside the input.

    A list is what a function takes, a call passes, a tuple or list holds, an assignment unpacks, or
    the fields of a class. An item counts whether it stands alone, as `weight`, or in an expression
    about it alone, as `weight.dtype` or `None if weight is None else weight`.
    """
    return sum(set(items) >= NAMES for items in lists(ast.parse(source)))


def lists(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            yield [a.arg for a in (*node.posonlyargs, *node.args, *node.kwonlyargs)]
        elif isinstance(node, ast.Call):
            given = [name_of(a) for a in node.args]
            yield given + [k.arg for k in node.keywords]
        elif isinstance(node, ast.Tuple | ast.List):
            yield [name_of(item) for item in node.elts]
        elif isinstance(node, ast.ClassDef):
            yield [b.target.id for b in node.body if isinstance(b, ast.AnnAssign)]


def name_of(item: ast.AST) -> str | None:
    """The argument that an item is about, if it is about one alone."""
    names = {n.id for n in ast.walk(item) if isinstance(n, ast.Name)} & NAMES
    return names.pop() if len(names) == 1 else None


def counted(root: Path) -> Counter:
    """By file of the package. Device code and launch/ have lists of arrays, not of arguments."""
    package = root / "tilenorm"
    files = [p for p in package.rglob("*.py") if p.parent.name not in ("kernels", "launch")]
    found = {str(p.relative_to(package)): written_lists(p.read_text()) for p in files}
    return Counter({name: number for name, number in found.items() if number})


def test_the_argument_list_is_written_out_at_most_ten_times():
    found = counted(ROOT)
    assert found.total() <= MOST, found
