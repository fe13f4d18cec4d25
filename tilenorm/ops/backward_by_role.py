"""The torch.library ops of backward passes whose tensors go by their roles, in one loop: those of
norms modulated by group, and of heads that are rotated.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..spec import NormSpec
from . import reference
from .bound import norm_of
from .gradients import needs_of
from .layout import vector_of
from .library import LIBRARY, TAGS, tell_others
from .registry import MAX_ROWS, on_device_of
from .torch_private import in_forward_mode


class Backward:
    """The arguments of such an op.

    tensors: by ROLES, of which the first two are the gradients of the results, "dy" and "dsum".
    options: the others by their names. MASKED: the roles of the tensors whose gradients the op
    returns, in the order of output_mask. PLACES: where these stand in Needs.gradients.
    """

    NAME: ClassVar[str]
    SCHEMA: ClassVar[str]  # its arguments and results
    ROLES: ClassVar[tuple[str, ...]]
    MASKED: ClassVar[tuple[str, ...]]
    PLACES: ClassVar[tuple[int, ...]]
    NAMES: ClassVar[tuple[str, ...]]  # of all arguments

    def __init__(self, arguments: Sequence, by_name: dict[str, Any]):
        given = {"backend": None} | dict(zip(self.NAMES, arguments, strict=False)) | by_name
        first = len(self.ROLES)
        values = map(given.__getitem__, self.NAMES[:first])
        self.tensors: dict[str, Any] = dict(zip(self.ROLES, values, strict=True))
        self.options = {name: given[name] for name in self.NAMES[first:]}

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

    @classmethod
    def argument(cls, role: str) -> str:
        """The name of the argument of a role."""
        return cls.NAMES[cls.ROLES.index(role)]

    def needs(self, spec: NormSpec) -> Needs:
        each = zip(self.MASKED, self.options["output_mask"], strict=True)
        asked = [role for role, need in each if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    def kept(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """The tensors of NormSpec.kept, with numbers as vectors."""
        tensors, numbers = self.tensors, reference.STATISTICS
        return tuple([vector_of(tensors[r]) if r in numbers else tensors[r] for r in spec.kept])

    def dtype_of(self, role: str) -> str | None:
        tensor = self.tensors[role]
        return None if tensor is None else reference.name_of(tensor.dtype)

    def shown(self, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of what a backward pass does; what is absent is an empty tensor."""
        every = [found[place] for place in self.PLACES] if found else [None] * len(self.PLACES)
        x = self.tensors["x"]
        return tuple([x.new_empty(0) if t is None else t for t in every])


def run(kind: type[Backward], *arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are not asked for are empty tensors."""
    call = kind(arguments, {})
    x, dy, dsum = (call.tensors[role] for role in ("x", "dy", "dsum"))
    if in_forward_mode(tuple(call.tensors.values())):
        raise NotImplementedError(f"torch.ops.tilenorm.{kind.NAME} has no forward-mode derivative")
    spec, long = call.spec, x.numel() > MAX_ROWS * call.hidden
    needs, backend = call.needs(spec), call.options["backend"]
    if not any(needs.gradients):
        return call.shown(())
    bound = norm_of(spec, x.device.type, x.get_device(), long, backend).backward(spec, needs)
    with on_device_of(x):
        return call.shown(bound(dy, dsum, call.kept(spec), call.options["eps"]))


def decomposed(kind: type[Backward], *arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = kind(arguments, by_name)
    spec, dy, found = call.spec, call.tensors["dy"], ()
    needs = call.needs(spec)
    if any(needs.gradients):
        incoming = dy, call.tensors["dsum"], call.tensors
        found = reference.backward(spec, needs, *incoming, call.options["eps"])
    return call.shown(found)


def fake(kind: type[Backward], *arguments) -> tuple[Tensor, ...]:
    tell_others()
    call = kind(arguments, {})
    spec, x = call.spec, call.tensors["x"]
    needed = call.needs(spec).gradients
    made = []
    for place, like in zip(kind.PLACES, call.likes(spec), strict=True):
        made.append(like.new_empty(like.shape) if needed[place] else x.new_empty(0))
    return tuple(made)


def define(kind: type[Backward]) -> None:
    """Define the op of a class, and register the above."""
    LIBRARY.define(f"{kind.NAME}{kind.SCHEMA}", tags=TAGS)
    op = getattr(torch.ops.tilenorm, kind.NAME).default
    kind.NAMES = tuple(a.name for a in op._schema.arguments)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(kind.NAME, partial(run, kind), key)
    torch.library.register_fake(f"tilenorm::{kind.NAME}", partial(fake, kind), lib=LIBRARY)
