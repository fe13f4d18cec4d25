"""The torch.library ops that users do not call: what a call of one is, and how each is defined.

Backward passes (backward.py) and rows in pieces (split/library.py) have a class for each op.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from .. import table
from ..launch.calls import Needs, needs_of
from ..spec import NormSpec, Options
from .library import register, taken, tell_others
from .sharding import Rule, rules_of


class Result(NamedTuple):
    """What an op returns. shape: None for an empty tensor."""

    shape: Sequence[int] | None
    dtype: torch.dtype


class Inner:
    """A call of an op. tensors: by their roles. options: the other arguments by their names.

    A class has the op's ROW, and `spec`, the NormSpec by the dtypes of the tensors; run(), which
    returns what the op does for real tensors, and decomposed(), the same in PyTorch's own
    operators. Where results and rules alone are asked for, a shape and a dtype may stand for a
    tensor.
    """

    ROW: ClassVar[table.Inner]
    DEFAULTS: ClassVar[dict[str, Any]]  # of the arguments that have one
    spec: Any
    run: Any
    decomposed: Any

    def __init__(self, arguments: Sequence, by_name: dict[str, Any] | None = None):
        named = dict(zip(self.ROW.arguments, arguments, strict=False)) | (by_name or {})
        given, ports = self.DEFAULTS | named, self.ROW.tensors
        self.tensors: dict[str, Any] = {port.role: given.pop(port.name) for port in ports}
        self.options = given

    @property
    def norm_options(self) -> Options:
        return Options(*[self.options[name] for name in Options._fields])

    def needs(self, spec: NormSpec) -> Needs:
        """What a backward pass computes."""
        each = zip(self.ROW.masked, self.options["output_mask"], strict=True)
        asked = [role for role, need in each if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    def rules(self) -> Iterable[Rule]:
        """The rows of the table in sharding.py."""
        options, tensors = self.options, self.tensors.values()
        heads_first = options.get("output_heads_first", False)
        return rules_of(self.ROW.tensors, tensors, options["hidden"], heads_first)

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
        for place, port in zip(self.ROW.places, self.ROW.makes, strict=True):
            like = likes[port.role] if needed[place] else Result(None, t["x"].dtype)
            found.append(Result(like.shape, like.dtype))
        return found


def asked_of(needs: Needs) -> tuple[bool, ...]:
    """What a backward pass computes, in the order that Inner.places of the table tells of."""
    return *needs.gradients, needs.output


def run(kind: type[Inner], *arguments) -> Any:
    return kind(arguments).run()


def decomposed(kind: type[Inner], *arguments, **by_name) -> Any:
    return kind(arguments, by_name).decomposed()


def fake(kind: type[Inner], *arguments) -> Any:
    tell_others()
    call = kind(arguments)
    call.check()
    x, results = call.tensors["x"], call.results()
    made = [x.new_empty(0 if shape is None else shape, dtype=dtype) for shape, dtype in results]
    return tuple(made) if len(made) > 1 else made[0]


def define(kind: type[Inner]) -> None:
    """Define an op by its row, with its implementation and its fake."""
    row = kind.ROW
    makes = ", ".join(f"Tensor {port.name}" for port in row.makes)
    makes = f"({makes})" if len(row.makes) > 1 else "Tensor"
    schema = f"({', '.join(taken(row.takes))}, {row.options}) -> {makes}"
    register(row.name, schema, partial(run, kind), partial(fake, kind))
    arguments = getattr(torch.ops.tilenorm, row.name).default._schema.arguments
    kind.DEFAULTS = {a.name: a.default_value for a in arguments if a.has_default_value()}
