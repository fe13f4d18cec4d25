"""The torch.library ops, in one loop over the table: schema, implementation, fake, derivative.

An op takes its tensors, `hidden`, its options, the eps of each of its norms, `save` and `backend`.
Eager calls on plain tensors go past the ops, from call.py to the same implementations.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.scales import Scales
from ..spec import Quantization
from ..table import OPS, OPTIONS, Op, Port
from . import reference
from .autograd import Call, call_needs_grad, gradients
from .bound import bound_of, kinds_of, specs_of, specs_of_tensors
from .inductor import tell_inductor
from .layout import rows_shape
from .quantize import SCALE_DTYPES, with_codes
from .reference import statistics_dtype
from .registry import on_device_of
from .sharding import register_where_loaded
from .torch_private import BelowAutograd, asked_of, autocast_casts, in_forward_mode

# Norms that PyTorch's autocast computes in float32 on CUDA, RMSNorm from 2.12 on; none on the CPU.
AUTOCAST_NORMS = tuple(filter(autocast_casts, ("rms", "layer")))
LIBRARY = torch.library.Library("tilenorm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)


def taken(ports: Sequence[Port]) -> list[str]:
    """The tensors that an op takes, as in its schema."""
    return [f"Tensor{'' if port.needed else '?'} {port.name}" for port in ports]


def schema_of(op: Op) -> str:
    """The arguments and results of an op, as in its schema, from its row."""
    options = [f"{OPTIONS[name].kind} {name}" for name in op.options]
    eps = [f"float {name}" for name in op.eps]
    last = "bool save", "str? backend=None"
    arguments = [*taken(op.takes), "SymInt hidden", *options, *eps, *last]
    makes = ", ".join(f"Tensor {port.name}" for port in op.makes)
    return f"({', '.join(arguments)}) -> ({makes})"


class Called(NamedTuple):
    """A call of an op. options: `hidden`, and the values of the op's options. eps: of each norm."""

    op: Op
    tensors: tuple
    options: tuple
    eps: tuple
    save: bool
    backend: str | None = None

    @classmethod
    def of(cls, op: Op, arguments: Sequence, by_name: dict | None = None) -> "Called":
        tensors, options = len(op.takes), 1 + len(op.options)
        eps, end = tensors + options, tensors + options + len(op.eps)
        backend = (by_name or {}).get("backend")
        save, *last = arguments[end:]
        given, last = tuple(arguments), last or [backend]
        return cls(op, given[:tensors], given[tensors:eps], given[eps:end], save, *last)

    @property
    def own_eps(self) -> Any:
        """The eps as bound calls take it."""
        return self.eps if self.op.calls else self.eps[0]

    def named(self) -> dict[str, Any]:
        """The tensors by the names of their ports. PyTorch 2.9 traces no property here."""
        return dict(zip([port.name for port in self.op.takes], self.tensors, strict=True))

    def option(self, name: str) -> Any:
        return self.options[1 + self.op.options.index(name)]

    def makes(self, port: Port) -> bool:
        """Whether the call makes a tensor."""
        given = self.named()
        if given.get(port.unless) is not None or (port.given and given[port.given] is None):
            return False
        if port.when == "save":
            return self.save
        return not port.when or bool(self.option(port.when))

    def dtype_of(self, port: Port) -> torch.dtype:
        """The dtype of a tensor that the call makes."""
        given = self.named()
        if port.lies == "number":
            return statistics_dtype(*[given[name] for name in port.like.split()])
        if port.lies == "scales":
            return SCALE_DTYPES["uint8" if self.option("scaling") == "mx" else "float32"]
        if port.like in self.op.options:
            return self.option(port.like)
        if port.like in given:
            like = given[port.like]
            return (self.tensors[0] if like is None else like).dtype  # what is absent has one, too
        return getattr(torch, port.like)

    def shape_of(self, port: Port) -> Sequence[int]:
        """The shape of a tensor that the call makes, except for scales."""
        if port.lies == "number":
            return numbers_shape(self.op, port, self.tensors, self.options[0])
        if port.lies == "heads":
            like = self.named()[port.like]
            return (like.transpose(1, 2) if self.option("output_heads_first") else like).shape
        return self.tensors[0].shape if port.lies == "rows" else (1,)

    def returned(self, made: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns: what is absent is an empty tensor; a number a row has x's leading
        sizes.

        made: as a bound call returns it, or the formula. A tensor that is there but not asked for
        is absent.
        """
        found = []
        for port, t in zip(self.op.makes, made, strict=True):
            if t is None or not self.makes(port):
                t = self.tensors[0].new_empty(0, dtype=self.dtype_of(port))
            elif port.lies == "number":
                t = t.view(self.shape_of(port))
            found.append(t)
        return tuple(found)


def numbers_shape(op: Op, port: Port, tensors: Sequence, hidden: int) -> tuple[int, ...]:
    """The shape of a number a row: of the input, or of the key, whose rows are heads or tokens."""
    x = tensors[0]
    if not port.given:
        return rows_shape(x.shape, hidden)
    key = tensors[[taken.name for taken in op.takes].index(port.given)]
    return tuple(key.shape[:-1] if hidden == x.shape[-1] else key.shape[:-2])


def run(op: Op, *arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors."""
    called = Called.of(op, arguments)
    if in_forward_mode(called.tensors):
        # PyTorch would take the derivatives of an op without a forward mode for zeros.
        raise NotImplementedError(
            f"torch.ops.tilenorm.{op.name} has no forward-mode derivative; tilenorm's functions"
            " have"
        )
    return _run_by(bound_of(op, called.tensors, called.options, called.backend), called)


def _run_by(bound, called: Called) -> tuple[Tensor, ...]:
    with on_device_of(called.tensors[0]):
        function = bound.training if called.save else bound.inference
        made = function(called.tensors, called.own_eps)
    return called.returned(made)


def formula(op: Op, tensors: Sequence, options: tuple, eps: tuple) -> tuple[Tensor | None, ...]:
    """What an op makes, of PyTorch's differentiable operations; mean and rstd are (rows,)."""
    specs = specs_of(op, options, *kinds_of(op, tensors, options[0]))
    found = dict(zip([port.name for port in op.takes], tensors, strict=True))
    for stage, spec, own in zip(op.stages, specs, eps, strict=True):
        given = {role: found.get(port) for role, port in stage.ports.items()}
        made = reference.with_rows(reference.formula(spec.unquantized, given, own))
        if spec.quantized:
            made = with_codes(spec, made, given["given_scale"])
        found |= {port: made[role] for role, port in stage.ports.items() if role in made}
    return tuple([found.get(port.name) for port in op.makes])


def decomposed(op: Op, *arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    called = Called.of(op, arguments, by_name)
    return called.returned(formula(op, called.tensors, called.options, called.eps))


def tell_others() -> None:
    """Tell Inductor and DTensor, where they are loaded, how to run the ops.

    Both ask an op's fake first, whatever they do with it afterwards.
    """
    tell_inductor()
    register_where_loaded()


def fake(op: Op, *arguments) -> tuple[Tensor, ...]:
    tell_others()
    called = Called.of(op, arguments)
    x, made = called.tensors[0], []
    for port in op.makes:
        dtype = called.dtype_of(port)
        if not called.makes(port):
            made.append(x.new_empty(0, dtype=dtype))
        elif port.lies == "scales":
            how = Quantization(called.option("scaling"), layout=called.option("layout"))
            scales = Scales.of(how, called.options[0], x.numel() // called.options[0])
            made.append(x.new_empty_strided(scales.shape, scales.strides, dtype=dtype))
        else:
            made.append(x.new_empty(called.shape_of(port), dtype=dtype))
    return tuple(made)


def autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    """What torch.library.register_autograd would make, which takes 8 µs more in every call that
    needs no gradient.
    """
    called = Called.of(op, arguments)
    _, tensors, options, _, save, backend = called
    if call_needs_grad(op, tensors):
        what = specs_of_tensors(op, tensors, options, backend, save)
        last = arguments[len(tensors) :]

        def below(given, *_):
            return _below_autograd(op, *given, *last)

        return Call.apply((called.own_eps, what, below), *tensors)
    x = tensors[0]
    if type(x) is Tensor and (x.is_cpu or x.is_cuda):
        bound = bound_of(op, tensors, options, backend)
        if bound.plain.takes(tensors):
            return _run_by(bound, called)
    return _below_autograd(op, *arguments)


def _below_autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    with BelowAutograd():
        return getattr(torch.ops.tilenorm, op.name)(*arguments)


def setup_context(op: Op, ctx, inputs: tuple, output: tuple) -> None:
    _, tensors, options, _, save, backend = called = Called.of(op, inputs)
    ctx.what, ctx.eps = specs_of_tensors(op, tensors, options, backend, save), called.own_eps
    made = output if save else ctx.what.unsaved(output)
    ctx.save_for_backward(*ctx.what.kept((*tensors, *made)))
    ctx.mark_non_differentiable(*[output[i] for i in ctx.what.fixed])
    ctx.set_materialize_grads(False)


def backward(op: Op, ctx, *grads) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    asked = asked_of(ctx)  # arguments at the end that have their defaults are not among them
    found = gradients(ctx.what, asked[: len(op.takes)], grads, ctx.saved_tensors, ctx.eps)
    return *found, *[None] * (len(asked) - len(op.takes))


def autocast(op: Op, *arguments) -> tuple[Tensor, ...]:
    tensors, last = arguments[: len(op.takes)], arguments[len(op.takes) :]
    with torch.autocast(tensors[0].device.type, enabled=False):
        return getattr(torch.ops.tilenorm, op.name)(*autocast_tensors(op, tensors), *last)


def autocast_tensors(op: Op, tensors: tuple) -> tuple:
    """The tensors with the input as PyTorch's own norm gets it under autocast: in float32, and then
    so is the output. What is added to the normalised rows is promoted as by PyTorch's addition.

    The others stay as they are: a sum keeps the residual's dtype, and the kernels take parameters
    of any dtype.
    """
    if op.norm not in AUTOCAST_NORMS:
        return tensors
    cast = list(tensors)
    for place, (port, tensor) in enumerate(zip(op.takes, tensors, strict=True)):
        if port.cast and tensor is not None and tensor.dtype != torch.float64:
            cast[place] = tensor.float()
    return tuple(cast)


def register(name: str, schema: str, run: Callable, fake: Callable) -> None:
    """Define an op with its implementation for real tensors, and its fake."""
    LIBRARY.define(f"{name}{schema}", tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"tilenorm::{name}", fake, lib=LIBRARY)


def define(op: Op) -> None:
    """Define an op, and register all of the above."""
    name = f"tilenorm::{op.name}"
    register(op.name, schema_of(op), partial(run, op), partial(fake, op))
    LIBRARY.impl(op.name, partial(autocast, op), "AutocastCUDA")
    if BelowAutograd is None:
        torch.library.register_autograd(
            name, partial(backward, op), setup_context=partial(setup_context, op), lib=LIBRARY
        )
    else:
        LIBRARY.impl(op.name, partial(autograd, op), "Autograd")


for _op in OPS.values():
    define(_op)
