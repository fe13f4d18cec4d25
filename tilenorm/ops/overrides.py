"""Arguments that say themselves what a call does: what has __torch_function__, and nested tensors.

Both are done with before anything is looked up or checked, as in PyTorch's own functions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from . import arguments, functional
from .tensors import ARGUMENTS, Tensors
from .torch_private import ragged_dimension

# The tensors that have rows.
ROWS = ("input", "residual", "gate", "addend", "skip", "dropout_mask")


class Whole:
    """Stands for Results where an override returned something: that is each part of it."""

    def __init__(self, returned: Any):
        self._returned = returned

    def __getitem__(self, part: int | slice) -> Any:
        return self._returned


def overridden(normalize: Callable, op: str, tensors, normalized_shape, eps, asked, backend):
    """What the arguments' __torch_function__, or a mode, makes of the public function's call.

    Each gets the function with the arguments of rows and normalized_shape by position, and every
    other argument by name.
    """
    if isinstance(tensors[1], (tuple, list)):
        tensors = arguments.spread(op, tensors)
    if has_nested(tensors):
        return of_jagged(normalize, op, tensors, normalized_shape, eps, asked, backend)
    given = Tensors(*tensors)._asdict()
    taken = {"add": "residual", "gated": "gate"}.get(op.partition("_")[0])
    if given["addend"] is not None:
        given["residual"] = (given["addend"], given["residual"])
    elif op.endswith("add"):
        given["residual"], taken = given["skip"], "residual"
    rows = [given[name] for name in ROWS if name in ("input", taken)]
    by_name = {name: given[name] for name in ("weight", "bias")}
    offset, gate_first, rounding, *more = asked
    by_name |= {"eps": eps, "offset": offset, "rounding": rounding, "backend": backend}
    if op.startswith("gated"):
        by_name |= {"norm_before_gate": not gate_first, "activation": more[0]}
    elif more:
        by_name |= {n: given[n] for n in ("dropout_mask", "layer_scale") if given[n] is not None}
        by_name["dropout_scale"] = more[1]
    relevant = [t for t in tensors if t is not None]
    function: Callable = getattr(functional, op)
    return Whole(handle_torch_function(function, relevant, *rows, normalized_shape, **by_name))


def has_nested(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


def of_jagged(normalize: Callable, op: str, tensors, normalized_shape, eps, asked, backend):
    """The norm of nested tensors: that of their values, whose rows are rows like any others."""
    ragged = _check_jagged(op, Tensors(*tensors)._asdict(), normalized_shape)
    values = [t.values() if has_nested((t,)) else t for t in tensors]
    results = normalize(op, tuple(values), normalized_shape, eps, asked, backend)
    offsets = tensors[0].offsets()
    return tuple(
        [
            r if r is None else torch.nested.nested_tensor_from_jagged(r, offsets, None, ragged)
            for r in results[:2]
        ]
    )


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


def _check_jagged(op: str, given: dict[str, Tensor | None], normalized_shape) -> int:
    """The ragged dimension of the input, where values can stand for the nested tensors."""
    tensors: dict[str, Any] = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    for name in sorted(tensors, key=ROWS.__contains__):  # parameters first
        tensor, got = tensors[name], f"{op}: argument {ARGUMENTS.get(name, name)!r} takes"
        if tensor.is_nested and name not in ROWS:
            raise RuntimeError(f"{got} no nested tensor, got one")
        if name not in ROWS:
            continue
        if not tensor.is_nested:
            raise RuntimeError(f"{got} a nested tensor where another one is nested, got a Tensor")
        if tensor.layout != torch.jagged:
            raise RuntimeError(f"{got} nested tensors of layout torch.jagged, got {tensor.layout}")
        if tensor.lengths() is not None:
            raise RuntimeError(f"{got} no nested tensor with holes, got one: call contiguous()")
        if name != "input" and not _same_sizes(tensor, given["input"]):
            shape, takes = list(tensor.shape), list(given["input"].shape)
            raise RuntimeError(f"{got} the input's shape {takes}, got {shape}")
    ragged = ragged_dimension(given["input"])
    within = given["input"].dim() - ragged - 1
    sizes = len(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else 0
    parameters = [t.dim() for t in (given["weight"], given["bias"]) if isinstance(t, Tensor)]
    if max(sizes, *parameters, 0) > within:
        raise ValueError(
            f"{op}: argument 'normalized_shape' takes dimensions after the ragged one of a nested"
            f" input, which has {within}; so do the weight's and the bias's"
        )
    return ragged
