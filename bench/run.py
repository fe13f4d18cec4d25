"""A run checks every provider on every case, and then times it."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bench import check, host, timing
from bench.cases import DTYPES, HOST, OPS, Case, Op
from bench.providers import PROVIDERS
from bench.record import Cell, Copy, Host, first_line

# The number of elements of a copy is rounded up to a multiple of this.
COPY_UNIT = 1 << 16
# Exceptions that Python code raises on purpose. All others are failures.
_REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)


class GpuLost(RuntimeError):
    """The GPU no longer works in this process."""


class Progress:
    """Prints one line for each measurement to stderr, with the time so far."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def step(self, what: str) -> None:
        self.done += 1
        line = f"[{self.done}/{self.total}] {self.elapsed:4.0f} s  {what}"
        print(line, file=sys.stderr, flush=True)


def run(
    cases: Sequence[Case],
    names: Mapping[str, Sequence[str]],
    directions: Sequence[str],
    device: str,
    emit: Callable[[Cell | Copy | Host], None],
    max_seconds: float = math.inf,
    budget_s: float = 0.1,
) -> None:
    """Measure the providers that ``names`` gives for each op, and hand each result to ``emit``.

    The direction HOST is measured once for each op, and the other directions for each case.

    On a GPU the run has a stream of its own. The autograd engine runs a backward on the stream of
    its forward, and a CUDA graph captures one stream, which must not be the default stream.
    """
    ops = dict.fromkeys(case.op for case in cases)
    timed = {op: [n for n in names[op] if not PROVIDERS[n].host_only] for op in ops}
    ways = [direction for direction in directions if direction != HOST]
    host_ops = ops if HOST in directions else ()
    cells = sum(len(timed[case.op]) for case in cases) * len(ways)
    progress = Progress(cells + sum(len(names[op]) for op in host_ops))

    def late() -> bool:
        return progress.elapsed > max_seconds

    stream = torch.cuda.Stream(device) if device != "cpu" else None
    shapes = set()
    with torch.cuda.stream(stream):
        for op in map(OPS.get, host_ops):
            for found in host.times(op, names[op.name], device, "call", late, progress.step):
                emit(found)
                if found.error and found.error != host.LATE:
                    _require_gpu(device, f"{found.provider}: {found.error}")
        for case in cases:
            _run_case(case, timed[case.op], ways, device, emit, late, progress, budget_s, shapes)


def _run_case(case, names, directions, device, emit, late, progress, budget_s, shapes) -> None:
    op, dtype = OPS[case.op], DTYPES[case.dtype]
    prepared = None
    for name in names:
        provider = None
        for direction in directions:
            progress.step(f"{case.op} {case.dtype} {case.m} x {case.n} {direction} {name}")
            nbytes = op.bytes(direction, case.m, case.n, dtype.itemsize)
            cell = {**vars(case), "direction": direction, "provider": name, "bytes": nbytes}
            if late():
                emit(Cell(**cell, status="skipped", error="out of time"))
                continue
            if prepared is None:
                if (case.dtype, case.m, case.n) not in shapes:  # not yet copied for another op
                    emit(copied(case, dtype, device, budget_s))
                    shapes.add((case.dtype, case.m, case.n))
                prepared = _prepare(op, case, dtype, directions, device)
            try:
                provider = provider or PROVIDERS[name].load(op)
                found = _measure(provider, op, prepared, direction, nbytes, device, budget_s)
            except Exception as error:  # the failure of a peer is a result
                found = {"status": _status(error), "error": first_line(error)}
            emit(Cell(**cell, **found))
            if "error" in found:
                _require_gpu(device, f"{name}: {found['error']}")


def _prepare(op: Op, case: Case, dtype: torch.dtype, directions: Sequence[str], device: str):
    """Inputs, output gradients, and the expected results and allowed errors of each direction."""
    inputs = op.inputs(case.m, case.n, dtype, device)
    grads = op.output_grads(case.m, case.n, dtype, device)
    expected = check.oracle(op, inputs, grads)
    allowed = {}
    for direction in directions:
        sums = len(op.columns) if direction in ("backward", "training") else 0
        eager = check.as_tuple(repeatable_call(op.eager, inputs, grads, direction)())
        errors = [check.error(*pair) for pair in zip(eager, expected[direction], strict=True)]
        allowed[direction] = check.budgets(errors, dtype, len(inputs[0]), sums)
    return inputs, grads, expected, allowed


def repeatable_call(provider, inputs, grads, direction) -> Callable:
    """A call that can be repeated. It works on its own copies of all tensors that it may write to.

    The inputs of a forward require gradients, so the forward saves what a backward needs.
    """
    leaves = [_duplicate(x).requires_grad_() for x in inputs]
    if direction == "forward":
        return lambda: provider(*leaves)
    if direction == "inference":
        return torch.no_grad()(lambda: provider(*leaves))
    grads = [grad.clone() for grad in grads]
    if direction == "training":

        def step():
            outputs = check.as_tuple(provider(*leaves))
            return *(y.detach() for y in outputs), *_gradients(outputs, leaves, grads)

        return step
    outputs = provider(*leaves)
    return lambda: _gradients(outputs, leaves, grads, retain_graph=True)


def _duplicate(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides. clone() would remove the gaps between the rows."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _with_grad(outputs) -> tuple[torch.Tensor, ...]:
    outputs = check.as_tuple(outputs)
    if not all(output.requires_grad for output in outputs):
        raise NotImplementedError("has a forward only")
    return outputs


def _gradients(outputs, leaves, grads, **options) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(_with_grad(outputs), leaves, grads, **options)


def _measure(provider, op, prepared, direction, nbytes, device, budget_s) -> dict:
    inputs, grads, expected, allowed = prepared
    call = repeatable_call(provider, inputs, grads, direction)
    check.poison((*inputs, *grads))
    wrong = check.complaint(
        check.as_tuple(call()), expected[direction], allowed[direction], check.names(op, direction)
    )
    if wrong:
        return {"status": "wrong", "error": wrong}
    sets = timing.rotating_sets(nbytes, device)
    calls = [repeatable_call(provider, inputs, grads, direction) for _ in range(sets)]
    return _fields(timing.measure(calls, nbytes, device, budget_s))


def _fields(result: timing.Timing) -> dict:
    found = {"median_us": result.median_us, "spread": result.spread, "samples": result.samples}
    return {**found, "timing": result.kind, **({"error": result.note} if result.note else {})}


def copied(case: Case, dtype: torch.dtype, device: str, budget_s: float) -> Copy:
    # Rounded up, because a copy of 21845 x 3072 elements ran at two thirds of the speed of 64 Mi.
    count = -(-case.m * case.n // COPY_UNIT) * COPY_UNIT
    nbytes = 2 * count * dtype.itemsize
    source = torch.randn(count, device=device).to(dtype)

    def one() -> Callable:
        x, y = source.clone(), torch.empty_like(source)
        return lambda: y.copy_(x)

    calls = [one() for _ in range(timing.rotating_sets(nbytes, device))]
    found = timing.measure(calls, nbytes, device, budget_s)
    where = {"dtype": case.dtype, "m": case.m, "n": case.n, "bytes": nbytes}
    return Copy(**where, **{k: v for k, v in _fields(found).items() if k != "error"})


def _status(error: Exception) -> str:
    # Liger refuses wide rows with a RuntimeError. CUDA and the compilers raise subclasses of it.
    return "refused" if isinstance(error, _REFUSALS) or type(error) is RuntimeError else "failed"


def _require_gpu(device: str, after: str) -> None:
    """Raise GpuLost if the GPU no longer works. ``after`` names the failure before."""
    if device == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLost(f"{first_line(error)}, after {after}") from error
