"""Checks of the arguments of norms whose heads are rotated."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ..settings import settings
from .tensor_checks import check_argument, check_device, check_dtype, check_tensor, wrong

NAME = "rms_norm_rope"
_wrong = partial(wrong, NAME)


def heads_last(argument: str, tensor: Any) -> Any:
    """A view (B, S, H, D) of (B, H, S, D); None for None."""
    if tensor is None:
        return None
    if not has_torch_function((tensor,)):
        check_tensor(NAME, argument, tensor)
        if tensor.dim() != 4:
            raise _wrong(argument, "four dimensions with heads_first", tensor.dim(), ValueError)
    return torch.transpose(tensor, 1, 2)


def check_rotation(given: dict[str, Any], shape: tuple[int, ...], options: dict) -> dict:
    """The options, with rotary_dim for None. given: the tensors by name, of which `input` has
    passed its checks. shape: the sizes of normalized_shape.

    Raises as rms_norm_rope says.
    """
    x = given["input"]
    if len(shape) > 2:
        raise _wrong("normalized_shape", "(D,) or (H, D)", shape)
    if x.dim() < 3:
        raise _wrong("input", "at least the three dimensions (tokens, H, D)", x.dim(), ValueError)
    if options["output_heads_first"] and x.dim() != 4:
        raise _wrong("output_heads_first", "True for four dimensions", x.dim(), ValueError)
    _check_key(given, shape)
    dim = _rotary_dim(options["rotary_dim"], shape[-1])
    _check_tables(given, dim)
    return options | {"rotary_dim": dim}


def _check_key(given: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Check the weights, and the key."""
    x, key = given["input"], given["key"]
    if given["weight"] is not None:
        _check_tensor("weight", given["weight"], shape, x)
    if key is None:
        if given["key_weight"] is not None:
            raise ValueError(f"{NAME}: argument 'key_weight' takes None without a key")
        return
    _check_tensor("key", key, None, x)
    others = [*x.shape[:-2], x.shape[-1]]
    if key.dim() != x.dim() or [*key.shape[:-2], key.shape[-1]] != others:
        takes = f"the input's shape {list(x.shape)} but for the heads"
        raise _wrong("key", takes, list(key.shape))
    if key.dtype != x.dtype:
        raise _wrong("key", f"the input's dtype {x.dtype}", key.dtype)
    if len(shape) == 2 and x.shape[-2] == 1 != key.shape[-2]:
        takes = "one head where the input has one that is normalised as a token"
        raise _wrong("key", takes, key.shape[-2])
    if (given["weight"] is None) != (given["key_weight"] is None):
        raise ValueError(
            f"{NAME}: arguments 'weight' and 'key_weight' take two Tensors or None twice with a key"
        )
    if given["key_weight"] is not None:
        _check_tensor("key_weight", given["key_weight"], key.shape[-len(shape) :], x)


def _check_tensor(name: str, tensor: Any, shape: Sequence[int] | None, x: Tensor) -> None:
    """Check a tensor's type, layout, dtype, device and, if there is one to have, its shape."""
    check_tensor(NAME, name, tensor)
    if shape is not None and tensor.shape != tuple(shape):
        raise _wrong(name, f"the shape {list(shape)}", list(tensor.shape))
    check_dtype(NAME, name, tensor)
    check_device(NAME, name, tensor, x)


def _rotary_dim(asked: Any, head: int) -> int:
    dim = head if asked is None else asked
    takes = f"an even int from 2 to the head's {head} elements"
    right = isinstance(dim, (int, torch.SymInt)) and not isinstance(dim, bool)
    check_argument(NAME, "rotary_dim", dim, right, takes)
    if dim % 2 or not 2 <= dim <= head:
        raise _wrong("rotary_dim", takes, dim, ValueError)
    return dim


def _check_tables(given: dict[str, Any], dim: int) -> None:
    x, cos, positions = given["input"], given["cos"], given["positions"]
    tokens = list(x.shape[:-2])
    for name in ("cos", "sin"):
        table = given[name]
        _check_tensor(name, table, None if name == "cos" else cos.shape, x)
        if name == "sin" and table.dtype != cos.dtype:
            raise _wrong(name, f"the dtype of cos {cos.dtype}", table.dtype)
        if torch.is_grad_enabled() and table.requires_grad:
            takes = "a tensor that requires no gradient: detach it"
            raise RuntimeError(f"{NAME}: argument {name!r} takes {takes}")
        if not table.dim() or table.shape[-1] not in (dim, dim // 2):
            takes = f"rotary_dim or rotary_dim / 2 columns, {dim} or {dim // 2}"
            raise _wrong(name, takes, list(table.shape), ValueError)
    rows = list(cos.shape[:-1])
    if positions is None:
        if not _broadcasts(rows, tokens):
            takes = f"rows that broadcast to the tokens {tokens}"
            raise _wrong("cos", takes, list(cos.shape))
        return
    if len(rows) != 1:
        raise _wrong("cos", "two dimensions with positions", list(cos.shape))
    check_tensor(NAME, "positions", positions, "a Tensor or None")
    if positions.dtype not in (torch.int32, torch.int64):
        raise _wrong("positions", "int32 or int64", positions.dtype, NotImplementedError)
    if not _broadcasts(list(positions.shape), tokens):
        takes = f"what broadcasts to the tokens {tokens}"
        raise _wrong("positions", takes, list(positions.shape))
    check_device(NAME, "positions", positions, x)


def _broadcasts(sizes: list[int], tokens: list[int]) -> bool:
    """Whether a tensor of these sizes broadcasts to the tokens' shape."""
    if len(sizes) > len(tokens):
        return False
    own = tokens[len(tokens) - len(sizes) :]
    return all(a in (1, b) for a, b in zip(sizes, own, strict=True))


def check_values(positions: Tensor | None, cos: Tensor) -> bool:
    """Whether TILENORM_DEBUG has the positions of each eager call checked; and check them then.

    Raises IndexError for a position that is no row of the tables.
    """
    if positions is None or is_compiling() or not settings().debug:
        return False
    if positions.numel():
        least, most = (int(end) for end in positions.aminmax())
        if least < 0 or most >= cos.shape[0]:
            takes = f"numbers from 0 to {cos.shape[0] - 1}, the rows of cos and sin"
            raise _wrong("positions", takes, f"{least} to {most}", IndexError)
    return True
