"""Checks of what a caller passes: at once, by name, in PyTorch's exception types."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ..row import Op
from ..settings import settings
from ..spec import FP8, GROUPS, LAYOUTS
from ..table import BRANCH_PORTS, DROPOUT_MASK, LAYER_SCALE, OPS, OPTIONS
from .passes.dims import leading_groups
from .passes.reference import statistics_dtype
from .passes.registry import check_backend
from .passes.rotation import check_positions
from .pytorch.errors import wrong
from .pytorch.sizes import divides, holds, known, same

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8_DTYPES = tuple(getattr(torch, name) for name in FP8)
MAX_SIZE = 2**63 - 1
ROPE = "rms_norm_rope"
CASTS = {"float": float, "bool": bool, "str": str}


def check(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    asked: tuple,
    backend: str | None,
) -> tuple:
    """The options of a call: `hidden`, and the values of the op's options.

    asked: the options as the caller gave them.

    Raises TypeError for an argument of the wrong type, NotImplementedError for a dtype or layout
    that is not served, ValueError for an unknown word or options that do not fit each other,
    RuntimeError for shapes or devices that do not fit, OverflowError for a number that no float
    holds. An RMSNorm's input of too few dimensions raises ValueError.
    """
    name, input = op.name, tensors[0]
    check_tensor(name, "input", input)
    sized = isinstance(normalized_shape, (tuple, list))
    check_argument(name, "normalized_shape", normalized_shape, sized, "a tuple of ints")
    # PyTorch's layer_norm takes no None, and has another exception for too few dimensions.
    layer = op.norm == "layer"
    if layer or eps is not None:
        _check_float(name, "eps", eps, "a float" if layer else "a float or None")
    named = backend is None or isinstance(backend, str)
    check_argument(name, "backend", backend, named, "a str or None")
    if backend is not None:
        check_backend(name, backend)
    options = dict(zip(op.options, asked, strict=True))
    for option, value in options.items():
        if option not in ("scaling", "layout", "dtype", "rotary_dim"):
            check_option(name, option, value)
    check_dtype(name, "input", input)
    shape = _check_shape(name, normalized_shape, input, layer)
    given = op.named(tensors)
    if op.rotated:
        options = check_rotation(given, shape, options)
    for port in PORTS.get(name, ()):
        tensor = given[port.name]
        if port.needed or tensor is not None:
            twice = port.role == "residual" and given.get("addend") is not None
            argument = "residual[1]" if twice else port.argument
            CHECKS[port.lies](name, argument, tensor, shape, input)
            if port.lies != "mask":  # which is of torch.bool
                check_dtype(name, argument, tensor)
            check_device(name, argument, tensor, input)
    _check_together(name, given, options)
    hidden = math.prod(shape)
    if op.quantized:
        options = _check_quantization(name, hidden, options, given["given_scale"], input)
    values = []
    for option, value in options.items():
        cast = CASTS.get(OPTIONS[option].kind)
        values.append(value if cast is None else cast(value))
    return hidden, *values


def _check_shape(op: str, normalized_shape: Sequence[int], input: Tensor, layer: bool) -> tuple:
    """The sizes of normalized_shape."""
    shape = _sizes(op, normalized_shape, "a tuple of ints")
    if not shape:
        raise wrong(op, "normalized_shape", "at least one size", shape)
    if input.dim() < len(shape):
        takes = f"at least the {len(shape)} dimensions of normalized_shape"
        raise wrong(op, "input", takes, input.dim(), RuntimeError if layer else ValueError)
    if not same(input.shape[-len(shape) :], shape):
        takes = f"a shape that ends in normalized_shape {list(shape)}"
        raise wrong(op, "input", takes, list(input.shape))
    return shape


def is_sequence(op: Op, tensors: tuple) -> bool:
    """Whether the residual of a call is a sequence."""
    return isinstance(tensors[1], (tuple, list)) and op.takes[1].name == "residual"


def spread(op: Op, tensors: tuple) -> tuple:
    """The tensors of a call whose residual is a sequence: its last item is the residual, and one
    before it the addend.

    Raises TypeError unless the sequence holds one or two tensors.
    """
    names = [port.name for port in op.takes]
    given = tensors[1]
    # Dynamo of PyTorch 2.9 finds no attributes of a nested tensor that is made inside a graph.
    taken = [isinstance(t, Tensor) or hasattr(t, "__torch_function__") for t in given]
    if "addend" in names and all(taken) and len(given) in (1, 2):
        spread = list(tensors)
        spread[1] = given[-1]
        if len(given) == 2:
            spread[names.index("addend")] = given[0]
        return tuple(spread)
    got = f"[{', '.join(map(kind_of, given))}]"
    raise wrong(op.name, "residual", "a Tensor or a sequence of one or two Tensors", got, TypeError)


def _sizes(op: str, sizes: Sequence[int], takes: str) -> tuple[int, ...]:
    """The sizes of a normalized_shape. PyTorch takes integer tensors as sizes too."""
    sizes = tuple([int(n) if _is_integer_tensor(n) else n for n in sizes])
    for size in sizes:
        # type() first: the abstract class takes longer than all the other checks of an int.
        if not (-MAX_SIZE <= size <= MAX_SIZE if type(size) is int else _is_size(size)):
            raise wrong(op, "normalized_shape", takes, sizes, TypeError)
    return sizes


def sizes_of(module: str, normalized_shape: object) -> tuple[int, ...]:
    """What a module takes as its normalized_shape, an int or sizes, as a tuple."""
    takes = "an int or a tuple of ints, from 0 on"
    given = (normalized_shape,) if _is_size(normalized_shape) else normalized_shape
    check_argument(module, "normalized_shape", given, isinstance(given, Iterable), takes)
    sizes = _sizes(module, given, takes)
    if any(size < 0 for size in sizes):
        raise wrong(module, "normalized_shape", takes, sizes)
    return sizes


def check_option(op: str, name: str, value: object) -> None:
    """Check that an option has its type, or is one of the words for it."""
    kind, _, words = OPTIONS[name]
    if words:
        _check_word(op, name, value, words)
    elif kind == "float":
        _check_float(op, name, value, "a float")
    else:
        check_argument(op, name, value, isinstance(value, bool), "a bool")


def _check_word(op: str, name: str, value: object, words: Sequence[str], where: str = "") -> None:
    if not isinstance(value, str) or value not in words:
        raise wrong(op, name, f"{' or '.join(map(repr, words))}{where}", repr(value), ValueError)


def _check_quantization(
    op: str, hidden: int, options: dict, given: Tensor | None, input: Tensor
) -> dict:
    """The options of a quantised norm, with the default layout where it is None. given: the scale
    that the caller gives.
    """
    scaling, dtype, layout = options["scaling"], options["dtype"], options["layout"]
    check_option(op, "scaling", scaling)
    if dtype not in FP8_DTYPES:
        raise wrong(op, "dtype", " or ".join(map(str, FP8_DTYPES)), dtype, NotImplementedError)
    if options["power_of_2"] and scaling in ("mx", "tensor"):
        why = "are powers of two always" if scaling == "mx" else "are the caller's"
        raise ValueError(
            f"{op}: argument 'power_of_2' takes no True with scaling={scaling!r}: its scales {why}"
        )
    layout = LAYOUTS[scaling][0] if layout is None else layout
    _check_word(op, "layout", layout, LAYOUTS[scaling], f" with scaling={scaling!r}")
    group = GROUPS[scaling] or 1
    if hidden == 0 or hidden % group:
        takes = f"a multiple of {group} elements with scaling={scaling!r}"
        raise wrong(op, "normalized_shape", takes, hidden)
    if scaling == "tensor":
        check_tensor(op, "scale", given, "a Tensor of one float32 with scaling='tensor'")
        if given.dtype != torch.float32 or given.numel() != 1 or given.device != input.device:
            got = f"{list(given.shape)} {given.dtype} on {given.device}"
            raise wrong(op, "scale", f"one torch.float32 on {input.device}", got)
    elif given is not None:
        takes = f"None with scaling={scaling!r}, which finds the scales"
        raise ValueError(f"{op}: argument 'scale' takes {takes}")
    return options | {"layout": layout}


def _check_float(op: str, name: str, value: object, takes: str) -> None:
    check_argument(op, name, value, isinstance(value, (float, Real, SymFloat)), takes)
    try:
        isinstance(value, Integral) and float(value)
    except OverflowError:
        raise wrong(op, name, takes, "an int that no float holds", OverflowError) from None


def _check_rows(op: str, name: str, tensor: Tensor, shape: tuple, input: Tensor) -> None:
    check_tensor(op, name, tensor)
    if not same(tensor.shape, input.shape):
        raise wrong(op, name, f"the input's shape {list(input.shape)}", list(tensor.shape))


def _check_mask(op: str, name: str, mask: Tensor, shape: tuple, input: Tensor) -> None:
    check_tensor(op, name, mask, "a Tensor or None")
    if not same(mask.shape, input.shape) or mask.layout != torch.strided:
        got = f"{list(mask.shape)} {mask.layout}"
        raise wrong(op, name, f"the input's shape {list(input.shape)}", got)
    if mask.dtype != torch.bool:
        raise wrong(op, name, "torch.bool", mask.dtype, NotImplementedError)


def _check_vector(op: str, name: str, vector: Tensor, shape: tuple, input: Tensor) -> None:
    _check_affine(op, name, vector, shape, input)
    if not same(vector.shape, shape):
        takes = f"the shape of normalized_shape {list(shape)}"
        raise wrong(op, name, takes, list(vector.shape))


def _check_affine(op: str, name: str, parameter: Tensor, shape: tuple, input: Tensor) -> None:
    check_tensor(op, name, parameter, "a Tensor or None")
    by_heads = input.shape[-len(shape) - 1 :]
    if not same(parameter.shape, shape if parameter.dim() == len(shape) else by_heads):
        or_heads = f" or, by heads, {list(by_heads)}" if len(by_heads) > len(shape) else ""
        takes = f"the shape of normalized_shape {list(shape)}{or_heads}"
        raise wrong(op, name, takes, list(parameter.shape))


def _check_group(op: str, name: str, tensor: Tensor, shape: tuple, input: Tensor) -> None:
    """Check a tensor that lies by group: a row for each set of consecutive rows."""
    check_tensor(op, name, tensor)
    leading = list(input.shape[: input.dim() - len(shape)])
    groups = list(leading_groups(tensor.shape, len(shape)))
    fits = same(tensor.shape[-len(shape) :], shape) and len(groups) <= len(leading)
    if fits and groups:
        *before, last = leading[: len(groups)]
        fits = same(groups[:-1], before) and divides(groups[-1], last)
    if not fits:
        takes = f"leading sizes of the input's {leading}, of which the last may be a divisor"
        takes += f", and then normalized_shape {list(shape)}"
        raise wrong(op, name, takes, list(tensor.shape))


# By how a port lies, in the order in which ports are checked: a message names the first tensor that
# does not fit. The one scalar, and a norm that is rotated, have checks of their own.
CHECKS = {
    "rows": _check_rows,
    "mask": _check_mask,
    "vector": _check_vector,
    "affine": _check_affine,
    "group": _check_group,
}
PORTS = {
    name: [port for lies in CHECKS for port in op.takes[1:] if port.lies == lies]
    for name, op in OPS.items()
    if not op.rotated
}


def _check_together(op: str, given: dict, options: dict) -> None:
    """Check that tensors and options fit each other."""
    for prefix in ("", "next_"):  # a bias is by heads where its weight is
        weight, bias = given.get(f"{prefix}weight"), given.get(f"{prefix}bias")
        if weight is not None and bias is not None and not same(weight.shape, bias.shape):
            takes = f"the shape of {prefix}weight {list(weight.shape)}"
            raise wrong(op, f"{prefix}bias", takes, list(bias.shape))
    input, residual, addend = map(given.get, ("input", "residual", "addend"))
    if addend is not None and addend.dtype not in (input.dtype, residual.dtype):
        takes = f"the dtype of the input or of residual[1], {input.dtype} or {residual.dtype}"
        raise wrong(op, "residual[0]", takes, addend.dtype)
    if "shift" in given:
        for name in ("shift", "gate"):
            tensor, shape = given[name], given["scale"].shape
            if tensor is not None and not same(tensor.shape, shape):
                raise wrong(op, name, f"the shape of scale {list(shape)}", list(tensor.shape))
        if given["gate"] is not None and residual is None:
            takes = "None without a residual, to which gate · input is added"
            raise wrong(op, "gate", takes, "a Tensor", ValueError)
    if "dropout_scale" in options:
        if given[DROPOUT_MASK.name] is None and options["dropout_scale"] != 1:
            got = options["dropout_scale"]
            raise wrong(op, "dropout_scale", f"1.0 without a {DROPOUT_MASK.name}", got, ValueError)
        for port in BRANCH_PORTS:
            if given[port.name] is not None and addend is not None:
                raise wrong(op, port.name, "None with two residuals", "one")
        # The gradient of the vector is made of the residual's.
        digits = torch.finfo(residual.dtype).eps > torch.finfo(input.dtype).eps
        if given[LAYER_SCALE.name] is not None and digits:
            takes = f"at least the digits of the input's {input.dtype} with a {LAYER_SCALE.name}"
            raise wrong(op, "residual", takes, residual.dtype)


def _is_integer_tensor(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dim():
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _is_size(value: object) -> bool:
    return isinstance(value, (SymInt, Integral)) and not isinstance(value, bool)


def default_eps(*tensors: Tensor | None) -> float:
    """What PyTorch takes for eps=None: the machine epsilon of the dtype it computes in."""
    return torch.finfo(statistics_dtype(*tensors)).eps


def check_argument(caller: str, name: str, value: object, right: bool, takes: str) -> None:
    """Raise TypeError unless an argument is right: of a type that the caller takes."""
    if not right:
        raise wrong(caller, name, takes, kind_of(value), TypeError)


def check_tensor(op: str, name: str, value: object, takes: str = "a Tensor") -> None:
    check_argument(op, name, value, isinstance(value, Tensor), takes)


def check_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise wrong(op, name, f"the input's device {input.device}", tensor.device)


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """Check a tensor's layout and dtype."""
    if tensor.layout != torch.strided:
        takes = "the layout torch.strided"
        raise wrong(op, name, takes, tensor.layout, NotImplementedError)
    if tensor.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise wrong(op, name, takes, tensor.dtype, NotImplementedError)


def kind_of(value: object) -> str:
    return type(value).__name__


def heads_last(argument: str, tensor: Any) -> Any:
    """A view (B, S, H, D) of (B, H, S, D); None for None."""
    if tensor is None:
        return None
    if not has_torch_function((tensor,)):
        check_tensor(ROPE, argument, tensor)
        if tensor.dim() != 4:
            raise wrong(
                ROPE, argument, "four dimensions with heads_first", tensor.dim(), ValueError
            )
    return torch.transpose(tensor, 1, 2)


def check_rotation(given: dict[str, Any], shape: tuple[int, ...], options: dict) -> dict:
    """The options, with rotary_dim for None. given: the tensors by name, of which `input` has
    passed its checks. shape: the sizes of normalized_shape.

    Raises as rms_norm_rope says.
    """
    x = given["input"]
    if len(shape) > 2:
        raise wrong(ROPE, "normalized_shape", "(D,) or (H, D)", shape)
    if x.dim() < 3:
        raise wrong(
            ROPE, "input", "at least the three dimensions (tokens, H, D)", x.dim(), ValueError
        )
    if options["output_heads_first"] and x.dim() != 4:
        raise wrong(ROPE, "output_heads_first", "True for four dimensions", x.dim(), ValueError)
    _check_key(given, shape)
    dim = _rotary_dim(options["rotary_dim"], shape[-1])
    _check_tables(given, dim)
    return options | {"rotary_dim": dim}


def _check_key(given: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Check the weights, and the key."""
    x, key = given["input"], given["key"]
    if given["weight"] is not None:
        _check_at("weight", given["weight"], shape, x)
    if key is None:
        if given["key_weight"] is not None:
            raise ValueError(f"{ROPE}: argument 'key_weight' takes None without a key")
        return
    _check_at("key", key, None, x)
    others = [*x.shape[:-2], x.shape[-1]]
    if key.dim() != x.dim() or not same([*key.shape[:-2], key.shape[-1]], others):
        takes = f"the input's shape {list(x.shape)} but for the heads"
        raise wrong(ROPE, "key", takes, list(key.shape))
    if key.dtype != x.dtype:
        raise wrong(ROPE, "key", f"the input's dtype {x.dtype}", key.dtype)
    if len(shape) == 2 and known(x.shape[-2] == 1) and known(key.shape[-2] != 1):
        takes = "one head where the input has one that is normalised as a token"
        raise wrong(ROPE, "key", takes, key.shape[-2])
    if (given["weight"] is None) != (given["key_weight"] is None):
        raise ValueError(
            f"{ROPE}: arguments 'weight' and 'key_weight' take two Tensors or None twice with a key"
        )
    if given["key_weight"] is not None:
        _check_at("key_weight", given["key_weight"], key.shape[-len(shape) :], x)


def _check_at(name: str, tensor: Any, shape: Sequence[int] | None, x: Tensor) -> None:
    """Check a tensor's type, layout, dtype, device and, if there is one to have, its shape."""
    check_tensor(ROPE, name, tensor)
    if shape is not None and not same(tensor.shape, shape):
        raise wrong(ROPE, name, f"the shape {list(shape)}", list(tensor.shape))
    check_dtype(ROPE, name, tensor)
    check_device(ROPE, name, tensor, x)


def _rotary_dim(asked: Any, head: int) -> int:
    dim = head if asked is None else asked
    takes = f"an even int from 2 to the head's {head} elements"
    right = isinstance(dim, (int, torch.SymInt)) and not isinstance(dim, bool)
    check_argument(ROPE, "rotary_dim", dim, right, takes)
    if dim % 2 or not 2 <= dim <= head:
        raise wrong(ROPE, "rotary_dim", takes, dim, ValueError)
    return dim


def _check_tables(given: dict[str, Any], dim: int) -> None:
    x, cos, positions = given["input"], given["cos"], given["positions"]
    tokens = list(x.shape[:-2])
    for name in ("cos", "sin"):
        table = given[name]
        _check_at(name, table, None if name == "cos" else cos.shape, x)
        if name == "sin" and table.dtype != cos.dtype:
            raise wrong(ROPE, name, f"the dtype of cos {cos.dtype}", table.dtype)
        if torch.is_grad_enabled() and table.requires_grad:
            takes = "a tensor that requires no gradient: detach it"
            raise RuntimeError(f"{ROPE}: argument {name!r} takes {takes}")
        if not table.dim() or table.shape[-1] not in (dim, dim // 2):
            takes = f"rotary_dim or rotary_dim / 2 columns, {dim} or {dim // 2}"
            raise wrong(ROPE, name, takes, list(table.shape), ValueError)
    rows = list(cos.shape[:-1])
    if positions is None:
        if not _broadcasts(rows, tokens):
            takes = f"rows that broadcast to the tokens {tokens}"
            raise wrong(ROPE, "cos", takes, list(cos.shape))
        return
    if len(rows) != 1:
        raise wrong(ROPE, "cos", "two dimensions with positions", list(cos.shape))
    check_tensor(ROPE, "positions", positions, "a Tensor or None")
    if positions.dtype not in (torch.int32, torch.int64):
        raise wrong(ROPE, "positions", "int32 or int64", positions.dtype, NotImplementedError)
    if not _broadcasts(list(positions.shape), tokens):
        takes = f"what broadcasts to the tokens {tokens}"
        raise wrong(ROPE, "positions", takes, list(positions.shape))
    check_device(ROPE, "positions", positions, x)


def _broadcasts(sizes: list[int], tokens: list[int]) -> bool:
    """Whether a tensor of these sizes broadcasts to the tokens' shape."""
    if len(sizes) > len(tokens):
        return False
    own = tokens[len(tokens) - len(sizes) :]
    return all(known(a == 1) or holds(a == b) for a, b in zip(sizes, own, strict=True))


def check_values(tensors: dict[str, Any]) -> bool:
    """Whether TILENORM_DEBUG has the positions of each eager call checked; and check them then.

    tensors: by their roles. Raises IndexError for a position that is no row of the tables.
    """
    positions = tensors["positions"]
    if positions is None or is_compiling() or not settings().debug:
        return False
    check_positions(positions, tensors["cos"])
    return True
