"""From a public function of a quantised norm to the op: check, select, run."""

from collections.abc import Sequence

import torch
from torch import Tensor, is_autocast_enabled
from torch.overrides import has_torch_function

from ...spec import FP8, GROUPS, LAYOUTS, Quantization
from .. import arguments, dispatch, library
from ..autograd import apply_quantized, needs_grad, refuse_gradient
from ..direct import in_onnx_export, is_transformed
from ..overrides import has_nested
from ..tensors import Tensors, trimmed
from .library import Call, arguments_of, norm_quantized_decomposed

# The public functions' names of `asked` and `how`.
ASKED = ("offset", "rounding", "scaling", "dtype", "power_of_2", "layout")
ASKED += ("return_output", "return_amax")
DTYPES = tuple(getattr(torch, name) for name in FP8)


def checked(op, tensors, normalized_shape, eps, asked, backend, known) -> tuple:
    """Results, of which those that were not asked for are None; after checks, and remembered where
    an implementation is called directly.
    """
    *tensors, given = tensors
    call = check(op, tensors, normalized_shape, eps, asked[:2], asked[2:], given, backend)
    if call.save:
        refuse_gradient(op, call.how)
    # A mode or a subclass of Tensor sees the op.
    if dispatch.is_direct(call.tensors) and not has_torch_function(call.tensors):
        runner, cast = call.runner, trimmed(call.tensors)
        if known is not None and all(a is b for a, b in zip(cast, tensors, strict=False)):
            taken, dims = (*cast, given), len(normalized_shape)
            dispatch.remember(known, taken, dims, call.eps, runner, apply_quantized, given)
        if call.save:
            return apply_quantized((call.eps, False, runner, runner.training), *cast, given)
        return runner.inference((*call.tensors, given), call.eps)
    if in_onnx_export():
        found = norm_quantized_decomposed(*arguments_of(call))
    else:
        found = torch.ops.tilenorm.norm_quantized(*arguments_of(call))
    q, scale, amax, y, total, *statistics = found
    how, added = call.how, call.tensors.residual is not None
    made = amax if how.amax else None, y if how.output else None, total if added else None
    return q, scale, *made, *statistics


def check(op, tensors, normalized_shape, eps, asked, how, given, backend) -> Call:
    """What a call asks for.

    Raises as arguments.check does, and ValueError for an unknown scaling or layout, or for one that
    does not fit the others; RuntimeError for a scale that is missing, of another shape or on
    another device, and for rows that are not whole groups; NotImplementedError for a dtype that is
    no FP8 dtype, for nested tensors and for transforms.
    """
    if has_nested(tensors):
        raise NotImplementedError(f"{op}: argument 'input' takes no nested tensor, got one")
    eps = arguments.without_tensor(eps)
    offset, rounding = asked
    values = (offset, False, rounding)
    options = arguments.check(op, tensors, normalized_shape, eps, values, backend)
    quantization = check_how(op, options.hidden, *how)
    _check_given(op, quantization, given, tensors[0])
    if is_transformed(tensors):
        plain = op.removesuffix("_quantized")
        instead = "" if plain == op else f"; quantise what tilenorm.{plain} returns"
        raise NotImplementedError(
            f"{op}: torch.func's transforms and forward-mode derivatives take no quantised norm"
            f"{instead}"
        )
    if torch.jit.is_tracing() and in_onnx_export():
        raise NotImplementedError(
            f"{op}: torch.onnx.export with dynamo=False knows no 8-bit floats: pass dynamo=True"
        )
    eps = arguments.default_eps(*tensors[:2]) if eps is None else float(eps)
    if tensors[0].is_cuda and is_autocast_enabled():
        tensors = library.autocast_tensors(tensors, options.norm)
    cast = Tensors(*tensors)
    return Call(cast, given, options, eps, quantization, needs_grad(*cast), backend)


def check_how(op, hidden, scaling, dtype, power_of_2, layout, output, amax) -> Quantization:
    """The fields of Quantization, and the default layout where it is None."""
    _check_word(op, "scaling", scaling, GROUPS)
    if dtype not in DTYPES:
        takes = " or ".join(map(str, DTYPES))
        raise NotImplementedError(f"{op}: argument 'dtype' takes {takes}, got {dtype}")
    flags = {"power_of_2": power_of_2, "return_output": output, "return_amax": amax}
    for name, value in flags.items():
        if not isinstance(value, bool):
            got = type(value).__name__
            raise TypeError(f"{op}: argument {name!r} takes a bool, got {got}")
    if power_of_2 and scaling in ("mx", "tensor"):
        why = "are powers of two always" if scaling == "mx" else "are the caller's"
        raise ValueError(
            f"{op}: argument 'power_of_2' takes no True with scaling={scaling!r}: its scales {why}"
        )
    if layout is None:
        layout = LAYOUTS[scaling][0]
    _check_word(op, "layout", layout, LAYOUTS[scaling], f" with scaling={scaling!r}")
    group = GROUPS[scaling] or 1
    if hidden == 0 or hidden % group:
        raise RuntimeError(
            f"{op}: argument 'normalized_shape' takes a multiple of {group} elements with"
            f" scaling={scaling!r}, got {hidden}"
        )
    name = str(dtype).removeprefix("torch.")
    return Quantization(scaling, name, power_of_2, layout, output, amax)


def _check_word(op: str, name: str, value: object, words: Sequence[str], where: str = "") -> None:
    if not isinstance(value, str) or value not in words:
        takes = " or ".join(map(repr, words))
        raise ValueError(f"{op}: argument {name!r} takes {takes}{where}, got {value!r}")


def _check_given(op: str, how: Quantization, given: Tensor | None, input: Tensor) -> None:
    takes = f"{op}: argument 'scale' takes"
    if how.scaling != "tensor":
        if given is not None:
            raise ValueError(f"{takes} None with scaling={how.scaling!r}, which finds the scales")
        return
    if not isinstance(given, Tensor):
        got = type(given).__name__
        raise TypeError(f"{takes} a Tensor of one float32 with scaling='tensor', got {got}")
    if given.dtype != torch.float32 or given.numel() != 1 or given.device != input.device:
        raise RuntimeError(
            f"{takes} one torch.float32 on {input.device}, got {list(given.shape)} {given.dtype}"
            f" on {given.device}"
        )
