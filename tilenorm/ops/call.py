"""From a public function to an implementation: remembered? else check, select, run, remember."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import has_torch_function

from ..row import Op
from ..table import OPS
from . import arguments, overrides
from .passes.bound import MOST_CALLS, Bound, bound_of, kinds_of, refuse_gradient, specs_of
from .passes.native import state
from .passes.registry import MAX_ROWS, TRANSFORMED, device_of, select_reference
from .pytorch import torch_private
from .pytorch.plain import MOST_GUARDS, in_onnx_export, is_plain, is_transformed
from .pytorch.sizes import without_tensor
from .pytorch.torch_private import TensorGuards, forward_mode, modes
from .torch_ops import library
from .torch_ops.autograd import apply, call_needs_grad
from .torch_ops.sharded_rows import has_sharded_rows, of_sharded_rows
from .torch_ops.telling import tell

NATIVE = state()
_autocast = torch.is_autocast_enabled  # for CUDA; given a device's name it takes twice as long


class Known(NamedTuple):
    """What serves calls whose tensors `check` takes. Leading sizes and strides may differ."""

    check: Callable[..., bool]
    index: int | None  # the CUDA device's
    most: int  # how many elements the input may have
    rows: tuple[int, ...]  # the places of the tensors that have the input's shape
    eps: Any
    recorded: bool  # one of the tensors requires a gradient
    bound: Bound


def call(
    op: str,
    tensors: tuple,
    normalized_shape: Sequence[int],
    eps: float | None,
    asked: tuple,
    backend: str | None,
) -> Any:
    """What the op of that name makes, by whatever serves the call; None for what is absent.

    tensors: in the order in which the op takes them; the residual may be a sequence, see
    arguments.spread. asked: the values of the op's options, as the caller gives them.
    """
    known = None
    if not is_dynamo_compiling():  # the guards find what other tracers give
        if NATIVE.served is not None:
            results = NATIVE.served(op, tensors, normalized_shape, eps, asked, backend)
            if results is not None:
                return results
        if has_torch_function(tensors):  # torch.compile calls it at the operations in the graph
            return overrides.overridden(checked, op, tensors, normalized_shape, eps, asked, backend)
        present, absent = [], 1
        try:
            for tensor in tensors:  # a comprehension takes longer
                if tensor is None:
                    absent += absent
                else:
                    if tensor.is_nested:  # the guard of one that is not jagged ends the process
                        raise TypeError
                    present.append(tensor)
                    absent += absent + 1
            known = remembered(
                op, eps, backend, absent, type(normalized_shape), *asked, *normalized_shape
            )
        except (AttributeError, TypeError):  # nothing is remembered; the checks say what is wrong
            pass
        for check, index, most, rows, bound_eps, recorded, bound in known or ():
            if (
                check(*present)
                and (index is None or index == torch_private.current_device())
                and (x := tensors[0]).numel() <= most
                and not modes()
                and forward_mode._current_level < 0
            ):
                for place in rows:
                    if tensors[place].shape != x.shape:
                        break
                else:
                    if recorded and is_grad_enabled():
                        results = apply((bound_eps, bound, bound.training), *tensors)
                    elif (results := bound.inference.repeated(tensors, bound_eps)) is None:
                        results = bound.inference.cold(tensors, bound_eps)
                    if NATIVE.served is None:
                        if NATIVE.waits:
                            NATIVE.look()
                    elif bound.inference.ready or bound.training.ready:
                        arguments_of = op, tensors, normalized_shape, eps, asked, backend
                        tell(bound, bound_eps, recorded, arguments_of)
                    return results
    if known is None and arguments.is_sequence(OPS[op], tensors):
        tensors = arguments.spread(OPS[op], tensors)
        return call(op, tensors, normalized_shape, eps, asked, backend)
    return checked(OPS[op], tensors, normalized_shape, eps, asked, backend, known)


def checked(
    op: Op, tensors, normalized_shape, eps, asked, backend, known: list[Known] | None = None
) -> Sequence[Tensor | None]:
    """The same after checks, and remembered where an implementation is called directly."""
    if overrides.has_nested(tensors):
        return overrides.of_jagged(call, op, tensors, normalized_shape, eps, asked, backend)
    eps = without_tensor(eps)
    options = arguments.check(op, tensors, normalized_shape, eps, asked, backend)
    cast, dims = tensors, len(normalized_shape)
    if tensors[0].is_cuda and _autocast():
        cast, options = library.autocast_arguments(op, tensors, options)
    eps_of_norms = eps_of(op, tensors, eps)
    bound_eps = eps_of_norms if op.calls else eps_of_norms[0]
    recorded = call_needs_grad(op, cast)
    if op.quantized:
        _refuse_quantized(op, cast)
        if recorded:
            refuse_gradient(op, options)
    if is_direct(cast):
        if op.rotated and arguments.check_values(op.by_role(tensors)):
            known = None  # so that the next call is checked
        bound = bound_of(op, cast, options, backend)
        if known is not None and all(a is b for a, b in zip(cast, tensors, strict=True)):
            remember(known, op, tensors, dims, bound_eps, bound)
        if recorded:
            return apply((bound_eps, bound, bound.training), *cast)
        return bound.inference(cast, bound_eps)
    # What torch.jit traces may be called with and without gradients.
    save = recorded or torch.jit.is_tracing()
    called = library.Called(op, cast, options, eps_of_norms, save, backend)
    if in_onnx_export():
        return called.present(called.formula())
    if is_transformed(cast):
        specs, device, x = (), None, cast[0]
        if not is_compiling():
            specs = specs_of(op, options, *kinds_of(op, cast, options[0]))
            device = device_of(x.device.type, x.get_device())
        select_reference(op.name, specs, device, backend, TRANSFORMED)
        return called.formula()
    if not op.quantized and has_sharded_rows(cast[0], dims):
        return of_sharded_rows(op, cast, options, dims, eps_of_norms, backend)
    arguments_of_op = op.in_order(cast, options, eps_of_norms, save, backend)
    return called.present(getattr(torch.ops.tilenorm, op.name)(*arguments_of_op))


def _refuse_quantized(op: Op, tensors: tuple) -> None:
    """Raise NotImplementedError where a quantised norm's results have no place."""
    if is_transformed(tensors):
        raise NotImplementedError(
            f"{op.name}: torch.func's transforms and forward-mode derivatives take no quantised"
            f" norm; quantise what tilenorm.{op.name.removesuffix('_quantized')} returns"
        )
    if torch.jit.is_tracing() and in_onnx_export():
        raise NotImplementedError(
            f"{op.name}: torch.onnx.export with dynamo=False knows no 8-bit floats: pass"
            " dynamo=True"
        )


def eps_of(op: Op, tensors: Sequence, eps: float | None) -> tuple[float, ...]:
    """The eps of each norm of an op. PyTorch takes None for the machine epsilon of the dtype that a
    norm computes in.
    """
    if eps is not None:
        return (float(eps),) * len(op.stages)
    by_name = op.named(tensors)
    statistics = {port.name: port.like.split() for port in op.makes if port.number}
    read = [statistics[stage.ports["rstd"]] for stage in op.stages]
    return tuple([arguments.default_eps(*[by_name[name] for name in names]) for names in read])


def _index_of(x: Tensor) -> int | None:
    return x.get_device() if x.is_cuda else None


def is_direct(tensors: tuple) -> bool:
    """Whether eager plain tensors are on the CPU or on the current CUDA device."""
    # A mode or a subclass sees a quantised norm as the op.
    if is_compiling() or has_torch_function(tensors):
        return False
    # A fake CUDA tensor is not plain, and there may be no device to ask for.
    x, plain = tensors[0], is_plain(*tensors)
    return plain and (x.is_cpu or (x.is_cuda and x.get_device() == torch_private.current_device()))


@lru_cache(MOST_CALLS, typed=True)
def remembered(op: str, *arguments) -> list[Known]:
    """What is remembered of calls with these arguments beside the tensors, the last first.

    Raises TypeError if one is a tensor, which would be kept, or has no hash.
    """
    if any(isinstance(a, Tensor) for a in arguments):
        raise TypeError(f"{op}: a tensor where none is taken")
    return []


def remember(known: list[Known], op: Op, tensors: tuple, dims: int, eps: Any, bound: Bound) -> None:
    """Remember what serves calls like this one, unless no guard can tell them.

    The guard holds the type, dispatch keys, dtype, device and requires_grad of each tensor, and as
    many of its trailing sizes as the call's normalized_shape or parameters have. Dispatch keys come
    and go with a thread's state: autocast, inference mode, torch.func. It holds no tensor.
    """
    if TensorGuards is None:
        return
    present = [(port, t) for port, t in zip(op.takes, tensors, strict=True) if t is not None]
    if any(t.requires_grad and not port.grad for port, t in present):
        return  # it is refused where gradients are recorded
    guarded, x, hidden = [t for _, t in present], tensors[0], bound.options[0]
    fixed = max(dims, *(t.dim() for port, t in present if port.parameter), 0)
    if any(port.dims in ("g n", "t? r") for port in op.takes):  # every size has to fit others
        fixed = max(t.dim() for t in guarded)
    sizes = [[*[None] * (t.dim() - fixed), *t.shape[-fixed:]] for t in guarded]
    check = _guard_of(guarded, sizes)
    if not check(*guarded):
        return
    recorded = any(t.requires_grad for port, t in present if port.grad)
    rows = [i for i, port in enumerate(op.takes) if port.dims == "... n"]
    places = tuple([i for i in rows[1:] if tensors[i] is not None])
    how = _index_of(x), MAX_ROWS * hidden, places, eps, recorded, bound
    known.insert(0, Known(check, *how))
    del known[MOST_GUARDS:]


def _guard_of(guarded: list[Tensor], sizes: list) -> Callable[..., bool]:
    """A function that compares other tensors with these. TensorGuards takes no tensor
    twice, so that the function gives it each tensor once.
    """
    numbers = [next(i for i, t in enumerate(guarded) if t is tensor) for tensor in guarded]
    once = sorted(set(numbers))
    tensors = [guarded[i] for i in once]
    fixed = [sizes[i] for i in once]
    free = [[None] * t.dim() for t in tensors]
    check = TensorGuards(*tensors, dynamic_dims_sizes=fixed, dynamic_dims_strides=free).check
    if len(once) == len(guarded):
        return check
    first = itemgetter(slice(1)) if len(once) == 1 else itemgetter(*once)

    def alike(*tensors: Tensor) -> bool:
        for tensor, number in zip(tensors, numbers, strict=True):
            if tensor is not tensors[number]:
                return False
        return check(*first(tensors))

    return alike
