"""What Inductor's generated code calls: functions in which everything constant of a call is bound.

Generated code makes one function for each kind of call when it is loaded: of one op, of tensors
with the same dtypes, device and parameters, with the same options. The function finds what serves
when it is called first, because code is loaded before a device is used. Then a call checks that its
tensors are plain, and runs the implementation. Arguments that only the dispatcher can serve go to
the op.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..spec import PLAIN, Options
from .layout import contiguous_strides_of, rows_shape, vector_of
from .plans import Runner, runner_of
from .registry import MAX_ROWS, on_device_of
from .schemas import FIRST, TERMS, Backward
from .tensors import Branch
from .torch_private import reinterpret


def norm(*, eps: float, save: bool, backend: str | None, others: tuple, **options) -> Callable:
    """A function of Tensors that returns what the op norm returns, and None for what is absent.

    others: the names of the tensors behind the PLAIN ones, if the function takes them.
    """
    how = Options(**options)
    hidden, most = how.hidden, MAX_ROWS * how.hidden
    shapes = cache(lambda shape: _statistics(shape, hidden))
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
        if not save:
            return y, total, None, None
        if view := shapes(x.shape):
            rstd = reinterpret(rstd, *view)
            mean = None if mean is None else reinterpret(mean, *view)
        return y, total, mean, rstd

    return bound_norm


def _statistics(shape: torch.Size, hidden: int) -> tuple | None:
    """The shape and strides of mean and rstd, or None where they are vectors."""
    rows = rows_shape(shape, hidden)
    return None if len(rows) == 1 else (rows, contiguous_strides_of(rows))


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
    layer, most, terms = how.norm == "layer", MAX_ROWS * how.hidden, len(set(TERMS) & set(others))
    end = FIRST + terms
    runner: Runner | None = None

    def bound_backward(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        nonlocal runner
        dy, dsum, x, gate, weight, bias, mean, rstd = tensors[:FIRST]
        if runner is None:
            by_name = dict(zip(others, tensors[FIRST:], strict=True))
            last = (*how, eps, added, mask, backend)
            call = Backward.of((*tensors[:FIRST], *last), **by_name)
            runner = runner_of(call.tensors, how, backend)
        run, _, plain = runner.gradients(mask, dsum is not None, 1 + terms, output)
        if x.numel() > most or not plain.takes(tensors):
            by_name = dict(zip(others, tensors[FIRST:], strict=True))
            last = (*how, eps, added, mask, backend)
            of_op = torch.ops.tilenorm.norm_backward
            return of_op(*tensors[:FIRST], *last, output=output, **by_name)
        saved = x, gate, weight, bias, vector_of(mean) if layer else None, vector_of(rstd)
        branch = Branch(*tensors[end:]) if len(tensors) > end else None
        with on_device_of(dy):
            return (*run(dy, dsum, saved, eps, tensors[FIRST:end], branch), None)[:6]

    return bound_backward
