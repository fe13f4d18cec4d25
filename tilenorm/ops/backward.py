"""The torch.library ops of backward passes: a class for each.

norm_backward is of one norm. The backward pass of every op is made of it, except for modulated
norms and rotated heads, which have ops of their own.
"""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ..launch.calls import Needs
from ..spec import NormSpec, Options
from ..table import BACKWARD, FACTORS, OPS, TERMS
from . import reference
from .bound import MOST_CALLS, kinds_of, norm_of, specs_of
from .gradients import refuse_output
from .inner import Inner, asked_of, define
from .layout import heads_of, vector_of
from .registry import MAX_ROWS, on_device_of
from .torch_private import in_forward_mode


class Backward(Inner):
    """A call of the op of a backward pass. Two of its tensors are the gradients of the results,
    "dy" and "dsum". The op returns what Needs.gradients asks for, and y.
    """

    @property
    def hidden(self) -> int:
        return self.options["hidden"]

    @property
    def more(self) -> tuple[Tensor, ...]:
        """The terms of dy behind the first."""
        return ()

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

    def run(self) -> tuple[Tensor, ...]:
        x, dy, dsum = (self.tensors[role] for role in ("x", "dy", "dsum"))
        more = self.more
        if in_forward_mode(tuple(self.tensors.values())):
            name = f"torch.ops.tilenorm.{self.row.name}"
            raise NotImplementedError(f"{name} has no forward-mode derivative")
        spec, long = self.spec, x.numel() > MAX_ROWS * self.hidden
        needs, backend = self.needs(spec), self.options["backend"]
        if not any(asked_of(needs)):
            return self.returned(())
        norm = norm_of(spec, x.device.type, x.get_device(), long, backend)
        bound = norm.backward(spec, needs)
        with on_device_of(x):
            return self.returned(bound(dy, dsum, self.kept(spec), self.options["eps"], more))

    def decomposed(self) -> tuple[Tensor, ...]:
        spec, given = self.spec, self.tensors
        needs, found = self.needs(spec), ()
        if any(asked_of(needs)):
            incoming = given["dy"], given["dsum"], given
            found = reference.backward(spec, needs, *incoming, self.options["eps"], self.more)
        return self.returned(found)

    def returned(self, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of what a backward pass does; what is absent is an empty tensor."""
        places, x = self.row.places, self.tensors["x"]
        every = (*found, *[None] * (1 + max(places)))
        shown = [every[place] for place in places]
        return tuple([x.new_empty(0) if t is None else t for t in shown])


class NormBackward(Backward):
    """added: whether there was a residual. TERMS are added to grad_output, from left to right; each
    addition is rounded to its dtype, as autograd's own are. output: y is written once more, with
    the bits of the forward pass, whose eps and rounding have to be given then;
    NormSpec.output_refused tells for what it is refused.
    """

    row = BACKWARD["norm_backward"]

    def __init__(self, arguments: Sequence, by_name: dict | None = None):
        super().__init__(arguments, by_name)
        if self.options["norm"] != "layer":
            self.tensors["mean"] = None

    @property
    def _terms(self) -> list[Tensor | None]:
        """What is added to dy."""
        return [self.tensors[port.role] for port in TERMS]

    @property
    def more(self) -> tuple[Tensor, ...]:
        return terms_after(self.tensors["dy"], *self._terms)

    def check(self) -> None:
        terms_after(self.tensors["dy"], *self._terms)

    @property
    def spec(self) -> NormSpec:
        options = self.norm_options
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
        terms = 1 + sum(term is not None for term in self._terms)
        return super().needs(spec)._replace(terms=terms, output=self.options["output"])


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

    row = BACKWARD["modulated_norm_backward"]

    @property
    def spec(self) -> NormSpec:
        hidden, shift = self.hidden, self.options["shift"]
        dtypes = {r: self.dtype_of(r) for r in ("weight", "bias", "mod_scale", "mod_gate")}
        if self.options["added"]:
            dtypes["residual"] = self.dtype_of("x")
        heads, dtype = self.heads if self.heads > 1 else 0, self.dtype_of("dy")
        return NormSpec(self.options["norm"], hidden, dtype, heads=heads, mod_shift=shift, **dtypes)


class RotatedBackward(Backward):
    """Where output_heads_first, the incoming gradients are (B, H, S, D), and the input and its
    gradient (B, S, H, D).
    """

    row = BACKWARD["rms_norm_rope_backward"]

    @property
    def spec(self) -> NormSpec:
        op = OPS["rms_norm_rope"]
        tensors = [self.tensors[role] for role in op.roles]
        options = self.hidden, *[self.options.get(name, "late") for name in op.options]
        return specs_of(op, options, *kinds_of(op, tensors, self.hidden))[0]


for _kind in (NormBackward, ModulatedBackward, RotatedBackward):
    define(_kind)
