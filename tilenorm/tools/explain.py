"""tilenorm.explain: which implementation serves a call, why others do not, and its launches."""

import inspect
from dataclasses import dataclass

from ..launch import heuristics
from ..launch.calls import constants_of, every_gradient
from ..launch.plan import plan_backward, plan_forward
from ..launch.target import Target
from ..ops import arguments, functional
from ..ops.plans import spec_of_tensors
from ..ops.registry import MIN_DRIVER, Device, device_of, refusals, requested_backend
from ..ops.tensors import Tensors
from ..spec import ITEM_BYTES, OPS, NormSpec, Options
from .precompile import calls_of


@dataclass(frozen=True)
class Step:
    """One kernel launch: its grid, the compiler's hints, and its compile-time constants by name."""

    kernel: str
    grid: tuple[int, ...]
    hints: dict[str, int]
    constants: dict[str, object]


@dataclass(frozen=True)
class Explanation:
    """How a call is served.

    chosen: the implementation that serves, or None if the requested backend cannot serve.
    refused: the implementations that were not chosen although they come first, with the reasons.
    forward, backward: the launches; empty for the reference. forward_source, backward_source: the
    table or rule of the configuration, or None. forward_bytes, backward_bytes: bytes that the
    mathematics moves, with each input read once and each output written once.
    """

    spec: NormSpec
    rows: int
    device: Device
    chosen: str | None
    refused: dict[str, str]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_source: str | None
    backward_source: str | None
    forward_bytes: int
    backward_bytes: int

    def __str__(self) -> str:
        spec, arch = self.spec, self.device.target.arch if self.device.target else self.device.kind
        lines = [
            f"{spec.op} of {self.rows} rows of {spec.hidden} {spec.dtype} on {arch}"
            f" ({options_of(spec)})",
            f"  served by {self.chosen or 'nothing: the call raises'}",
        ]
        lines += [f"  refused by {name}: {reason}" for name, reason in self.refused.items()]
        for name, steps, source, moved in (
            ("forward", self.forward, self.forward_source, self.forward_bytes),
            ("backward", self.backward, self.backward_source, self.backward_bytes),
        ):
            chosen = f", configuration: {source}" if source else ""
            lines.append(f"  {name}: {moved:,} bytes{chosen}")
            for step in steps:
                hints = " ".join(f"{k}={v}" for k, v in step.hints.items()) or "none"
                constants = " ".join(f"{k}={v}" for k, v in step.constants.items())
                lines.append(f"    {step.kernel} grid {step.grid} hints {hints}")
                lines.append(f"      {constants}")
        return "\n".join(lines)


def explain(op: str, *args, **kwargs) -> Explanation:
    """Print, and return, how `op` would serve a call with these arguments. Launches nothing.

    Args: op is the name of a function, such as "rms_norm". The other arguments are those of the
    function.
    Raises: ValueError for an unknown op, and whatever the op raises for bad input.
    """
    if op not in OPS:
        raise ValueError(f"explain: argument 'op' takes one of {', '.join(OPS)}, got {op!r}")
    bound = inspect.signature(getattr(functional, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    before = given.pop("norm_before_gate", True)
    given["gate_first"] = not before if type(before) is bool else before
    tensors = Tensors(*(given.get(name) for name in Tensors._fields))
    values = tuple(given.get(n, Options._field_defaults[n]) for n in Options._fields[2:])
    shape, eps, backend = given["normalized_shape"], given["eps"], given["backend"]
    options = arguments.check(op, tensors, shape, eps, values, backend)
    spec, input = spec_of_tensors(tensors, options), tensors.input
    rows = input.numel() // spec.hidden if spec.hidden else 0
    device = device_of(input.device.type, input.device.index)
    explanation = explain_spec(spec, rows, device, backend)
    print(explanation)
    return explanation


def explain_spec(
    spec: NormSpec, rows: int, device: Device, backend: str | None = None
) -> Explanation:
    """Explain how a spec would be served on a device, which need not be in this machine."""
    backend = backend or requested_backend()
    reasons = refusals(spec, rows, device)
    serving = [name for name, reason in reasons.items() if reason is None]
    chosen = serving[0] if backend is None else backend if backend in serving else None
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if chosen is None:
        refused[backend] = f"asked for, but {reasons.get(backend, 'there is no such backend')}"
    elif chosen != serving[0]:
        refused[serving[0]] = f"backend {chosen!r} was asked for"
    forward, backward, sources = (), (), (None, None)
    if chosen == "cutile" and rows:
        needs = every_gradient(spec)
        forward = _steps(calls_of(plan_forward(spec, device.target, True), rows))
        backward = _steps(calls_of(plan_backward(spec, device.target, needs), rows))
        sources = tuple(heuristics.source(spec, device.target, n) for n in (None, needs))
    return Explanation(
        spec,
        rows,
        device,
        chosen,
        refused,
        forward,
        backward,
        *sources,
        *moved_bytes(spec, rows),
    )


def moved_bytes(spec: NormSpec, rows: int) -> tuple[int, int]:
    """Bytes that the mathematics moves, (forward, backward): each input and output once."""
    x, residual, gate, weight, bias = (
        ITEM_BYTES[dtype] if dtype else 0
        for dtype in (spec.dtype, spec.residual, spec.gate, spec.weight, spec.bias)
    )
    # Terms: x and y; residual and sum; gate.
    forward = 2 * x + 2 * residual + gate
    # Terms: dy and dx; the saved x, or the saved sum with its gradient (and the residual's gradient
    # if the residual has another dtype); the gate and its gradient.
    own_dtype = spec.residual not in (None, spec.dtype)
    saved = (2 + own_dtype) * residual if residual else x
    backward = 2 * x + saved + 2 * gate
    matrix, vector = rows * spec.hidden, spec.hidden * (spec.heads or 1)
    kept = weight + (bias if spec.gate and not spec.gate_first else 0)
    return (
        matrix * forward + vector * (weight + bias),
        matrix * backward + vector * (kept + weight + bias),
    )


def options_of(spec: NormSpec) -> str:
    """The fields of a spec besides op, size and dtype, as text."""
    parts = [f"weight {spec.weight}", f"bias {spec.bias}", f"offset {spec.offset:g}"]
    if spec.heads:
        parts.append(f"{spec.heads} heads")
    if spec.residual:
        parts.append(f"residual {spec.residual}")
    if spec.gate:
        place = "before" if spec.gate_first else "after"
        parts.append(f"gate {spec.gate} {place} the norm, activation {spec.activation}")
    if spec.rounding != "late":
        parts.append(f"rounding {spec.rounding}")
    return ", ".join(parts)


def planned_device(arch: str) -> Device:
    """A device of an architecture, with a sufficient driver. It need not be in this machine."""
    return Device("cuda", Target.of(arch), MIN_DRIVER)


def _steps(calls) -> tuple[Step, ...]:
    steps = []
    for kernel, grid, values, _ in calls:
        options = kernel._compiler_options
        hints = {k: getattr(options, k) for k in ("occupancy", "num_worker_warps")}
        given = {k: v for k, v in hints.items() if v is not None}
        steps.append(Step(kernel._pyfunc.__name__, grid, given, constants_of(kernel, values)))
    return tuple(steps)
