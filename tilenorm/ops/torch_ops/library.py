"""The torch.library ops, in one loop over the table: schema, implementation, fake, derivative.

An op takes its tensors, `hidden`, its options, the eps of each of its norms, `save` and `backend`.
Eager calls on plain tensors go past the ops, from call.py to the same implementations.

Each op has a kind of calls: a function of the op's arguments, in their order and by name. A call
has the row of the table, its results, and what does it: `run`, for real tensors, and `decomposed`,
in PyTorch's own operators.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.scales import Scales
from ...row import Op, Port
from ...spec import Quantization
from ...table import ARGUMENTS, OPS, OPTIONS
from ..passes import dims, reference
from ..passes.bound import Bound, bound_of, kinds_of, specs_of, specs_of_tensors
from ..passes.quantize import SCALE_DTYPES, with_codes
from ..passes.reference import statistics_dtype
from ..passes.registry import on_device_of
from ..pytorch.torch_private import BelowAutograd, asked_of, autocast_casts, in_forward_mode
from .autograd import Call, call_needs_grad, gradients

# Norms that PyTorch's autocast computes in float32 on CUDA, RMSNorm from 2.12 on; none on the CPU.
AUTOCAST_NORMS = tuple(filter(autocast_casts, ("rms", "layer")))
LIBRARY = torch.library.Library("tilenorm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)


class Result(NamedTuple):
    """What an op returns. shape: None for an empty tensor. strides: None for a contiguous one."""

    shape: Sequence[int] | None
    dtype: torch.dtype
    strides: Sequence[int] | None = None


def run(kind: Callable, *arguments) -> Any:
    return kind(arguments).run()


def decomposed(kind: Callable, *arguments, **by_name) -> Any:
    return kind(arguments, by_name).decomposed()


@cache
def before_fakes() -> list[Callable[[], None]]:
    """Functions that each fake calls first. Inductor and DTensor ask for a fake whatever they do
    with an op afterwards, and are then told how to run the ops. ops/__init__.py fills the list.
    """
    return []


def fake(kind: Callable, *arguments) -> Any:
    """What an op returns for tensors without memory."""
    for tell in before_fakes():
        tell()
    call, results = kind(arguments), []
    for shape, dtype, strides in call.results():
        if strides is None:
            results.append(call.x.new_empty(0 if shape is None else shape, dtype=dtype))
        else:
            results.append(call.x.new_empty_strided(shape, strides, dtype=dtype))
    return tuple(results)


def schema_of(row: Op) -> str:
    """The schema of an op."""
    takes = [f"Tensor{'' if port.needed else '?'} {port.name}" for port in row.takes]
    arguments = ARGUMENTS | {name: f"{option.kind} {name}" for name, option in OPTIONS.items()}
    arguments["out_dtype"] += "=None"
    arguments |= {port.name: f"Tensor? {port.name}=None" for port in row.takes_late}
    arguments["output_mask"] = f"bool[{len(row.masked)}] output_mask"
    behind = [arguments[name] for name in row.arguments[len(takes) :]]
    makes = [f"Tensor {port.name}" for port in row.makes]
    return f"{row.name}({', '.join([*takes, *behind])}) -> ({', '.join(makes)})"


def define(kind: Callable, row: Op) -> None:
    """Define an op with its implementation for real tensors, and its fake."""
    LIBRARY.define(schema_of(row), tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(row.name, partial(run, kind), key)
    torch.library.register_fake(f"tilenorm::{row.name}", partial(fake, kind), lib=LIBRARY)


class Called(NamedTuple):
    """A call of an op of OPS. options: `hidden`, and the values of the op's options. eps: of each
    norm.
    """

    row: Op
    tensors: tuple
    options: tuple
    eps: tuple
    save: bool
    backend: str | None = None

    @classmethod
    def of(cls, row: Op, arguments: Sequence, by_name: dict | None = None) -> "Called":
        named = dict(zip(row.arguments, arguments, strict=False)) | (by_name or {})
        tensors = tuple([named[port.name] for port in row.takes])
        options = named["hidden"], *[named.get(name) for name in row.options]
        eps = tuple([named[name] for name in row.eps])
        return cls(row, tensors, options, eps, named["save"], named.get("backend"))

    @property
    def x(self) -> Any:
        return self.tensors[0]

    @property
    def own_eps(self) -> Any:
        """The eps as bound calls take it."""
        return self.eps if self.row.calls else self.eps[0]

    def option(self, name: str) -> Any:
        return self.options[1 + self.row.options.index(name)]

    def makes(self, port: Port) -> bool:
        """Whether the call makes a tensor."""
        named = self.row.named(self.tensors)
        if named.get(port.unless) is not None or (port.given and named[port.given] is None):
            return False
        if port.when == "save":
            return self.save
        return not port.when or bool(self.option(port.when))

    def dtype_of(self, port: Port) -> torch.dtype:
        """The dtype of a tensor that the call makes."""
        named = self.row.named(self.tensors)
        if port.number:
            return statistics_dtype(*[named[name] for name in port.like.split()])
        if port.like == "scale":
            return SCALE_DTYPES[Quantization(self.option("scaling")).scale_dtype]
        if port.like in self.row.options:
            return self.option(port.like) or self.x.dtype
        if port.like in named:
            like = named[port.like]
            return (self.x if like is None else like).dtype  # what is absent has one, too
        return getattr(torch, port.like)

    @property
    def sizes(self) -> dims.Sizes:
        swapped = self.row.rotated and self.option("output_heads_first")
        sizes = dims.sizes_by_hidden(self.row.named(self.tensors), self.options[0])
        return sizes._replace(swapped=swapped)

    def results(self) -> list[Result]:
        sizes = self.sizes
        return [self._result(port, sizes) for port in self.row.makes]

    def _result(self, port: Port, sizes: dims.Sizes) -> Result:
        dtype = self.dtype_of(port)
        if not self.makes(port):
            return Result(None, dtype)
        if port.like == "scale":  # they lie in a layout of their own
            hidden, rows = self.options[0], math.prod(self.x.shape) // self.options[0]
            how = Quantization(self.option("scaling"), layout=self.option("layout"))
            scales = Scales.of(how, hidden, rows)
            return Result(scales.shape, dtype, scales.strides)
        return Result(dims.shape(port, sizes), dtype)

    def returned(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns: what is absent is an empty tensor; a number a row has x's leading
        sizes.

        tensors: as a bound call returns them, or the formula. A tensor that is there but not asked
        for is absent.
        """
        results = []
        for port, t in zip(self.row.makes, tensors, strict=True):
            if t is None or not self.makes(port):
                t = self.x.new_empty(0, dtype=self.dtype_of(port))
            elif port.number:
                t = t.view(dims.shape(port, self.sizes))
            results.append(t)
        return tuple(results)

    def present(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """What the op makes, without the empty tensors that stand for absent results."""
        pairs = zip(self.row.makes, tensors, strict=True)
        return tuple([t if self.makes(port) else None for port, t in pairs])

    def run(self) -> tuple[Tensor, ...]:
        if in_forward_mode(self.tensors):
            # PyTorch would take the derivatives of an op without a forward mode for zeros.
            raise NotImplementedError(
                f"torch.ops.tilenorm.{self.row.name} has no forward-mode derivative; tilenorm's"
                " functions have"
            )
        return self.run_by(bound_of(self.row, self.tensors, self.options, self.backend))

    def run_by(self, bound: Bound) -> tuple[Tensor, ...]:
        with on_device_of(self.x):
            function = bound.training if self.save else bound.inference
            results = function(self.tensors, self.own_eps)
        return self.returned(results)

    def decomposed(self) -> tuple[Tensor, ...]:
        return self.returned(self.formula())

    def formula(self) -> tuple[Tensor | None, ...]:
        """What the op makes, of PyTorch's differentiable operations; mean and rstd are (rows,)."""
        row, named = self.row, self.row.named(self.tensors)
        specs = specs_of(row, self.options, *kinds_of(row, self.tensors, self.options[0]))
        for stage, spec, norm_eps in zip(row.stages, specs, self.eps, strict=True):
            by_role = {role: named.get(port) for role, port in stage.ports.items()}
            results = reference.formula(spec.unquantized, by_role, norm_eps)
            if spec.quantized:
                results = with_codes(spec, results, by_role["given_scale"])
            named |= {port: results[role] for role, port in stage.ports.items() if role in results}
        return tuple([named.get(port.name) for port in row.makes])


def autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    """What torch.library.register_autograd would make, which takes 8 µs more in every call that
    needs no gradient.
    """
    called = Called.of(op, arguments)
    _, tensors, options, _, save, backend = called
    if call_needs_grad(op, tensors):
        what = specs_of_tensors(op, tensors, options, backend, save)
        behind = arguments[len(tensors) :]

        def below(tensors_below, *_):
            return _below_autograd(op, *tensors_below, *behind)

        return Call.apply((called.own_eps, what, below), *tensors)
    x = tensors[0]
    if type(x) is Tensor and (x.is_cpu or x.is_cuda):
        bound = bound_of(op, tensors, options, backend)
        if bound.plain.takes(tensors):
            return called.run_by(bound)
    return _below_autograd(op, *arguments)


def _below_autograd(op: Op, *arguments) -> tuple[Tensor, ...]:
    with BelowAutograd():
        return getattr(torch.ops.tilenorm, op.name)(*arguments)


def setup_context(op: Op, ctx, inputs: tuple, output: tuple) -> None:
    _, tensors, options, _, save, backend = called = Called.of(op, inputs)
    ctx.what, ctx.eps = specs_of_tensors(op, tensors, options, backend, save), called.own_eps
    results = output if save else ctx.what.unsaved(output)
    ctx.save_for_backward(*ctx.what.autograd_saves((*tensors, *results)))
    ctx.mark_non_differentiable(*[output[i] for i in ctx.what.not_differentiable])
    ctx.set_materialize_grads(False)


def backward(op: Op, ctx, *grads) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    asked = asked_of(ctx)  # arguments at the end that have their defaults are not among them
    by_tensor = gradients(ctx.what, asked[: len(op.takes)], grads, ctx.saved_tensors, ctx.eps)
    return *by_tensor, *[None] * (len(asked) - len(op.takes))


def autocast(op: Op, *arguments) -> tuple[Tensor, ...]:
    call = Called.of(op, arguments)
    tensors, options = autocast_arguments(op, call.tensors, call.options)
    in_order = op.in_order(tensors, options, call.eps, call.save, call.backend)
    with torch.autocast(tensors[0].device.type, enabled=False):
        return getattr(torch.ops.tilenorm, op.name)(*in_order)


def autocast_arguments(op: Op, tensors: tuple, options: tuple) -> tuple[tuple, tuple]:
    """The tensors and the options with which the output is PyTorch's under autocast: the norm of
    the input in float32, in float32. What is added to the normalised rows is promoted as by
    PyTorch's addition.

    A sum keeps the residual's dtype. So a norm of a sum takes the input as it is, and only its
    output is float32, unless x̂ is to be rounded to the input's dtype. The other tensors stay as
    they are, because the kernels take parameters of any dtype.
    """
    if op.norm not in AUTOCAST_NORMS:
        return tensors, options
    named = op.named_options(options)
    if "residual" in op.roles and "out_dtype" in named and named["rounding"] != "early":
        if named["out_dtype"] is None and tensors[0].dtype != torch.float64:
            named["out_dtype"] = torch.float32
        return tensors, (options[0], *named.values())
    cast = list(tensors)
    for place, (port, tensor) in enumerate(zip(op.takes, tensors, strict=True)):
        if port.cast and tensor is not None and tensor.dtype != torch.float64:
            cast[place] = tensor.float()
    return tuple(cast), options


def define_op(op: Op) -> None:
    """Define an op, and register all of the above."""
    define(KINDS[op.name], op)
    LIBRARY.impl(op.name, partial(autocast, op), "AutocastCUDA")
    if BelowAutograd is None:
        name, context = f"tilenorm::{op.name}", partial(setup_context, op)
        how = {"setup_context": context, "lib": LIBRARY}
        torch.library.register_autograd(name, partial(backward, op), **how)
    else:
        LIBRARY.impl(op.name, partial(autograd, op), "Autograd")


KINDS = {name: partial(Called.of, op) for name, op in OPS.items()}
for _op in OPS.values():
    define_op(_op)
