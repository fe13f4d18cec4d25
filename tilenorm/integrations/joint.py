"""Inductor's hook for joint graphs: gradients take over the sums around them before the partition.

Inductor runs a pass of its option joint_custom_post_pass on the graph of forward and backward, from
which AOTAutograd then finds what to save. This module is imported where Inductor compiles, because
it imports Inductor.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .fx.gradients import Folds, fold_sums


class FoldPass(CustomGraphPass):
    """A pass that runs other passes, and then folds.

    others: a pass, a sequence of them, or None. output: as in fold_sums. tell: is given what was
    folded in each graph that has gradients.
    """

    def __init__(self, others: object, output: bool, tell: Callable[[Folds], None]):
        passes = others if isinstance(others, list | tuple) else (others,)
        self.others = [p for p in passes if p is not None]
        self.output, self.tell = output, tell

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        folds = fold_sums(graph, output=self.output)
        if folds.folded or folds.left:
            self.tell(folds)

    def uuid(self) -> object | None:
        """What compiled code depends on; None, which keeps it out of caches, if unknown."""
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.others)
        return None if None in ids else (_version(), self.output, ids)


@cache
def _version() -> str:
    """A hash of the sources of this file and of the FX passes."""
    paths = (Path(__file__), *sorted((Path(__file__).parent / "fx").glob("*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
