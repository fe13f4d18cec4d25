"""The torch.library ops of backward passes: a class for each, whose tensors go by their roles, and
the functions that serve all of them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..launch.calls import Needs, needs_of
from ..spec import NormSpec
from . import reference
from .bound import norm_of
from .layout import heads_of, vector_of
from .library import register, tell_others
from .registry import MAX_ROWS, on_device_of
from .sharding import Rule
from .torch_private import in_forward_mode


class Backward:
    """The arguments of such an op.

    tensors: by ROLES, of which the first two are the gradients of the results, "dy" and "dsum", and
    those of LAST, which may be at the end, by their names. options: the others by their names.
    MASKED: the roles of the tensors whose gradients the op returns, in the order of output_mask.
    PLACES: where what the op returns stands in Needs.gradients, behind which stands y. TAKEN, MADE:
    a letter of sharding.Rule for each tensor and for each result.
    """

    NAME: ClassVar[str]
    SCHEMA: ClassVar[str]  # its arguments and results
    ROLES: ClassVar[tuple[str, ...]]
    LAST: ClassVar[tuple[str, ...]] = ()
    MASKED: ClassVar[tuple[str, ...]]
    PLACES: ClassVar[tuple[int, ...]]
    TAKEN: ClassVar[str]
    MADE: ClassVar[str]
    NAMES: ClassVar[tuple[str, ...]]  # of all arguments
    ARGUMENTS: ClassVar[dict[str, str]]  # the names of those that are tensors, by ROLES and LAST
    DEFAULTS: ClassVar[dict[str, Any]]  # of the arguments that have one

    def __init__(self, arguments: Sequence, by_name: dict[str, Any]):
        given = self.DEFAULTS | dict(zip(self.NAMES, arguments, strict=False)) | by_name
        self.tensors: dict[str, Any] = {r: given.pop(name) for r, name in self.ARGUMENTS.items()}
        self.options = given

    @property
    def hidden(self) -> int:
        return self.options["hidden"]

    @property
    def spec(self) -> NormSpec:
        """The spec of the norm, by the dtypes of the tensors."""
        raise NotImplementedError

    def likes(self, spec: NormSpec) -> Sequence[Tensor | None]:
        """For each gradient a tensor of its shape and dtype."""
        raise NotImplementedError

    def rules(self) -> Iterable[Rule]:
        """The rows of the table in sharding.py, for tensors of which `shape` is read."""
        raise NotImplementedError

    @property
    def more(self) -> tuple[Tensor, ...]:
        """The terms of dy behind the first."""
        return ()

    def needs(self, spec: NormSpec) -> Needs:
        each = zip(self.MASKED, self.options["output_mask"], strict=True)
        asked = [role for role, need in each if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    @property
    def heads(self) -> int:
        return heads_of(self.hidden, self.tensors["weight"], self.tensors["bias"])

    def kept(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """The tensors of NormSpec.kept, with numbers as vectors."""
        tensors, numbers = self.tensors, reference.STATISTICS
        return tuple([vector_of(tensors[r]) if r in numbers else tensors[r] for r in spec.kept])

    def dtype_of(self, role: str) -> str | None:
        tensor = self.tensors[role]
        return None if tensor is None else reference.name_of(tensor.dtype)

    def shown(self, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of what a backward pass does; what is absent is an empty tensor."""
        every, x = (*found, *[None] * len(self.PLACES)), self.tensors["x"]
        shown = [every[place] for place in self.PLACES] if found else every
        return tuple([x.new_empty(0) if t is None else t for t in shown])


def asked_of(needs: Needs) -> tuple[bool, ...]:
    """What a backward pass computes, in the order of Backward.PLACES."""
    return *needs.gradients, needs.output


def run(kind: type[Backward], *arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are not asked for are empty tensors."""
    call = kind(arguments, {})
    x, dy, dsum = (call.tensors[role] for role in ("x", "dy", "dsum"))
    more = call.more
    if in_forward_mode(tuple(call.tensors.values())):
        raise NotImplementedError(f"torch.ops.tilenorm.{kind.NAME} has no forward-mode derivative")
    spec, long = call.spec, x.numel() > MAX_ROWS * call.hidden
    needs, backend = call.needs(spec), call.options["backend"]
    if not any(asked_of(needs)):
        return call.shown(())
    bound = norm_of(spec, x.device.type, x.get_device(), long, backend).backward(spec, needs)
    with on_device_of(x):
        return call.shown(bound(dy, dsum, call.kept(spec), call.options["eps"], more))


def decomposed(kind: type[Backward], *arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = kind(arguments, by_name)
    spec, dy, found = call.spec, call.tensors["dy"], ()
    needs = call.needs(spec)
    if any(asked_of(needs)):
        incoming = dy, call.tensors["dsum"], call.tensors
        found = reference.backward(spec, needs, *incoming, call.options["eps"], call.more)
    return call.shown(found)


def fake(kind: type[Backward], *arguments) -> tuple[Tensor, ...]:
    tell_others()
    call = kind(arguments, {})
    spec, x, _ = call.spec, call.tensors["x"], call.more  # which raises
    needed = asked_of(call.needs(spec))
    made = []
    for place, like in zip(kind.PLACES, call.likes(spec), strict=True):
        made.append(like.new_empty(like.shape) if needed[place] else x.new_empty(0))
    return tuple(made)


def define(kind: type[Backward]) -> None:
    """Define the op of a class, and register the above."""
    register(kind.NAME, kind.SCHEMA, partial(run, kind), partial(fake, kind))
    op = getattr(torch.ops.tilenorm, kind.NAME).default
    arguments = op._schema.arguments
    kind.NAMES = tuple(a.name for a in arguments)
    kind.ARGUMENTS = dict(zip(kind.ROLES, kind.NAMES, strict=False)) | {n: n for n in kind.LAST}
    kind.DEFAULTS = {a.name: a.default_value for a in arguments if a.has_default_value()}
