"""tilenorm.explain: which implementation serves a call, how it is launched, and why not others."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..launch.plan import Needs
from ..launch.precompile import backward_calls, forward_calls
from ..launch.signature import ArrayLike
from ..launch.target import Target
from ..spec import ITEM_BYTES, NormSpec
from . import arguments, library
from .registry import MIN_DRIVER, REGISTRY, Device, device_of, refusals, requested_backend

OPS = tuple(dict.fromkeys(op for implementation in REGISTRY for op in implementation.ops))


@dataclass(frozen=True)
class Step:
    """One kernel launch: its grid, the compiler's hints, and its compile-time constants by name."""

    kernel: str
    grid: tuple[int, ...]
    hints: dict[str, int]
    constants: dict[str, object]


@dataclass(frozen=True)
class Explanation:
    """chosen: the implementation that serves; None where the backend asked for does not.
    refused: the others preferred to it, with reasons.

    forward, backward: the launches, empty for the reference. Bytes: what the mathematics moves,
    each input read once and each output written once.
    """

    op: str
    spec: NormSpec
    rows: int
    device: Device
    chosen: str | None
    refused: dict[str, str]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_bytes: int
    backward_bytes: int

    def __str__(self) -> str:
        spec, arch = self.spec, self.device.target.arch if self.device.target else self.device.kind
        lines = [
            f"{self.op} of {self.rows} rows of {spec.hidden} {spec.dtype} on {arch}"
            f" (weight {spec.weight}, bias {spec.bias}, offset {spec.offset:g})",
            f"  served by {self.chosen or 'nothing: the call raises'}",
        ]
        lines += [f"  refused by {name}: {reason}" for name, reason in self.refused.items()]
        for name, steps, moved in (
            ("forward", self.forward, self.forward_bytes),
            ("backward", self.backward, self.backward_bytes),
        ):
            lines.append(f"  {name}: {moved:,} bytes")
            for step in steps:
                hints = " ".join(f"{k}={v}" for k, v in step.hints.items()) or "none"
                constants = " ".join(f"{k}={v}" for k, v in step.constants.items())
                lines.append(f"    {step.kernel} grid {step.grid} hints {hints}")
                lines.append(f"      {constants}")
        return "\n".join(lines)


def explain(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    backend: str | None = None,
) -> Explanation:
    """Print, and return, how `op` would serve this call. Launches nothing.

    Args: op is "rms_norm", the rest is what it takes.
    Raises: ValueError for an unknown op; what the op itself raises for bad input.
    """
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, takes one of {', '.join(OPS)}")
    hidden = arguments.check(op, input, normalized_shape, weight, bias, eps, offset, backend)
    spec = library.spec_of(input, weight, bias, hidden, float(offset))
    rows = input.numel() // hidden if hidden else 0
    device = device_of(input.device.type, input.device.index)
    found = explain_spec(op, spec, rows, device, backend)
    print(found)
    return found


def explain_spec(
    op: str, spec: NormSpec, rows: int, device: Device, backend: str | None = None
) -> Explanation:
    """The same for a spec, which may be for a GPU that is not here."""
    backend = backend or requested_backend()
    found = refusals(op, spec, rows, device)
    serving = [name for name, reason in found.items() if reason is None]
    chosen = serving[0] if backend is None else backend if backend in serving else None
    refused = {name: reason for name, reason in found.items() if reason is not None}
    if chosen is None:
        refused[backend] = f"asked for, but {found.get(backend, 'there is no such backend')}"
    elif chosen != serving[0]:
        refused[serving[0]] = f"backend {chosen!r} was asked for"
    forward = backward = ()
    if chosen == "cutile" and rows:
        needs = Needs(True, spec.weight is not None, spec.bias is not None)
        forward = _steps(forward_calls(spec, device.target, rows, True))
        backward = _steps(backward_calls(spec, device.target, rows, needs))
    matrix = rows * spec.hidden * spec.item_bytes
    parameters = sum(spec.hidden * ITEM_BYTES[dtype] for dtype in (spec.weight, spec.bias) if dtype)
    weight = spec.hidden * ITEM_BYTES[spec.weight] if spec.weight else 0
    return Explanation(
        op,
        spec,
        rows,
        device,
        chosen,
        refused,
        forward,
        backward,
        2 * matrix + parameters,
        3 * matrix + parameters + weight,
    )


def planned_device(arch: str) -> Device:
    """A device of an architecture that need not be here, with a driver that serves."""
    return Device("cuda", Target.of(arch), MIN_DRIVER)


def _steps(calls) -> tuple[Step, ...]:
    steps = []
    for kernel, grid, values in calls:
        annotated = kernel._annotated_function
        names = list(annotated.pysig.parameters)
        pairs = zip(names, values, strict=True)
        constants = {k: v for k, v in pairs if k.isupper() and not isinstance(v, ArrayLike)}
        options = kernel._compiler_options
        hints = {k: getattr(options, k) for k in ("occupancy", "num_worker_warps")}
        given = {k: v for k, v in hints.items() if v is not None}
        steps.append(Step(annotated.pyfunc.__name__, grid, given, constants))
    return tuple(steps)
