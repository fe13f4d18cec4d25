"""The torch.library op modulated_norm_backward: the backward pass of a norm modulated by group."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..spec import NormSpec
from ..table import MODULATION
from .backward_by_role import Backward, define
from .gradients import MODULATED_SAVED, PLACES
from .layout import rows_shape
from .sharding import Rule, rules_by_group


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
        t, shape, hidden = self.tensors, self.tensors["x"].shape, self.hidden
        dims = len(shape) - len(rows_shape(shape, hidden)) if hidden else 1
        return rules_by_group(t["x"], [t["weight"], t["bias"]], t["mod_scale"], dims, hidden)


define(ModulatedBackward)
