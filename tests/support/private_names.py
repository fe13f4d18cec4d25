"""The private names of PyTorch's that torch_private.py uses, and that module with stand-ins.

It imports nothing of tilenorm, which is imported with the stand-ins.
"""

import ast
import importlib.util
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

SOURCE = Path(__file__).parents[2] / "tilenorm" / "ops" / "pytorch" / "torch_private.py"


def _variables() -> dict[str, tuple[str, ...]]:
    """Of each private name, the variables that are falsy where it or a name beside it fails."""
    found = {}
    for node in ast.parse(SOURCE.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call)]
        calls = [n for n in calls if getattr(n.func, "id", None) in ("_found", "_named")]
        paths = [a.value for call in calls for a in call.args if isinstance(a, ast.Constant)]
        targets = tuple(n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name))
        found |= dict.fromkeys(paths, targets)
    return found


VARIABLES = _variables()
NAMES = list(VARIABLES)


def absent() -> object:
    raise AttributeError("a name that this PyTorch lacks")


@contextmanager
def stand_ins(given: dict[str, Callable[[], object]]) -> Iterator[None]:
    """In this block a torch_private that is imported gets what a function returns or raises in
    place of a name.
    """
    attrgetter = operator.attrgetter

    def getter(path: str) -> Callable:
        return (lambda _: given[path]()) if path in given else attrgetter(path)

    with patch.object(operator, "attrgetter", getter):
        yield


def loaded(given: dict[str, Callable[[], object]]) -> types.ModuleType:
    """A second torch_private, with stand-ins."""
    spec = importlib.util.spec_from_file_location("tilenorm.ops.pytorch.torch_private", SOURCE)
    module = importlib.util.module_from_spec(spec)
    with stand_ins(given):
        spec.loader.exec_module(module)
    return module
