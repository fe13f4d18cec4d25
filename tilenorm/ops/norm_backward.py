"""The torch.library op norm_backward: of one norm. The backward pass of every op is made of it,
except for modulated norms and rotated heads, which have ops of their own.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, get_type_hints

from torch import Tensor

from ..launch.calls import Needs
from ..spec import NormSpec, Options
from ..table import FACTORS
from .backward_by_role import Backward, define
from .bound import MOST_CALLS
from .gradients import PLACES, refuse_output
from .sharding import Rule, rules

_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}
OPTIONS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Options).items())
TERMS = ("grad_output_2", "grad_output_3", "grad_output_4")


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


define(NormBackward)
