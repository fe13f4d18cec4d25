"""Checks of what a caller passes: at once, by name, in PyTorch's exception types."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ..row import Op, Port
from ..settings import settings
from ..spec import FP8, GROUPS, LAYOUTS
from ..table import (
    ADDEND,
    BRANCH_PORTS,
    DROPOUT_MASK,
    GIVEN,
    LAYER_SCALE,
    OPS,
    OPTIONS,
    RESIDUAL,
    X,
)
from .passes import dims
from .passes.reference import statistics_dtype
from .passes.registry import check_backend
from .passes.rotation import check_positions
from .pytorch.errors import wrong
from .pytorch.sizes import known, same

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
    a_name = backend is None or isinstance(backend, str)
    check_argument(name, "backend", backend, a_name, "a str or None")
    if backend is not None:
        check_backend(name, backend)
    options = dict(zip(op.options, asked, strict=True))
    for option, value in options.items():
        if option not in ("scaling", "layout", "dtype", "rotary_dim"):
            check_option(name, option, value)
    check_layout(name, "input", input)
    check_dtype(name, "input", input.dtype)
    shape = _check_shape(name, normalized_shape, input, layer)
    named = op.named(tensors)
    columns: tuple = ()
    if op.rotated:
        options = check_rotation(named, shape, options)
        columns = options["rotary_dim"], options["rotary_dim"] // 2
    present = []
    for port in PORTS[name]:
        tensor = named[port.name]
        if tensor is not None or port.needed:
            if not isinstance(tensor, Tensor):
                takes = "a Tensor" if port.needed else "a Tensor or None"
                check_tensor(name, _argument(port, named), tensor, takes)
            present.append(port)
    if present:
        sizes = dims.sizes_of(named, len(shape), columns)
        for port in present:
            _check_port(name, port, named, sizes)
    if op.rotated:
        _check_heads(named, len(shape) == 2)
    _check_together(name, named, options)
    hidden = math.prod(shape)
    if op.quantized:
        options = _check_quantization(name, hidden, options, named["given_scale"], input)
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
    """Whether the residual of a call, which needs one, is a sequence."""
    named = op.named(tensors)
    needed = any(port.name == RESIDUAL.name and port.needed for port in op.takes)
    return needed and isinstance(named[RESIDUAL.name], (tuple, list))


def spread(op: Op, tensors: tuple) -> tuple:
    """The tensors of a call whose residual is a sequence: its last item is the residual, and one
    before it the addend.

    Raises TypeError unless the sequence holds one or two tensors.
    """
    named = op.named(tensors)
    sequence = named[RESIDUAL.name]
    # Dynamo of PyTorch 2.9 finds no attributes of a nested tensor that is made inside a graph.
    taken = [isinstance(t, Tensor) or hasattr(t, "__torch_function__") for t in sequence]
    if ADDEND.name in named and all(taken) and len(sequence) in (1, 2):
        named[RESIDUAL.name] = sequence[-1]
        if len(sequence) == 2:
            named[ADDEND.name] = sequence[0]
        return tuple(named.values())
    got = f"[{', '.join(map(kind_of, sequence))}]"
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
    sizes_given = (normalized_shape,) if _is_size(normalized_shape) else normalized_shape
    check_argument(
        module, "normalized_shape", sizes_given, isinstance(sizes_given, Iterable), takes
    )
    sizes = _sizes(module, sizes_given, takes)
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
    elif kind == "ScalarType?":
        right = value is None or isinstance(value, torch.dtype)
        check_argument(op, name, value, right, "a torch.dtype or None")
        if value is not None:
            check_dtype(op, name, value)
    else:
        check_argument(op, name, value, isinstance(value, bool), "a bool")


def _check_word(op: str, name: str, value: object, words: Sequence[str], where: str = "") -> None:
    if not isinstance(value, str) or value not in words:
        raise wrong(op, name, f"{' or '.join(map(repr, words))}{where}", repr(value), ValueError)


def _check_quantization(
    op: str, hidden: int, options: dict, scale: Tensor | None, input: Tensor
) -> dict:
    """The options of a quantised norm, with the default layout where it is None. scale: the one
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
        check_tensor(op, "scale", scale, "a Tensor of one float32 with scaling='tensor'")
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != input.device:
            got = f"{list(scale.shape)} {scale.dtype} on {scale.device}"
            raise wrong(op, "scale", f"one torch.float32 on {input.device}", got)
    elif scale is not None:
        takes = f"None with scaling={scaling!r}, which finds the scales"
        raise ValueError(f"{op}: argument 'scale' takes {takes}")
    return options | {"layout": layout}


def _check_float(op: str, name: str, value: object, takes: str) -> None:
    check_argument(op, name, value, isinstance(value, (float, Real, SymFloat)), takes)
    try:
        isinstance(value, Integral) and float(value)
    except OverflowError:
        raise wrong(op, name, takes, "an int that no float holds", OverflowError) from None


# In the order in which ports are checked: a message names the first tensor that does not fit. The
# caller's scale has a check of its own.
ORDER = ("... n", "n", "[h] n", "g n", "t k d", "n of key", "t? r", "t?")


def _place(port: Port) -> int:
    return ORDER.index(port.dims if port.of == "input" else f"{port.dims} of {port.of}")


PORTS = {
    name: sorted([port for port in op.takes if port not in (X, GIVEN)], key=_place)
    for name, op in OPS.items()
}
# The dtypes of tensors that take no others. The dtype of a port may stand there too.
DTYPES_OF = {"bool": (torch.bool,), "int32 int64": (torch.int32, torch.int64)}


def _argument(port: Port, tensors: dict[str, Any]) -> str:
    """The name of a port's argument in a call."""
    of_two = port.role == RESIDUAL.role and tensors.get(ADDEND.name) is not None
    return "residual[1]" if of_two else port.argument


def _check_port(op: str, port: Port, tensors: dict[str, Any], sizes: dims.Sizes) -> None:
    """Check a tensor: its shape, layout, dtype and device. tensors: those of the call by name."""
    tensor, argument = tensors[port.name], _argument(port, tensors)
    alike = tensors[port.same] if port.same else None
    if alike is None or not same(tensor.shape, alike.shape):
        misfit = dims.fits(port, tensor, sizes)
        if misfit is not None:
            raise wrong(op, argument, misfit.takes, list(tensor.shape), misfit.kind)
        if alike is not None:
            takes = f"the shape of {port.same} {list(alike.shape)}"
            raise wrong(op, argument, takes, list(tensor.shape))
    check_layout(op, argument, tensor)
    dtypes = DTYPES_OF.get(port.like)
    if dtypes is None:
        check_dtype(op, argument, tensor.dtype)
    elif tensor.dtype not in dtypes:
        takes = port.like.replace(" ", " or ") if len(dtypes) > 1 else str(dtypes[0])
        raise wrong(op, argument, takes, tensor.dtype, NotImplementedError)
    check_device(op, argument, tensor, tensors["input"])
    if port.like and dtypes is None:
        dtype = tensors[port.like].dtype
        if tensor.dtype != dtype:
            takes = "the input's dtype" if port.like == "input" else f"the dtype of {port.like}"
            raise wrong(op, argument, f"{takes} {dtype}", tensor.dtype)


def _check_together(op: str, tensors: dict, options: dict) -> None:
    """Check that tensors and options fit each other."""
    input, residual, addend = map(tensors.get, ("input", "residual", "addend"))
    if addend is not None and addend.dtype not in (input.dtype, residual.dtype):
        takes = f"the dtype of the input or of residual[1], {input.dtype} or {residual.dtype}"
        raise wrong(op, "residual[0]", takes, addend.dtype)
    if "shift" in tensors and tensors["gate"] is not None and residual is None:
        takes = "None without a residual, to which gate · input is added"
        raise wrong(op, "gate", takes, "a Tensor", ValueError)
    if "dropout_scale" in options:
        if tensors[DROPOUT_MASK.name] is None and options["dropout_scale"] != 1:
            got = options["dropout_scale"]
            raise wrong(op, "dropout_scale", f"1.0 without a {DROPOUT_MASK.name}", got, ValueError)
        for port in BRANCH_PORTS:
            if tensors[port.name] is not None and addend is not None:
                raise wrong(op, port.name, "None with two residuals", "one")
        # The gradient of the vector is made of the residual's.
        digits = torch.finfo(residual.dtype).eps > torch.finfo(input.dtype).eps
        if tensors[LAYER_SCALE.name] is not None and digits:
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


def check_layout(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        takes = "the layout torch.strided"
        raise wrong(op, name, takes, tensor.layout, NotImplementedError)


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise wrong(op, name, takes, dtype, NotImplementedError)


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


def check_rotation(tensors: dict[str, Any], shape: tuple[int, ...], options: dict) -> dict:
    """The options, with rotary_dim for None. tensors: by name, of which `input` has passed its
    checks. shape: the sizes of normalized_shape.

    Raises as rms_norm_rope says.
    """
    x = tensors["input"]
    if len(shape) > 2:
        raise wrong(ROPE, "normalized_shape", "(D,) or (H, D)", shape)
    if x.dim() < 3:
        takes = "at least the three dimensions (tokens, H, D)"
        raise wrong(ROPE, "input", takes, x.dim(), ValueError)
    if options["output_heads_first"] and x.dim() != 4:
        raise wrong(ROPE, "output_heads_first", "True for four dimensions", x.dim(), ValueError)
    if tensors["key"] is None and tensors["key_weight"] is not None:
        raise ValueError(f"{ROPE}: argument 'key_weight' takes None without a key")
    return options | {"rotary_dim": _rotary_dim(options["rotary_dim"], shape[-1])}


def _check_heads(tensors: dict[str, Any], by_token: bool) -> None:
    """Check what rotated heads take together. by_token: a token's heads are normalised together."""
    x, key = tensors["input"], tensors["key"]
    if key is not None:
        if by_token and known(x.shape[-2] == 1) and known(key.shape[-2] != 1):
            takes = "one head where the input has one that is normalised as a token"
            raise wrong(ROPE, "key", takes, key.shape[-2])
        if (tensors["weight"] is None) != (tensors["key_weight"] is None):
            takes = "two Tensors or None twice with a key"
            raise ValueError(f"{ROPE}: arguments 'weight' and 'key_weight' take {takes}")
    if torch.is_grad_enabled():
        for name in ("cos", "sin"):
            if tensors[name].requires_grad:
                takes = "a tensor that requires no gradient: detach it"
                raise RuntimeError(f"{ROPE}: argument {name!r} takes {takes}")


def _rotary_dim(asked: Any, head: int) -> int:
    dim = head if asked is None else asked
    takes = f"an even int from 2 to the head's {head} elements"
    right = isinstance(dim, (int, torch.SymInt)) and not isinstance(dim, bool)
    check_argument(ROPE, "rotary_dim", dim, right, takes)
    if dim % 2 or not 2 <= dim <= head:
        raise wrong(ROPE, "rotary_dim", takes, dim, ValueError)
    return dim


def check_values(tensors: dict[str, Any]) -> bool:
    """Whether TILENORM_DEBUG has the positions of each eager call checked; and check them then.

    tensors: by their roles. Raises IndexError for a position that is no row of the tables.
    """
    positions = tensors["positions"]
    if positions is None or is_compiling() or not settings().debug:
        return False
    check_positions(positions, tensors["cos"])
    return True
