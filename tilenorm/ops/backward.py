"""The torch.library ops of backward passes: a class for each, and the functions that serve all.

norm_backward is of one norm. The backward pass of every op is made of it, except for modulated
norms and rotated heads, which have ops of their own.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from ..launch.calls import Needs, needs_of
from ..spec import NormSpec, Options, Rotation
from ..table import FACTORS, MODULATION, OF_KEY
from . import reference
from .bound import MOST_CALLS, norm_of
from .gradients import MODULATED_SAVED, PLACES, ROTATED_PLACES, ROTATED_SAVED, refuse_output
from .layout import heads_of, vector_of
from .library import register, tell_others
from .registry import MAX_ROWS, on_device_of
from .sharding import Rule, rules, rules_by_group, rules_rotated
from .torch_private import in_forward_mode

_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}
OPTIONS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Options).items())
TERMS = ("grad_output_2", "grad_output_3", "grad_output_4")


class Backward:
    """The arguments of an op of a backward pass.

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


class NormBackward(Backward):
    """added: whether there was a residual. TERMS: what is added to grad_output, from left to right;
    each addition is rounded to its dtype, as autograd's own are. output: y is written once more,
    with the bits of the forward pass, whose eps and rounding have to be given then;
    NormSpec.output_refused tells for what it is refused.
    """

    NAME = "norm_backward"
    SCHEMA = (
        "(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate,"
        " Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd,"
        f" {OPTIONS}, float eps, bool added, bool[5] output_mask, str? backend=None"
        f"{''.join(f', Tensor? {name}=None' for name in TERMS)},"
        f" bool output=False{''.join(f', Tensor? {name}=None' for name in FACTORS)})"
        " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight,"
        " Tensor grad_bias, Tensor output)"
    )
    ROLES = ("dy", "dsum", "x", "gate", "weight", "bias", "mean", "rstd")
    LAST = (*TERMS, *FACTORS)
    MASKED = tuple(PLACES)[:5]
    PLACES = tuple(range(6))
    TAKEN = "rrrrpprr" + "rrr" + "rw"
    MADE = "rrrddr"

    def __init__(self, arguments: Sequence, by_name: dict[str, Any]):
        super().__init__(arguments, by_name)
        if self.options["norm"] != "layer":
            self.tensors["mean"] = None

    @property
    def more(self) -> tuple[Tensor, ...]:
        return terms_after(self.tensors["dy"], *map(self.tensors.get, TERMS))

    @property
    def spec(self) -> NormSpec:
        options = Options(*(self.options[name] for name in Options._fields))
        dtypes = {"x": self.dtype_of("dy"), "residual": self.dtype_of("x")}
        if not self.options["added"]:
            # Only what is added to the normalised rows gives y another dtype.
            x, dy = dtypes["residual"], dtypes["x"]
            dtypes = {"x": x, "skip": None if dy == x else dy}
        dtypes |= {role: self.dtype_of(role) for role in ("gate", "weight", "bias", *FACTORS)}
        try:
            return _spec_of(options, self.heads, *dtypes.items())
        except TypeError:  # a symbolic size has no hash
            return NormSpec.of_tensors(options, dtypes, self.heads)

    def needs(self, spec: NormSpec) -> Needs:
        """Raises NotImplementedError as refuse_output does."""
        if self.options["output"]:
            refuse_output(spec)
        terms = 1 + sum(self.tensors[name] is not None for name in TERMS)
        return super().needs(spec)._replace(terms=terms, output=self.options["output"])

    def likes(self, spec: NormSpec) -> Sequence[Tensor | None]:
        t = self.tensors
        first = t["dy"] if self.options["added"] else t["x"]
        return first, t["x"], t["gate"], t["weight"], t["bias"], t["dy"]

    def rules(self) -> Iterable[Rule]:
        t = self.tensors
        return rules(t["x"], [t["weight"], t["bias"]], self.hidden)


@lru_cache(MOST_CALLS)
def _spec_of(options: Options, heads: int, *named: tuple) -> NormSpec:
    return NormSpec.of_tensors(options, dict(named), heads)


def terms_after(dy: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The terms of dy behind the first, which is `dy`.

    Raises RuntimeError where a term is not of dy's shape, dtype and device, or where an earlier one
    is absent.
    """
    given = 1 + max((i for i, t in enumerate(others) if t is not None), default=-1)
    for i, term in enumerate(others[:given]):
        name = f"tilenorm::norm_backward: argument 'grad_output_{i + 2}'"
        if term is None:
            raise RuntimeError(f"{name} is absent, but 'grad_output_{given + 1}' is given")
        wanted, got = ((t.shape, t.dtype, t.device) for t in (dy, term))
        if got != wanted:
            told = [f"{list(shape)} {dtype} on {device}" for shape, dtype, device in (wanted, got)]
            raise RuntimeError(f"{name} takes what 'grad_output' is, {told[0]}, got {told[1]}")
    return others[:given]


class ModulatedBackward(Backward):
    """x is the sum where there was a residual; `branch` is the input where a gate by group
    multiplied it. shift: the dtype of the shift, or None without one. added: whether there was a
    residual. A mask has a place for the gradient of a gate by rows, which no modulated norm has.
    """

    NAME = "modulated_norm_backward"
    SCHEMA = (
        "(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? branch, Tensor? weight,"
        " Tensor? bias, Tensor? mean, Tensor rstd, Tensor scale, Tensor? gate, SymInt hidden,"
        " str norm, str? shift, float eps, bool added, bool[8] output_mask, str? backend=None)"
        " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_rows, Tensor grad_weight,"
        " Tensor grad_bias, Tensor grad_scale, Tensor grad_shift, Tensor grad_gate)"
    )
    ROLES = ("dy", "dsum", *MODULATED_SAVED)
    MASKED = (*tuple(PLACES)[:5], *MODULATION)
    PLACES = tuple(range(8))
    TAKEN = "rrrrpprrgg"
    MADE = "rrrddeee"

    @property
    def spec(self) -> NormSpec:
        hidden, shift = self.hidden, self.options["shift"]
        dtypes = {r: self.dtype_of(r) for r in ("weight", "bias", "mod_scale", "mod_gate")}
        if self.options["added"]:
            dtypes["residual"] = self.dtype_of("x")
        heads, dtype = self.heads if self.heads > 1 else 0, self.dtype_of("dy")
        return NormSpec(self.options["norm"], hidden, dtype, heads=heads, mod_shift=shift, **dtypes)

    def likes(self, spec: NormSpec) -> Sequence[Tensor | None]:
        t = self.tensors
        scale, shift = t["mod_scale"], spec.mod_shift
        shift = shift and scale.new_empty(scale.shape, dtype=getattr(torch, shift))
        return t["dy"], t["x"], None, t["weight"], t["bias"], scale, shift, t["mod_gate"]

    def rules(self) -> Iterable[Rule]:
        t = self.tensors
        return rules_by_group(t["x"], [t["weight"], t["bias"]], t["mod_scale"], self.hidden)


class RotatedBackward(Backward):
    """Where output_heads_first, the incoming gradients are (B, H, S, D), and the input and its
    gradient (B, S, H, D).
    """

    NAME = "rms_norm_rope_backward"
    SCHEMA = (
        "(Tensor? grad_output, Tensor? grad_key_output, Tensor input, Tensor? weight, Tensor? key,"
        " Tensor? key_weight, Tensor rstd, Tensor? key_rstd, Tensor cos, Tensor sin,"
        " Tensor? positions, SymInt hidden, SymInt rotary_dim, bool interleaved,"
        " bool output_heads_first, float offset, float eps, bool[4] output_mask,"
        " str? backend=None)"
        " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_key, Tensor grad_key_weight)"
    )
    ROLES = ("dy", "dsum", *ROTATED_SAVED)
    MASKED = ("x", "weight", *OF_KEY)
    PLACES = ROTATED_PLACES
    TAKEN = "oorprprrtti"
    MADE = "rdrd"

    @property
    def spec(self) -> NormSpec:
        t, options = self.tensors, self.options
        head, dim, key = t["x"].shape[-1], options["rotary_dim"], t["key"]
        by_token = key is not None and self.hidden != head
        full, heads_first = t["cos"].shape[-1] == dim, options["output_heads_first"]
        table, positions = self.dtype_of("cos"), self.dtype_of("positions")
        how = Rotation(dim, head, options["interleaved"], table, full, positions, heads_first)
        return NormSpec(
            "rms",
            self.hidden,
            self.dtype_of("x"),
            offset=options["offset"],
            rotation=how,
            key_hidden=key.shape[-2] * head if by_token else 0,
            **{role: self.dtype_of(role) for role in ("weight", *OF_KEY)},
        )

    def likes(self, spec: NormSpec) -> Sequence[Tensor | None]:
        return [self.tensors[role] for role in self.MASKED]

    def rules(self) -> Iterable[Rule]:
        t, heads_first = self.tensors, self.options["output_heads_first"]
        tables = t["cos"], t["positions"]
        return rules_rotated(t["x"], *tables, t["weight"], self.hidden, heads_first)


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


KINDS = {kind.NAME: kind for kind in (NormBackward, ModulatedBackward, RotatedBackward)}
for _kind in KINDS.values():
    define(_kind)
