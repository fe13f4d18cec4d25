"""The torch.library ops norm and norm_backward: their schemas, and their arguments in groups.

One pair of ops serves every norm. After its tensors an op takes the fields of Options one by one,
then eps and what is particular to its direction, and last, each absent by default, the tensors of
the few calls that have them.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..spec import PLAIN, Options
from .tensors import Saved, Tensors, terms_after, trimmed

LIBRARY = torch.library.Library("tilenorm", "DEF")
_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}
OPTIONS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Options).items())
TERMS = ("grad_output_2", "grad_output_3", "grad_output_4")
FIRST = 8  # tensors of norm_backward before the options
_NEIGHBOURS = "".join(f", Tensor? {name}=None" for name in Tensors._fields[PLAIN:])
LIBRARY.define(
    "norm(Tensor input, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias,"
    f" {OPTIONS}, float eps, bool save, str? backend=None{_NEIGHBOURS})"
    " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate,"
    " Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd,"
    f" {OPTIONS}, float eps, bool added, bool[5] output_mask, str? backend=None,"
    " Tensor? grad_output_2=None, Tensor? grad_output_3=None, Tensor? grad_output_4=None,"
    " bool output=False, Tensor? dropout_mask=None, Tensor? layer_scale=None)"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight,"
    " Tensor grad_bias, Tensor output)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def tensor_names(op: str) -> list[str]:
    """The names of an op's arguments that are tensors."""
    schema = getattr(torch.ops.tilenorm, op).default._schema
    return [a.name for a in schema.arguments if "Tensor" in str(a.type)]


def first_and_others(op: str, given: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the tensors that every call of an op passes, and of those behind its options
    that a bound function takes where tensors of these names are given.
    """
    if op not in ("norm", "norm_backward"):
        return tuple(tensor_names(op)), ()
    if op == "norm":
        names = Tensors._fields
        return names[:PLAIN], names[PLAIN:] if set(names[PLAIN:]) & set(given) else ()
    factors = Tensors._fields[-2:]
    terms = tuple(name for name in TERMS if name in given)
    first = ("grad_output", "grad_sum", "input", "gate", "weight", "bias", "mean", "rstd")
    return first, terms + (factors if set(factors) & set(given) else ())


class Forward(NamedTuple):
    """The arguments of the op norm. tensors: as the op takes them, see Tensors."""

    tensors: tuple
    options: Options
    eps: float
    save: bool
    backend: str | None = None

    @classmethod
    def of(cls, arguments: tuple, **by_name) -> "Forward":
        end = PLAIN + len(Options._fields)
        tensors, options = arguments[:PLAIN], Options(*arguments[PLAIN:end])
        eps, save, *last = arguments[end:]
        if by_name or len(last) > 1:
            by_name |= zip(("backend", *Tensors._fields[PLAIN:]), last, strict=False)
            last = [by_name.pop("backend", None)]
            tensors = trimmed(Tensors(*tensors, **by_name))
        return cls(tensors, options, eps, save, *last)


class Backward(NamedTuple):
    """The arguments of the op norm_backward.

    added: whether there was a residual. grad_output_2 and so on: what is added to dy, from left to
    right; each addition is rounded to dy's dtype, as autograd's own are. output: y is written once
    more, with the bits of the forward pass, whose eps and rounding have to be given then.
    NormSpec.output_refused tells for what it is refused. dropout_mask, layer_scale: what the input
    was multiplied by before the residual was added.
    """

    dy: Tensor
    dsum: Tensor | None
    saved: Saved
    options: Options
    eps: float
    added: bool
    mask: tuple[bool, ...]
    backend: str | None = None
    grad_output_2: Tensor | None = None
    grad_output_3: Tensor | None = None
    grad_output_4: Tensor | None = None
    output: bool = False
    dropout_mask: Tensor | None = None
    layer_scale: Tensor | None = None

    @classmethod
    def of(cls, arguments: tuple, **by_name) -> "Backward":
        end = FIRST + len(Options._fields)
        dy, dsum, *saved = arguments[:FIRST]
        options = Options(*arguments[FIRST:end])
        return cls(dy, dsum, Saved(*saved), options, *arguments[end:], **by_name)

    @property
    def tensors(self) -> tuple:
        """Tensors with the dtypes and the device of those that the forward pass had."""
        x, gate, weight, bias = self.saved[:4]
        if self.added:
            return trimmed(Tensors(self.dy, x, gate, weight, bias, None, None, *self.branch))
        # Only what is added to the normalised rows gives y another dtype.
        skip = None if self.dy.dtype == x.dtype else self.dy
        return trimmed(Tensors(x, None, gate, weight, bias, skip=skip))

    @property
    def more(self) -> tuple[Tensor, ...]:
        """The terms of dy behind the first. Raises as tensors.terms_after does."""
        return terms_after(self.dy, self.grad_output_2, self.grad_output_3, self.grad_output_4)

    @property
    def branch(self) -> tuple[Tensor | None, Tensor | None]:
        """What the input was multiplied by."""
        return self.dropout_mask, self.layer_scale
