"""The cuTile implementation: passes that allocate, and launch a plan.

`bind_forward` and `bind_backward` bind a plan. What they return finds the rest once for each shape
of the input, and keeps it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...launch.arrays import name_of_gradient, selecting
from ...launch.calls import ABSENT, Launch, Needs
from ...launch.driver import Repeated, in_parts, prepare, primary_context
from ...launch.kernel import launch
from ...launch.plan import BackwardPlan, ForwardPlan, chain_refused, plan_backward, plan_forward
from ...launch.target import Target
from ...launch.toolchain import CompileError
from ...spec import NormSpec
from ...table import GIVEN, SCALE
from ..pytorch import torch_private
from ..pytorch.torch_private import reinterpret
from . import native, ports
from .allocation import Layout, Layouts
from .base import Pass, Repeat, Served
from .quantize import with_codes
from .reading import copies_of, shaped_as, shown_as, strided

Run = Callable[[Sequence[Launch], tuple, int], None]


def on_device(launches: Sequence[Launch], arrays: tuple, index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(torch_private.current_stream(index), launches, arrays)


def forward(spec: NormSpec, target: Target, save: bool, run: Run | None = None) -> Callable | None:
    """As registry.Implementation.forward. None for a chain that one pass does not serve."""
    run = run or on_device
    if spec.inner and chain_refused(spec, target):
        return None
    plan = plan_forward(spec, target, save)
    if spec.quantized and not plan.spec.quantized:
        return bind_cast_apart(spec, plan, run)
    return bind_forward(plan, run)


def backward(spec: NormSpec, target: Target, needs: Needs, run: Run | None = None) -> Callable:
    """As registry.Implementation.backward."""
    return bind_backward(plan_backward(spec, target, needs), spec.kernel_reads, run or on_device)


class Kernels:
    """A pass by the kernels: a function of (tensors, eps) that allocates, and launches a plan.

    results: how many of the tensors that are made a caller gets; scratch comes behind them. input,
    like, grouped: the places of the tensors by which calls are told apart, see Pass.key.
    arrays_of: a function of the tensors as they are read, and of what is written, that returns the
    arrays of the plan's launches. parameters: the places of the gradients of parameters, and of the
    parameters among the tensors.
    """

    def __init__(
        self,
        plan: Any,
        layouts: Layouts,
        arrays_of: Callable,
        run: Run,
        results: int,
        parameters: Sequence[tuple[int, int]] = (),
    ):
        self._plan, self._layouts, self._arrays_of, self._run = plan, layouts, arrays_of, run
        self._results, self._parameters = results, parameters
        self.input, self.like, self.grouped = layouts.input, layouts.like, layouts.grouped

    def __call__(self, tensors: Sequence[Tensor | None], eps: float) -> tuple[Tensor | None, ...]:
        return self._launched(tensors, eps)[0]

    def prepared(self, tensors: Sequence[Tensor | None], eps: float) -> tuple[tuple, Any]:
        """The same, and a Repeat of these launches. In its place are the places of the tensors that
        had to be copied, if contiguous ones would not be, and None where nothing repeats the
        launches: see copies_of; and while a CUDA graph is captured.
        """
        results, layout, *launched = self._launched(tensors, eps)
        if not launched or self._run is not on_device:
            return results, None
        launches, arrays, read, index = launched
        copies = copies_of(tensors, read, self.grouped)
        if copies is None or copies:
            return results, copies
        count = len(read) + len(layout.made)
        numbered = self._arrays_of([*range(len(read))], [*range(len(read), count)])
        stream = torch_private.current_stream(index)
        again = prepare(index, stream, launches, arrays, numbered, count)
        native.state().want(index)
        apart = strided(tensors, self.grouped)
        how = layout, index, apart, self._results, len(read)
        return results, again and repeat_of(again, *how)

    def _launched(self, tensors: Sequence[Tensor | None], eps: float) -> tuple:
        x: Any = tensors[self.input]
        layout = self._layouts.of(tensors)
        tensors_made = [None if how is None else fresh(x, *how) for how in layout.made]
        for place in layout.cleared:
            tensors_made[place].zero_()
        launched: tuple = ()
        if layout.rows:
            written = [*tensors_made]
            for place, shape, strides in layout.written:
                written[place] = reinterpret(tensors_made[place], shape, strides)
            read = self._layouts.as_read(tensors, self._plan.spec, layout.reading)
            arrays = self._arrays_of(read, written)
            launches = self._plan.launches(layout.rows, eps, *layout.groups)
            self._run(launches, arrays, index := x.get_device())
            launched = launches, arrays, read, index
        for place, *how in layout.shown:
            tensors_made[place] = shown_as(tensors_made[place], *how)
        for place, of in self._parameters:
            if tensors_made[place].shape != tensors[of].shape:  # which is in no key
                tensors_made[place], launched = shaped_as(tensors_made[place], tensors[of]), ()
        return tuple(tensors_made[: self._results]), layout, *launched


def repeat_of(
    launch: Repeated,
    layout: Layout,
    index: int,
    apart: Sequence[int],
    results: int,
    reads: int,
) -> Any:
    """What repeats a call: a Repeat, or the extension's function of the tensors, which returns the
    results or None. In tests that function calls `launch`.

    apart: the places of the tensors whose strides are those of the call. results: how many of the
    tensors that are made it returns. reads: how many it reads.
    """
    extension = native.state().extension
    if extension is not None:
        fresh_tensors = [how and tuple(how) for how in layout.made]
        launches = getattr(launch, "launches", launch)
        places = list(apart), fresh_tensors, layout.cleared, layout.shown
        return extension.repeat(index, primary_context(index), reads, *places, results, launches)
    empty = torch_private.empty_strided_cuda if index >= 0 else _empty_strided_cpu
    how = layout.made, layout.cleared, layout.shown, frozenset(apart), index, results
    return Repeat(*how, empty, torch_private.current_stream, launch, *in_parts(launch))


def bind(plan: Any, run: Run = on_device) -> Kernels:
    """The function of (tensors, eps) of a plan of whole norms, see Pass."""
    if hasattr(plan, "needs"):
        return bind_backward(plan, plan.spec.kernel_reads, run)
    return bind_forward(plan, run)


def bind_forward(plan: ForwardPlan, run: Run = on_device) -> Kernels:
    """A forward pass. Results with rows are contiguous; mean and rstd are (rows,) float32 where the
    plan saves them. It raises NotImplementedError for more scales than the kernels can number.
    """
    results = ports.results(plan.spec, plan.save)
    return _bound(plan, ports.taken(plan.spec), results, {}, run)


def bind_cast_apart(spec: NormSpec, plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A forward pass of a quantised norm: the kernels of the norm, and PyTorch's operations for the
    cast. plan: of the norm.
    """

    def failed(error: CompileError) -> None:
        raise error

    op, plain = spec.row, plan.spec.row
    normalize = Pass(lambda: Served(bind_forward(plan, run), failed))

    def cast_apart(tensors: tuple, eps: float) -> tuple:
        by_role = op.by_role(tensors)
        # The norm takes tensors that a quantised norm has not: they are absent.
        taken = tuple([by_role.get(role) for role in plain.roles])
        results = dict(zip(plain.made, normalize(taken, eps), strict=True))
        results = with_codes(spec, results, by_role[GIVEN.role])
        return tuple([results[role] for role in op.made])

    return cast_apart


def bind_backward(
    plan: BackwardPlan, kernel_reads: tuple[str, ...], run: Run = on_device
) -> Kernels:
    """A backward pass. Gradients are contiguous, each in its own tensor's dtype and shape.

    kernel_reads: of NormSpec, the roles of the tensors that were saved. dsum is the gradient of the
    sum, or of the rotated key, which is read if the plan needs it.
    """
    read = ports.read(plan.spec, plan.needs, kernel_reads)
    gradients = ports.gradients(plan.spec, plan.needs)
    names = {port.role: name_of_gradient(port.role) for port in plan.spec.backward.makes}
    return _bound(plan, read, gradients, names, run)


def _bound(
    plan: Any, read: ports.Tensors, results: ports.Results, names: dict[str, str], run: Run
) -> Kernels:
    """The kernels of a plan. names: the arrays of the results whose names are not their roles."""
    layouts = Layouts(plan, read, results)
    end = len(read)
    read_places = {port.role: i for i, (port, dtype) in enumerate(read) if dtype}
    places = dict(read_places)
    if GIVEN.role in places:
        places[SCALE.role] = places[GIVEN.role]
    for place, result in enumerate(results, end):
        if result is not None:
            role = result[0].role
            places[names.get(role, role)] = place
    for place, (name, *_) in enumerate(layouts.scratch, end + len(results)):
        places[name] = place
    take = selecting(plan.arrays, places)

    def arrays_of(tensors: Sequence, written: Sequence) -> tuple:
        return take((*tensors, *written, ABSENT))

    parameters = [
        (place, read_places[result[0].role])
        for place, result in enumerate(results)
        if result is not None and result[0].dims == "+[h] n"
    ]
    return Kernels(plan, layouts, arrays_of, run, len(results), parameters)


def fresh(like: Tensor, shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the device of another, not filled."""
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    return empty(shape, strides, dtype)


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
