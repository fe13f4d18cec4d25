"""Arguments that say themselves what a call does: what has __torch_function__, and nested tensors.

Both are done with before anything is looked up or checked, as in PyTorch's own functions.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from ..row import Op
from ..table import ADDEND, BRANCH_PORTS, OPS
from . import arguments
from .pytorch.torch_private import ragged_dimension


@cache
def public_functions() -> dict[str, Callable]:
    """The public function of each op, which ops/__init__.py enters here."""
    return {}


class Whole:
    """Stands for an op's results where an override returned something: that is each part of it."""

    def __init__(self, returned: Any):
        self._returned = returned

    def __getitem__(self, part: int | slice) -> Any:
        return self._returned


def overridden(checked: Callable, name: str, tensors, normalized_shape, eps, asked, backend) -> Any:
    """What the arguments' __torch_function__, or a mode, makes of the public function's call.

    checked: serves the calls that no argument sees as that of a function.

    Each gets the function with the needed tensors and normalized_shape by position, and every other
    argument by name. What a quantised norm returns is no tensor, so that such a call goes on, and
    each sees the op.
    """
    op = OPS[name]
    if arguments.is_sequence(op, tensors):
        tensors = arguments.spread(op, tensors)
    if op.quantized or has_nested(tensors):
        return checked(op, tensors, normalized_shape, eps, asked, backend)
    by_port = op.named(tensors)
    if by_port.get("addend") is not None:
        by_port["residual"] = (by_port["addend"], by_port["residual"])
    rows = [port for port in op.takes if port.needed and port.dims == "... n"]
    by_name = {}
    for port in op.takes:
        # A weight and a bias are told of also where they are absent, as by PyTorch's own functions.
        affine = port.parameter and port not in BRANCH_PORTS
        if port not in (*rows, ADDEND) and (affine or by_port[port.name] is not None):
            by_name[port.argument] = by_port[port.name]
    options = dict(zip(op.options, asked, strict=True))
    branches = {port.argument for port in BRANCH_PORTS}
    if by_name.keys().isdisjoint(branches) and options.get("dropout_scale") == 1:
        del options["dropout_scale"]
    by_name |= {"eps": eps, "backend": backend} | options
    relevant = [t for t in tensors if t is not None]
    public = public_functions()[name]
    by_position = [by_port[port.name] for port in rows]
    return Whole(handle_torch_function(public, relevant, *by_position, normalized_shape, **by_name))


def has_nested(tensors: Sequence[Tensor | None]) -> bool:
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


def of_jagged(call: Callable, op: Op, tensors, normalized_shape, eps, asked, backend):
    """The norm of nested tensors: that of their values, whose rows are rows like any others."""
    if not op.of_rows:
        raise NotImplementedError(f"{op.name}: argument 'input' takes no nested tensor, got one")
    ragged = _check_jagged(op, tensors, normalized_shape)
    values = tuple([t.values() if has_nested((t,)) else t for t in tensors])
    results = call(op.name, values, normalized_shape, eps, asked, backend)
    nested, how = torch.nested.nested_tensor_from_jagged, (tensors[0].offsets(), None, ragged)
    return tuple([r if r is None else nested(r, *how) for r in results[: op.shown]])


def _same_sizes(a: Any, b: Any) -> bool:
    """Whether two jagged tensors have one shape.

    A graph of torch.compile has no value for the ragged size of a tensor that is made inside of it,
    and comparing such a size with itself makes the compilation fail. Tensors with the same offsets
    have the same ragged size.
    """
    ragged = ragged_dimension(a)
    if not is_compiling() or a.offsets() is not b.offsets() or ragged_dimension(b) != ragged:
        return a.shape == b.shape
    others = [i for i in range(1, a.dim()) if i != ragged]
    return a.dim() == b.dim() and all(a.size(i) == b.size(i) for i in others)


def _check_jagged(op: Op, tensors: Sequence, normalized_shape) -> int:
    """The ragged dimension of the input, where values can stand for the nested tensors."""
    input: Any = tensors[0]
    present = [(p, t) for p, t in zip(op.takes, tensors, strict=True) if isinstance(t, Tensor)]
    for port, t in sorted(present, key=lambda pair: not pair[0].parameter):
        tensor: Any = t
        got = f"{op.name}: argument {port.argument!r} takes"
        if port.parameter:
            if tensor.is_nested:
                raise RuntimeError(f"{got} no nested tensor, got one")
            continue
        if not tensor.is_nested:
            raise RuntimeError(f"{got} a nested tensor where another one is nested, got a Tensor")
        if tensor.layout != torch.jagged:
            raise RuntimeError(f"{got} nested tensors of layout torch.jagged, got {tensor.layout}")
        if tensor.lengths() is not None:
            raise RuntimeError(f"{got} no nested tensor with holes, got one: call contiguous()")
        if tensor is not input and not _same_sizes(tensor, input):
            shape, takes = list(tensor.shape), list(input.shape)
            raise RuntimeError(f"{got} the input's shape {takes}, got {shape}")
    ragged = ragged_dimension(input)
    within = input.dim() - ragged - 1
    sizes = len(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else 0
    parameters = [t.dim() for port, t in present if port.parameter]
    if max(sizes, *parameters, 0) > within:
        raise ValueError(
            f"{op.name}: argument 'normalized_shape' takes dimensions after the ragged one of a"
            f" nested input, which has {within}; so do the weight's and the bias's"
        )
    return ragged
