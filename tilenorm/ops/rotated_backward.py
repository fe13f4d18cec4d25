"""The torch.library op rms_norm_rope_backward: the backward pass of heads that are rotated."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..spec import NormSpec, Rotation
from ..table import OF_KEY
from .backward_by_role import Backward, define
from .gradients import ROTATED_PLACES, ROTATED_SAVED
from .sharding import Rule, rules_rotated


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


define(RotatedBackward)
