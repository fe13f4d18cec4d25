"""From a public function to an implementation: remembered? else check, select, run, remember."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from ..spec import PLAIN
from . import arguments, library, overrides, reference, torch_private
from .autograd import apply, needs_grad
from .direct import MOST_GUARDS, in_onnx_export, is_plain, is_transformed
from .plans import runner_of, spec_of_tensors
from .registry import MAX_ROWS, device_of, refuse_transformed, select_transformed
from .split import norm as split
from .split.norm import is_cut
from .tensors import Tensors
from .torch_private import TensorGuards, forward_mode, modes

MOST_CALLS = 1024
_autocast = torch.is_autocast_enabled  # for CUDA; given a device's name it takes twice as long


class Known(NamedTuple):
    """What serves calls whose tensors `check` takes. Leading sizes and strides may differ.

    index: the CUDA device's, or None. most: how many elements the input may have. rows: the places
    of the tensors that have the input's shape.
    laid_out: whether the tensors are contiguous matrices of rows, and vectors.
    recorded: whether one of the tensors requires a gradient. apply: records the call then.
    """

    check: Callable[..., bool]
    index: int | None
    most: int
    rows: tuple[int, ...]
    laid_out: bool
    eps: Any
    recorded: bool
    runner: Any
    apply: Callable


def normalize(
    op: str,
    tensors: Tensors,
    normalized_shape: Sequence[int],
    eps: float | None,
    asked: tuple,
    backend: str | None,
    miss: Callable | None = None,
) -> tuple:
    """What the public function `op` makes, by whatever serves the call: Results of a plain norm.

    tensors: as Tensors, and one more of a chain or a quantised norm. asked: what the caller gives
    beside them; of a plain norm the fields of Options that follow `hidden` and `norm`. miss: serves
    a call that is not remembered, takes what this function takes and the list to remember it in,
    and is asked too where an argument has __torch_function__; of a plain norm _checked.
    """
    known = None
    if not is_compiling():
        if has_torch_function(tensors):  # torch.compile calls it at the operations in the graph
            what = op, tensors, normalized_shape, eps, asked, backend
            return miss(*what, None) if miss else overrides.overridden(normalize, *what)
        given, absent = [], 1
        try:
            for tensor in tensors:  # a comprehension takes longer
                if tensor is None:
                    absent += absent
                else:
                    if tensor.is_nested:  # the guard of one that is not jagged ends the process
                        raise TypeError
                    given.append(tensor)
                    absent += absent + 1
            known = remembered(
                op, eps, backend, absent, type(normalized_shape), *asked, *normalized_shape
            )
        except (AttributeError, TypeError):  # nothing is remembered; the checks say what is wrong
            pass
        for check, index, most, rows, laid_out, wanted, recorded, runner, apply_ in known or ():
            if (
                check(*given)
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
                        return apply_((wanted, laid_out, runner, runner.training), *tensors)
                    return runner.inference(tensors, wanted, laid_out)
    if known is None and isinstance(tensors[1], (tuple, list)):
        tensors = arguments.spread(op, tensors)
        return normalize(op, tensors, normalized_shape, eps, asked, backend, miss)
    return (miss or _checked)(op, tensors, normalized_shape, eps, asked, backend, known)


def _checked(op, tensors, normalized_shape, eps, asked, backend, known) -> tuple:
    """The same after checks, and remembered where an implementation is called directly."""
    if overrides.has_nested(tensors):
        what = op, tensors, normalized_shape, eps, asked, backend
        return overrides.of_jagged(normalize, *what)
    eps = arguments.without_tensor(eps)
    options = arguments.check(op, tensors, normalized_shape, eps, asked, backend)
    cast = tensors
    if tensors[0].is_cuda and _autocast():
        cast = library.autocast_tensors(tensors, options.norm)
    eps = arguments.default_eps(*tensors[:2]) if eps is None else float(eps)
    x = cast[0]
    # What torch.jit traces may be called with and without gradients.
    recorded = needs_grad(*cast) or torch.jit.is_tracing()
    if is_direct(cast):
        runner = runner_of(cast, options, backend)
        if known is not None and all(a is b for a, b in zip(cast, tensors, strict=True)):
            remember(known, tensors, len(normalized_shape), eps, runner, apply)
        if recorded:  # and not traced, because then nothing is direct
            return apply((eps, False, runner, runner.training), *cast)
        return runner.inference(cast, eps)
    if in_onnx_export():
        return reference.formula(spec_of_tensors(cast, options), cast, eps)
    if is_transformed(cast):
        spec = spec_of_tensors(cast, options)
        if torch.compiler.is_compiling():
            refuse_transformed(op, backend)  # a graph has no place for a warning
        else:
            select_transformed(spec, device_of(x.device.type, x.get_device()), backend)
        return reference.formula(spec, cast, eps)
    if is_cut(x, len(normalized_shape)):
        return split.normalize(op, cast, split.How(options, len(normalized_shape), eps, backend))
    last = (*options, eps, recorded, backend)
    return torch.ops.tilenorm.norm(*cast[:PLAIN], *last, *cast[PLAIN:])


def is_direct(tensors: tuple) -> bool:
    """Whether eager plain tensors are on the CPU or on the current CUDA device."""
    if torch.compiler.is_compiling():
        return False
    # A fake CUDA tensor is not plain, and there may be no device to ask for.
    return is_plain(*tensors) and _is_here(tensors[0])


def _is_here(x: Tensor) -> bool:
    return x.is_cpu or (x.is_cuda and x.get_device() == torch_private.current_device())


def _index_of(x: Tensor) -> int | None:
    return x.get_device() if x.is_cuda else None


@lru_cache(MOST_CALLS, typed=True)
def remembered(op: str, *arguments) -> list[Known]:
    """What is remembered of calls with these arguments beside the tensors, the last first.

    Raises TypeError if one is a tensor, which would be kept, or has no hash.
    """
    if any(isinstance(a, Tensor) for a in arguments):
        raise TypeError(f"{op}: a tensor where none is taken")
    return []


def remember(
    known: list[Known],
    tensors: tuple,
    dims: int,
    eps: Any,
    runner: Any,
    apply: Callable,
    unrecorded: Tensor | None = None,
) -> None:
    """Remember what serves calls like this one, unless no guard can tell them.

    The guard holds the type, dispatch keys, dtype, device and requires_grad of each tensor, and as
    many of its trailing sizes as the call's normalized_shape or parameters have, and the strides
    where all are contiguous matrices and vectors. Dispatch keys come and go with a thread's state:
    autocast, inference mode, torch.func. It holds no tensor. unrecorded: a tensor that has no
    gradient whatever it requires.
    """
    if TensorGuards is None:
        return
    given = [t for t in tensors if t is not None]
    parameters = (*tensors[3:PLAIN], *tensors[PLAIN:][-1:])
    fixed = max(dims, *(0 if t is None else t.dim() for t in parameters))
    hidden = runner.spec.hidden
    matrices = fixed == 1 and all(t.stride() in ((hidden, 1), (1,)) for t in given)
    matrices = matrices and tensors[0].dim() == 2
    sizes = [[*[None] * (t.dim() - fixed), *t.shape[-fixed:]] for t in given]
    strides = [[*t.stride()] if matrices else [None] * t.dim() for t in given]
    check = _guard_of(given, sizes, strides)
    if not check(*given):
        return
    x, recorded = tensors[0], any(t.requires_grad for t in given if t is not unrecorded)
    places = [i for i in (1, 2, *range(PLAIN, len(tensors) - 1)) if tensors[i] is not None]
    how = _index_of(x), MAX_ROWS * hidden, tuple(places), matrices, eps, recorded, runner, apply
    known.insert(0, Known(check, *how))
    del known[MOST_GUARDS:]


def _guard_of(given: list[Tensor], sizes: list, strides: list) -> Callable[..., bool]:
    """A function that compares other tensors with the given ones. TensorGuards takes no tensor
    twice, so that the function gives it each tensor once.
    """
    numbers = [next(i for i, t in enumerate(given) if t is tensor) for tensor in given]
    once = sorted(set(numbers))
    each = [[of[i] for i in once] for of in (given, sizes, strides)]
    check = TensorGuards(*each[0], dynamic_dims_sizes=each[1], dynamic_dims_strides=each[2]).check
    if len(once) == len(given):
        return check
    first = itemgetter(slice(1)) if len(once) == 1 else itemgetter(*once)

    def alike(*tensors: Tensor) -> bool:
        for tensor, number in zip(tensors, numbers, strict=True):
            if tensor is not tensors[number]:
                return False
        return check(*first(tensors))

    return alike
