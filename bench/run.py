"""A run checks every provider on every case, and then times it."""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench import check, host, timing
from bench.cases import OPS
from bench.command import Run, told
from bench.op import DTYPES, HOST, INFERENCE, Case, Op
from bench.providers import PROVIDERS
from bench.record import Cell, Copy, what
from bench.text import distinct, first_line

# The number of elements of a copy is rounded up to a multiple of this.
COPY_UNIT = 1 << 16
# Exceptions that Python code raises on purpose. All others are failures.
_REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)


class GpuLost(RuntimeError):
    """The GPU no longer works in this process."""


def run(
    cases: Sequence[Case],
    course: Run,
    directions: Sequence[str],
    before: Callable[[dict[Case, list[Cell]]], None] | None = None,
) -> None:
    """Measure the providers that are present for each op, and emit each result. ``before`` is first
    called with what is to be measured.

    The direction HOST is measured once for each op, and the other directions for each case. What
    the record has already is not measured again.

    On a GPU the run has a stream of its own. The autograd engine runs a backward on the stream of
    its forward, and a CUDA graph captures one stream, which must not be the default stream.
    """
    device, names, emit, late = course.device, course.present, course.emit, course.late
    known = {what(line) for line in course.record.lines}
    todo, hosts = {}, {}
    for case in cases:
        of = OPS[case.op]
        ways = [(way, of.bytes(way, case)) for way in directions if way in of.directions]
        asked = [
            Cell(**vars(case), direction=way, provider=name, bytes=nbytes)
            for name in names[case.op]
            for way, nbytes in ways
        ]
        todo[case] = [cell for cell in asked if what(cell) not in known]
    for op in dict.fromkeys(case.op for case in cases) if HOST in directions else ():
        lines = (host.line(OPS[op], name, "call") for name in names[op])
        hosts[op] = [line.provider for line in lines if what(line) not in known]
    total, count = sum(map(len, (*todo.values(), *hosts.values()))), itertools.count(1)

    def step(text: str) -> None:
        told(f"[{next(count)}/{total}] {text}")

    if before:
        before(todo)
    stream = torch.cuda.Stream(device) if device != "cpu" else None
    with torch.cuda.stream(stream):
        for case, cells in todo.items():
            if cells and not late():
                if (copy := what(Copy(case.dtype, case.m, case.n, 0))) not in known:
                    emit(copied(case, device))
                    known.add(copy)  # the same for all ops
                _run_case(case, cells, course, step)
        for op, missing in hosts.items():
            for found in host.times(OPS[op], missing, course, "call", step):
                emit(found)
                if found.error:
                    _require_gpu(device, f"{found.provider}: {found.error}")
    if (done := next(count) - 1) < total:
        print(f"out of time after {done} of {total}", file=sys.stderr)


def _run_case(case: Case, cells: Sequence[Cell], course: Run, step: Callable) -> None:
    op, device = OPS[case.op], course.device
    prepared = _prepare(op, case, distinct(cells, "direction"), device)
    loaded = {}
    for cell in cells:
        if course.late():
            return
        name, way = cell.provider, cell.direction
        step(f"{case.op} {case.dtype} {case.m} x {case.n} {way} {name}")
        try:
            if name not in loaded:
                loaded = {name: PROVIDERS[name].load(op)}
            found = _measure(loaded[name], op, prepared, cell, device)
        except Exception as error:  # the failure of a peer is a result
            # Liger refuses wide rows with a RuntimeError. CUDA and compilers raise subclasses.
            refused = isinstance(error, _REFUSALS) or type(error) is RuntimeError
            status = "refused" if refused else "failed"
            found = {"status": status, "error": first_line(error)}
        course.emit(replace(cell, **found))
        if found["error"]:
            _require_gpu(device, f"{name}: {found['error']}")


def _prepare(op: Op, case: Case, directions: Iterable[str], device: str):
    """Inputs, output gradients, and the expected results and allowed errors of each direction."""
    inputs, grads = op.made(case, device), op.output_grads(case, device)
    expected = check.oracle(op, case, inputs, grads)
    allowed = {}
    for direction in directions:
        eager = check.as_tuple(repeatable_call(op.eager, inputs, grads, direction)())
        pairs = zip(op.decoded(eager, inputs), expected[direction], strict=True)
        errors = [check.error(*pair) for pair in pairs]
        allowed[direction] = check.budgets(op, case, direction, errors)
    return inputs, grads, expected, allowed


def repeatable_call(provider, inputs, grads, direction) -> Callable:
    """A call that can be repeated. It works on its own copies of all tensors that it may write to.

    The inputs of a forward require gradients, so the forward saves what a backward needs.
    """
    leaves = [check.duplicate(x) for x in inputs]
    if direction == "forward":
        return lambda: provider(*leaves)
    if direction == INFERENCE:
        return torch.no_grad()(lambda: provider(*leaves))
    grads = [grad.clone() for grad in grads]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = check.as_tuple(provider(*leaves))
    if not all(output.requires_grad for output in outputs):
        raise NotImplementedError("has a forward only")
    return lambda: torch.autograd.grad(outputs, trained, grads, retain_graph=True)


def _measure(provider, op, prepared, cell, device) -> dict:
    (inputs, grads, expected, allowed), way = prepared, cell.direction
    call = repeatable_call(provider, inputs, grads, way)
    check.poison((*inputs, *grads))
    results = op.decoded(check.as_tuple(call()), inputs)
    if wrong := check.complaint(op, way, results, expected[way], allowed[way]):
        return {"status": "wrong", "error": wrong}
    make = partial(repeatable_call, provider, inputs, grads, way)
    return timing.measure(make, cell.bytes, device)


def copied(case: Case, device: str) -> Copy:
    dtype = DTYPES[case.dtype]
    # Rounded up, because a copy of 21845 x 3072 elements ran at two thirds of the speed of 64 Mi.
    count = -(-case.m * case.n // COPY_UNIT) * COPY_UNIT
    nbytes, source = 2 * count * dtype.itemsize, torch.randn(count, device=device).to(dtype)
    found = timing.measure(
        lambda: partial(torch.empty_like(source).copy_, source.clone()), nbytes, device
    )
    return Copy(case.dtype, case.m, case.n, nbytes, **found)


def _require_gpu(device: str, after: str) -> None:
    """Raise GpuLost if the GPU no longer works. ``after`` names the failure before."""
    if device == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLost(f"{first_line(error)}, after {after}") from error
