"""What Inductor's generated code calls: functions in which everything constant of a call is bound.

Generated code makes one function for each kind of call when it is loaded: of one op, of tensors
with the same dtypes, device and parameters, with the same options. The function finds what serves
when it is called first, because code is loaded before a device is used. Then a call checks that its
tensors are plain, and runs the implementation. Arguments that only the dispatcher can serve go to
the op.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..spec import PLAIN, Options, Quantization
from .chained.library import ChainRunner, chain_runner_of
from .direct import Plain
from .layout import contiguous_strides_of, rows_shape, vector_of
from .plans import Runner, runner_of
from .registry import MAX_ROWS, on_device_of
from .schemas import FIRST, TERMS, Backward
from .tensors import Branch, trimmed
from .torch_private import reinterpret

MOST_SHAPES = 256  # of inputs, for which a function keeps the shape of the statistics


def norm(*, eps: float, save: bool, backend: str | None, others: tuple, **options) -> Callable:
    """A function of Tensors that returns what the op norm returns, and None for what is absent.

    others: the names of the tensors behind the PLAIN ones, if the function takes them.
    """
    how = Options(**options)
    hidden, most = how.hidden, MAX_ROWS * how.hidden
    by_rows = _by_rows_of(hidden)
    runner: Runner | None = None

    def bound_norm(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        nonlocal runner
        x = tensors[0]
        runner = runner or runner_of(tensors, how, backend)
        if x.numel() > most or not runner.plain.takes(tensors):
            more = tensors[PLAIN:]
            return torch.ops.tilenorm.norm(*tensors[:PLAIN], *how, eps, save, backend, *more)
        with on_device_of(x):
            y, total, mean, rstd = (runner.training if save else runner.inference)(tensors, eps)
        return (y, total, *by_rows(x.shape, mean, rstd)) if save else (y, total, None, None)

    return bound_norm


def _by_rows_of(hidden: int) -> Callable:
    """A function of an input's shape and statistics (rows,) that gives them the shape of rows."""

    @lru_cache(MOST_SHAPES)
    def view_of(shape: torch.Size) -> tuple | None:
        rows = rows_shape(shape, hidden)
        return None if len(rows) == 1 else (rows, contiguous_strides_of(rows))

    def by_rows(shape: torch.Size, *statistics: Tensor | None) -> Sequence[Tensor | None]:
        view = view_of(shape)
        if view is None:
            return statistics
        return [t if t is None else reinterpret(t, *view) for t in statistics]

    return by_rows


def norm_quantized(
    *,
    hidden: int,
    norm: str,
    offset: float,
    rounding: str,
    eps: float,
    dtype: torch.dtype,
    save: bool,
    backend: str | None,
    others: tuple,
    **asked,
) -> Callable:
    """A function of the op norm_quantized's tensors that returns what the op returns, and None for
    what is absent. asked: the fields of Quantization between the dtype and the end.
    """
    options = Options(hidden, norm, offset, False, rounding)
    scaling, *rest = asked.values()
    how = Quantization(scaling, str(dtype).removeprefix("torch."), *rest)
    most, by_rows = MAX_ROWS * hidden, _by_rows_of(hidden)
    runner: Runner | None = None

    def bound_quantized(x, residual, weight, bias, addend, given) -> tuple[Tensor | None, ...]:
        nonlocal runner
        tensors = trimmed((x, residual, None, weight, bias, addend, None, None, None))
        runner = runner or runner_of(tensors, options, backend, how)
        if x.numel() > most or not runner.plain.takes((*tensors, given)):
            taken = x, residual, weight, bias, addend, given, hidden, norm, offset, rounding, eps
            op = torch.ops.tilenorm.norm_quantized
            return op(*taken, scaling, dtype, *rest, save, backend)
        with on_device_of(x):
            run = runner.training if save else runner.inference
            *found, mean, rstd = run((*tensors, given), eps)
        return (*found, *by_rows(x.shape, mean, rstd)) if save else (*found, None, None)

    return bound_quantized


def norm_add_norm(
    *,
    hidden: int,
    offset: float,
    rounding: str,
    eps: float,
    next_eps: float,
    save: bool,
    backend: str | None,
    others: tuple,
) -> Callable:
    """A function of the op norm_add_norm's tensors that returns what the op returns, and None for
    what is absent.
    """
    options, by_rows = Options(hidden, "rms", offset, False, rounding), _by_rows_of(hidden)
    most = MAX_ROWS * hidden
    runner: ChainRunner | None = None
    plain = Plain()

    def bound_chain(x, residual, weight, next_weight) -> tuple[Tensor | None, ...]:
        nonlocal runner
        tensors = x, residual, weight, next_weight
        runner = runner or chain_runner_of(tensors, options, backend)
        if x.numel() > most or not plain.takes(tensors):
            how = hidden, offset, rounding, eps, next_eps, save, backend
            return torch.ops.tilenorm.norm_add_norm(*tensors, *how)
        with on_device_of(x):
            run = runner.training if save else runner.inference
            y, total, *rstds = run((x, residual, None, weight, None, next_weight), (eps, next_eps))
        return (y, total, *by_rows(x.shape, *rstds)) if save else (y, total, None, None)

    return bound_chain


def norm_backward(
    *,
    eps: float,
    added: bool,
    output_mask: list,
    backend: str | None,
    output: bool,
    others: tuple,
    **options,
) -> Callable:
    """A function of the op norm_backward's first tensors, up to rstd, and of the further ones that
    `others` names. It returns what the op returns, and None for what is absent.
    """
    how, mask = Options(**options), tuple(output_mask)
    last = (*how, eps, added, mask, backend)
    layer, most, terms = how.norm == "layer", MAX_ROWS * how.hidden, len(set(TERMS) & set(others))
    end = FIRST + terms
    runner: Runner | None = None

    def bound_backward(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        nonlocal runner
        dy, dsum, x, gate, weight, bias, mean, rstd = tensors[:FIRST]
        if runner is None:
            by_name = dict(zip(others, tensors[FIRST:], strict=True))
            call = Backward.of((*tensors[:FIRST], *last), **by_name)
            runner = runner_of(call.tensors, how, backend)
        run, _, plain = runner.gradients(mask, dsum is not None, 1 + terms, output)
        if x.numel() > most or not plain.takes(tensors):
            by_name = dict(zip(others, tensors[FIRST:], strict=True))
            of_op = torch.ops.tilenorm.norm_backward
            return of_op(*tensors[:FIRST], *last, output=output, **by_name)
        saved = x, gate, weight, bias, vector_of(mean) if layer else None, vector_of(rstd)
        branch = Branch(*tensors[end:]) if len(tensors) > end else None
        with on_device_of(dy):
            return (*run(dy, dsum, saved, eps, tensors[FIRST:end], branch), None)[:6]

    return bound_backward
