"""The torch.library ops that users do not call: what a call of one is, and how each is defined.

Backward passes (backward.py) and rows in pieces (split/library.py) have a class for each op.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .. import table
from ..launch.calls import Needs, needs_of
from ..spec import TENSORS, NormSpec
from . import library
from .library import Result
from .reference import name_of


class Inner:
    """A call of an op. tensors: by their roles. options: the other arguments by their names.

    A class has the op's row of the table, `spec`, the NormSpec by the dtypes of the tensors, run()
    and decomposed(). Where results alone are asked for, a shape and a dtype may stand for a tensor.
    """

    row: ClassVar[table.Inner]
    DEFAULTS: ClassVar[dict[str, Any]]  # of the arguments that have one
    spec: Any

    def __init__(self, arguments: Sequence, by_name: dict[str, Any] | None = None):
        named = dict(zip(self.row.arguments, arguments, strict=False)) | (by_name or {})
        given, ports = self.DEFAULTS | named, self.row.tensors
        self.tensors: dict[str, Any] = {port.role: given.pop(port.name) for port in ports}
        self.options = given

    @property
    def x(self) -> Any:
        return self.tensors["x"]

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtypes of the tensors that a spec has under their roles."""
        there = {role: t for role, t in self.tensors.items() if role in TENSORS and t is not None}
        return {role: name_of(t.dtype) for role, t in there.items()}

    def needs(self, spec: NormSpec) -> Needs:
        """What a backward pass computes."""
        each = zip(self.row.masked, self.options["output_mask"], strict=True)
        asked = [role for role, need in each if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    def check(self) -> None:
        """Raise RuntimeError where tensors do not fit each other."""

    def results(self) -> Sequence[Result]:
        """Those of a backward pass. A gradient has the shape and the dtype of its tensor. Once a
        residual was added, x is the sum, and dy has the dtype of the input.
        """
        t, found = self.tensors, []
        likes = t | {"residual": t["x"], "y": t["dy"]}
        likes["x"] = t["dy"] if self.options.get("added") else t["x"]
        if shift := self.options.get("shift"):
            likes["mod_shift"] = Result(t["mod_scale"].shape, getattr(torch, shift))
        needed = asked_of(self.needs(self.spec))
        for place, port in zip(self.row.places, self.row.makes, strict=True):
            like = likes[port.role] if needed[place] else Result(None, t["x"].dtype)
            found.append(Result(like.shape, like.dtype))
        return found


def asked_of(needs: Needs) -> tuple[bool, ...]:
    """What a backward pass computes, in the order that Inner.places of the table tells of."""
    return *needs.gradients, needs.output


def define(kind: type[Inner]) -> None:
    """Define an op by its row."""
    row = kind.row
    library.define(kind, row, row.options)
    arguments = getattr(torch.ops.tilenorm, row.name).default._schema.arguments
    kind.DEFAULTS = {a.name: a.default_value for a in arguments if a.has_default_value()}
