"""The torch.library ops that users do not call: their calls, and the ops of backward passes.

norm_backward is of one norm. The backward pass of every op is made of it, except for modulated
norms and rotated heads, which have ops of their own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...launch.calls import Needs, needs_of
from ...row import Op
from ...spec import TENSORS, NormSpec, Options
from ...table import BACKWARD, OPS, TERMS
from ..passes import reference
from ..passes.bound import MOST_CALLS, kinds_of, norm_of, specs_of
from ..passes.reading import heads_of, vector_of
from ..passes.reference import name_of
from ..passes.registry import MAX_ROWS, on_device_of
from ..pytorch.torch_private import in_forward_mode
from . import library
from .library import Result


class InternalCall:
    """A call of an op. tensors: by their roles. options: the other arguments by their names.

    A class has the op's row of the table, `spec`, the NormSpec by the dtypes of the tensors, run()
    and decomposed(). Where results alone are asked for, a shape and a dtype may stand for a tensor.
    """

    row: ClassVar[Op]
    DEFAULTS: ClassVar[dict[str, Any]]  # of the arguments that have one
    spec: Any

    def __init__(self, arguments: Sequence, by_name: dict[str, Any] | None = None):
        named = dict(zip(self.row.arguments, arguments, strict=False)) | (by_name or {})
        values, ports = self.DEFAULTS | named, self.row.tensors
        self.tensors: dict[str, Any] = {port.role: values.pop(port.name) for port in ports}
        self.options = values

    @property
    def x(self) -> Any:
        return self.tensors["x"]

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtypes of the tensors that a spec has under their roles."""
        present = {role: t for role, t in self.tensors.items() if role in TENSORS and t is not None}
        return {role: name_of(t.dtype) for role, t in present.items()}

    def needs(self, spec: NormSpec) -> Needs:
        """What a backward pass computes."""
        masked = zip(self.row.masked, self.options["output_mask"], strict=True)
        asked = [role for role, need in masked if need]
        return needs_of(spec, asked, self.tensors["dsum"] is not None)

    def results(self) -> Sequence[Result]:
        """Those of a backward pass. A gradient has the shape and the dtype of its tensor. Once a
        residual was added, x is the sum, and dy has the dtype of the input unless input_dtype tells
        another one.
        """
        t, of_op = self.tensors, []
        likes = t | {"residual": t["x"], "y": t["dy"]}
        if self.options.get("added"):
            likes["x"] = Result(t["x"].shape, self.options.get("input_dtype") or t["dy"].dtype)
        if shift := self.options.get("shift"):
            likes["mod_shift"] = Result(t["mod_scale"].shape, getattr(torch, shift))
        needed = asked_of(self.needs(self.spec))
        for place, port in zip(self.row.gradient_index, self.row.makes, strict=True):
            like = likes[port.role] if needed[place] else Result(None, t["x"].dtype)
            of_op.append(Result(like.shape, like.dtype))
        return of_op


def asked_of(needs: Needs) -> tuple[bool, ...]:
    """What a backward pass computes, in the order that Op.gradient_index tells of."""
    return *needs.gradients, needs.output


def define(kind: type[InternalCall]) -> None:
    """Define an op by its row."""
    row = kind.row
    library.define(kind, row)
    arguments = getattr(torch.ops.tilenorm, row.name).default._schema.arguments
    kind.DEFAULTS = {a.name: a.default_value for a in arguments if a.has_default_value()}


class Backward(InternalCall):
    """A call of the op of a backward pass. Two of its tensors are the gradients of the results,
    "dy" and "dsum". The op returns what Needs.gradients asks for, and y.

    added: whether there was a residual; x is then the sum, and input_dtype tells the input's dtype
    where dy has another one. TERMS are added to grad_output, from left to right; each addition is
    rounded to its dtype, as autograd's own are. output: y is written once more, with the bits of
    the forward pass, whose eps and rounding have to be given then; NormSpec.output_refused tells
    for what it is refused. shift: the dtype of the shift of a modulated norm, or None without one;
    `branch` is the input where a gate by group multiplied it.
    """

    def __init__(self, arguments: Sequence, by_name: dict | None = None):
        """Raises RuntimeError as terms_after."""
        super().__init__(arguments, by_name)
        if self.options.get("norm") == "rms":
            self.tensors["mean"] = None
        terms = [self.tensors.get(port.role) for port in TERMS]
        self.more = terms_after(self.tensors["dy"], *terms)  # of dy, behind the first

    @property
    def spec(self) -> NormSpec:
        tensors, dtypes, asked = self.tensors, self.dtypes, self.options
        x, dy = (name_of(tensors[role].dtype) for role in ("x", "dy"))
        if asked["added"]:
            like = asked.get("input_dtype")
            dtypes |= {"x": dy if like is None else name_of(like), "residual": x}
        else:
            dtypes["x"] = x
        dtypes["skip"] = None if dy == dtypes["x"] else dy
        dtypes["mod_shift"] = asked.get("shift")
        options = Options(**{name: asked[name] for name in Options._fields if name in asked})
        heads = heads_of(options.hidden, tensors["weight"], tensors["bias"])
        try:
            return _spec_of(options, heads, *dtypes.items())
        except TypeError:  # a symbolic size has no hash
            return NormSpec.of_tensors(options, dtypes, heads)

    def needs(self, spec: NormSpec) -> Needs:
        """Raises NotImplementedError where a backward pass cannot write y with the bits of the
        forward pass.
        """
        output = self.options.get("output", False)
        if output and (reason := spec.output_refused):
            raise NotImplementedError(
                f"tilenorm::norm_backward: argument 'output' takes no True for {reason}: y would"
                " have other bits than the forward pass gave it"
            )
        return super().needs(spec)._replace(terms=1 + len(self.more), output=output)

    def run(self) -> tuple[Tensor, ...]:
        tensors_of_op, asked = self.tensors, self.options
        if in_forward_mode(tuple(tensors_of_op.values())):
            name = f"torch.ops.tilenorm.{self.row.name}"
            raise NotImplementedError(f"{name} has no forward-mode derivative")
        spec, x, numbers = self.spec, self.x, reference.STATISTICS
        needs = self.needs(spec)
        if not any(asked_of(needs)):
            return self.returned(())
        long = x.numel() > MAX_ROWS * asked["hidden"]
        norm = norm_of(spec, x.device.type, x.get_device(), long, asked["backend"])
        kept = [
            vector_of(tensors_of_op[r]) if r in numbers else tensors_of_op[r]
            for r in spec.kernel_reads
        ]
        dsum = tensors_of_op["dsum"] if needs.dsum else None
        with on_device_of(x):
            tensors = tensors_of_op["dy"], dsum, *kept, *self.more
            return self.returned(norm.backward(spec, needs)(tensors, asked["eps"]))

    def decomposed(self) -> tuple[Tensor, ...]:
        spec, tensors = self.spec, self.tensors
        needs, gradients = self.needs(spec), ()
        if any(asked_of(needs)):
            incoming = tensors["dy"], tensors["dsum"], tensors
            gradients = reference.backward(spec, needs, *incoming, self.options["eps"], self.more)
        return self.returned(gradients)

    def returned(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of what a backward pass does; what is absent is an empty tensor."""
        by_index = dict(enumerate(gradients))
        shown = [by_index.get(place) for place in self.row.gradient_index]
        return tuple([self.x.new_empty(0) if t is None else t for t in shown])


@lru_cache(MOST_CALLS)
def _spec_of(options: Options, heads: int, *named: tuple) -> NormSpec:
    return NormSpec.of_tensors(options, dict(named), heads)


def terms_after(dy: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The terms of dy behind the first, which is `dy`.

    Raises RuntimeError where a term is not of dy's shape, dtype and device, or where an earlier one
    is absent.
    """
    count = 1 + max((i for i, t in enumerate(others) if t is not None), default=-1)
    for i, term in enumerate(others[:count]):
        name = f"tilenorm::norm_backward: argument 'grad_output_{i + 2}'"
        if term is None:
            raise RuntimeError(f"{name} is absent, but 'grad_output_{count + 1}' is given")
        # DTensor's description of a tensor has no device.
        wanted, got = ((t.shape, t.dtype, getattr(t, "device", None)) for t in (dy, term))
        if got != wanted:
            told = [f"{list(shape)} {dtype} on {device}" for shape, dtype, device in (wanted, got)]
            raise RuntimeError(f"{name} takes what 'grad_output' is, {told[0]}, got {told[1]}")
    return others[:count]


class NormBackward(Backward):
    row = BACKWARD["norm_backward"]


class ModulatedBackward(Backward):
    """A mask has a place for the gradient of a gate by rows, which no modulated norm has."""

    row = BACKWARD["modulated_norm_backward"]


class RotatedBackward(Backward):
    """Where output_heads_first, the incoming gradients are (B, H, S, D), and the input and its
    gradient (B, S, H, D).
    """

    row = BACKWARD["rms_norm_rope_backward"]

    @property
    def spec(self) -> NormSpec:
        op, hidden = OPS["rms_norm_rope"], self.options["hidden"]
        options = hidden, *[self.options.get(name, "late") for name in op.options]
        tensors = [self.tensors[role] for role in op.roles]
        return specs_of(op, options, *kinds_of(op, tensors, hidden))[0]


KINDS = {kind.row.name: kind for kind in (NormBackward, ModulatedBackward, RotatedBackward)}
for _kind in KINDS.values():
    define(_kind)
