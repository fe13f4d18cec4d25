"""Inductor's hook for joint graphs: gradients take over the sums around them before the partition.

Inductor runs a pass of its option joint_custom_post_pass on the graph of forward and backward, from
which AOTAutograd then finds what to save.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Graph

from ..ops.torch_private import inductor_joint_pass
from .fx.gradients import Folds, fold_sums

OPTION = "joint_custom_post_pass"


def joint_pass(others: object, output: bool, tell: Callable[[Folds], None]) -> object:
    """A pass for Inductor that runs other passes, and then folds.

    others: a pass, a sequence of them, or None. output: as in fold_sums. tell: is given what was
    folded in each graph that has gradients.
    """
    passes = tuple(others) if isinstance(others, list | tuple) else (others,)
    return _pass_class()(tuple(p for p in passes if p is not None), output, tell)


@cache
def _pass_class() -> type:
    base: Any = inductor_joint_pass()[1]

    class FoldPass(base):
        def __init__(self, others: tuple, output: bool, tell: Callable):
            self.others, self.output, self.tell = others, output, tell

        def __call__(self, graph: Graph) -> None:
            for other in self.others:
                other(graph)
            folds = fold_sums(graph, output=self.output)
            if folds.folded or folds.left:
                self.tell(folds)

        def uuid(self) -> object | None:
            """What compiled code depends on; None, which keeps it out of caches, if unknown."""
            ids = tuple(p.uuid() if isinstance(p, base) else None for p in self.others)
            return None if None in ids else (_version(), self.output, ids)

    return FoldPass


@cache
def _version() -> str:
    """A hash of the sources of this file and of the FX passes."""
    folder = Path(__file__).parent
    paths = (Path(__file__), *sorted((folder / "fx").glob("*.py")))
    sources = [path.read_bytes() for path in paths]
    return hashlib.sha256(b"".join(sources)).hexdigest()
