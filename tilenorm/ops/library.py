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
    """The arguments of an op. options: `hidden`, and the values of the op's options. eps: of each
    norm.
    """

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
        given = tuple(arguments)
        return cls(given[:tensors], given[tensors:eps], given[eps:end], save, *(last or [backend]))

    def own_eps(self, op: Op) -> Any:
        """The eps as bound calls take it."""
        return self.eps if op.calls else self.eps[0]


def there(op: Op, port: Port, tensors: Sequence, options: tuple, save: bool) -> bool:
    """Whether a call of an op makes a tensor."""
    names = [taken.name for taken in op.takes]
    if port.unless and tensors[names.index(port.unless)] is not None:
        return False
    if port.given and tensors[names.index(port.given)] is None:
        return False
    if port.when == "save":
        return save
    return not port.when or bool(options[1 + op.options.index(port.when)])


def dtype_of(op: Op, port: Port, tensors: Sequence, options: tuple) -> torch.dtype:
    """The dtype of a tensor that a call of an op makes."""
    by_name = {taken.name: t for taken, t in zip(op.takes, tensors, strict=True)}
    if port.lies == "number":
        return statistics_dtype(*[by_name[name] for name in port.like.split()])
    if port.lies == "scales":
        scaling = options[1 + op.options.index("scaling")]
        return SCALE_DTYPES["uint8" if scaling == "mx" else "float32"]
    if port.like in op.options:
        return options[1 + op.options.index(port.like)]
    if port.like in by_name:
        like = by_name[port.like]
        return (tensors[0] if like is None else like).dtype  # what is absent has a dtype, too
    return getattr(torch, port.like)


def with_absent(op: Op, called: Called, made: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What an op returns: what is absent is an empty tensor; a number a row has x's leading sizes.

    made: as a bound call returns it, or the formula. A tensor that is there but not asked for is
    absent.
    """
    tensors, options, _, save, _ = called
    x, found = tensors[0], []
    for port, t in zip(op.makes, made, strict=True):
        if t is None or not there(op, port, tensors, options, save):
            t = x.new_empty(0, dtype=dtype_of(op, port, tensors, options))
        elif port.lies == "number":
            t = t.view(numbers_shape(op, port, tensors, options[0]))
        found.append(t)
    return tuple(found)


def numbers_shape(op: Op, port: Port, tensors: Sequence, hidden: int) -> tuple[int, ...]:
    """The shape of a number a row: of the input, or of the key, whose rows are heads or tokens."""
    x = tensors[0]
    if not port.given:
        return rows_shape(x.shape, hidden)
    key = tensors[[taken.name for taken in op.takes].index(port.given)]
    return tuple(key.shape[:-1] if hidden == x.shape[-1] else key.shape[:-2])


def rows_made(op: Op, port: Port, tensors: Sequence, options: tuple) -> Sequence[int]:
    """The shape of a result that has rows."""
    if not op.rotated:
        return tensors[0].shape
    like = tensors[[taken.name for taken in op.takes].index(port.like)]
    heads_first = options[1 + op.options.index("output_heads_first")]
    return like.transpose(1, 2).shape if heads_first else like.shape


def run(op: Op, *arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors."""
    called = Called.of(op, arguments)
    tensors, options, _, save, backend = called
    if in_forward_mode(tensors):
        # PyTorch would take the derivatives of an op without a forward mode for zeros.
        raise NotImplementedError(
            f"torch.ops.tilenorm.{op.name} has no forward-mode derivative; tilenorm's functions"
            " have"
        )
    bound = bound_of(op, tensors, options, backend)
    return _run_by(bound, op, called, save)


def _run_by(bound, op: Op, called: Called, save: bool) -> tuple[Tensor, ...]:
    with on_device_of(called.tensors[0]):
        function = bound.training if save else bound.inference
        made = function(called.tensors, called.own_eps(op))
    return with_absent(op, called, made)


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
    return with_absent(op, called, formula(op, called.tensors, called.options, called.eps))


def tell_others() -> None:
    """Tell Inductor and DTensor, where they are loaded, how to run the ops.

    Both ask an op's fake first, whatever they do with it afterwards.
    """
    tell_inductor()
    register_where_loaded()


def fake(op: Op, *arguments) -> tuple[Tensor, ...]:
    tell_others()
    tensors, options, _, save, _ = Called.of(op, arguments)
    x, hidden, made = tensors[0], options[0], []
    for port in op.makes:
        dtype = dtype_of(op, port, tensors, options)
        if not there(op, port, tensors, options, save):
            made.append(x.new_empty(0, dtype=dtype))
        elif port.lies == "scales":
            by_name = dict(zip(op.options, options[1:], strict=True))
            how = Quantization(by_name["scaling"], layout=by_name["layout"])
            scales = Scales.of(how, hidden, x.numel() // hidden)
            made.append(x.new_empty_strided(scales.shape, scales.strides, dtype=dtype))
        else:
            shape: Sequence[int] = (1,)
            if port.lies == "rows":
                shape = rows_made(op, port, tensors, options)
            elif port.lies == "number":
                shape = numbers_shape(op, port, tensors, hidden)
            made.append(x.new_empty(shape, dtype=dtype))
    return tuple(made)


def autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    """What torch.library.register_autograd would make, which takes 8 µs more in every call that
    needs no gradient.
    """
    called = Called.of(op, arguments)
    tensors, options, _, save, backend = called
    if call_needs_grad(op, tensors):
        what = specs_of_tensors(op, tensors, options, backend, save)
        last = arguments[len(tensors) :]

        def below(given, *_):
            return _below_autograd(op, *given, *last)

        return Call.apply((called.own_eps(op), what, below), *tensors)
    x = tensors[0]
    if type(x) is Tensor and (x.is_cpu or x.is_cuda):
        bound = bound_of(op, tensors, options, backend)
        if bound.plain.takes(tensors):
            return _run_by(bound, op, called, save)
    return _below_autograd(op, *arguments)


def _below_autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    with BelowAutograd():
        return getattr(torch.ops.tilenorm, op.name)(*arguments)


def setup_context(op: Op, ctx, inputs: tuple, output: tuple) -> None:
    tensors, options, _, save, backend = called = Called.of(op, inputs)
    ctx.what, ctx.eps = specs_of_tensors(op, tensors, options, backend, save), called.own_eps(op)
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
