"""Which implementation serves what: assembled here, in order of preference, and nowhere else."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...launch.calls import Needs
from ...launch.target import MACHINES, MULTIPROCESSORS, Target
from ...launch.toolchain import (
    CompileError,
    ToolchainError,
    compiler_problem,
    cuda_tile_missing,
    driver_version,
)
from ...launch.tuned.rules import MODULATED_ROW
from ...settings import settings
from ...spec import TENSORS, NormSpec
from ..pytorch import torch_private
from . import reference

MAX_HIDDEN = 262144
ROPE_HEAD, ROPE_TOKEN = 512, 8192  # where heads are rotated, the elements of a head and of a token
MAX_ROWS = 2**30  # row numbers are 32-bit, and the last tile of rows may reach past the end
MIN_DRIVER = 13000  # the CUDA version of driver r580, the first to load cuTile's sm_80-90 code
DTYPES = ("float16", "bfloat16", "float32")
_HERE = nullcontext()
TRANSFORMED = "torch.func and forward-mode derivatives see through the reference alone"


class ReferenceWarning(UserWarning):
    """tilenorm runs its reference implementation, and why."""


@dataclass(frozen=True)
class Device:
    """What selection needs to know of a device. driver: its CUDA version, 13000 for 13.0."""

    kind: str
    target: Target | None = None
    driver: int | None = None


@dataclass(frozen=True)
class Implementation:
    """Something that can serve calls. Its functions are asked once for a spec and a device.

    refuses(spec, rows, device) says why it cannot serve, or None where it can.
    forward(spec, device, save) returns a function of (tensors, eps) that serves a forward pass, and
    backward(spec, device, needs) one that serves a backward pass: see passes.Pass. mean and rstd
    are (rows,). For an op of several norms that it does not serve in one pass, forward returns
    None.
    The functions that are returned may raise CompileError. The implementation is then not used
    for that spec and device again.
    """

    name: str
    refuses: Callable[[NormSpec, int, Device], str | None]
    forward: Callable[[NormSpec, Device, bool], Callable | None]
    backward: Callable[[NormSpec, Device, Needs], Callable]


def cutile_refuses(spec: NormSpec, rows: int, device: Device) -> str | None:
    if missing := cuda_tile_missing():
        return missing
    if device.kind != "cuda":
        return f"the input is on {device.kind}; cuTile runs on NVIDIA GPUs"
    if device.target.arch not in MULTIPROCESSORS:
        return f"{device.target.arch}: cuTile compiles for {', '.join(MULTIPROCESSORS)}"
    if device.driver < MIN_DRIVER:
        return f"the driver serves CUDA {device.driver // 1000}; cuTile takes CUDA 13 (r580) or up"
    if reason := spec_refused(spec):
        return reason
    if rows > MAX_ROWS:
        return f"the input has {rows} rows; the kernels take up to {MAX_ROWS}"
    return compiler_problem()


def spec_refused(spec: NormSpec) -> str | None:
    """Why the kernels do not take a spec on any device, or None."""
    dtypes = (*zip(TENSORS, spec.dtypes, strict=True), ("out_dtype", spec.out_dtype))
    for name, dtype in dtypes:
        if dtype is not None and dtype not in DTYPES and dtype != "bool":
            argument = "input" if name == "dtype" else name.removeprefix("mod_")
            return f"{argument} is {dtype}; the kernels take {', '.join(DTYPES)}"
    how, longest = spec.rotation, max(spec.hidden, spec.key_hidden)
    if how and how.table not in DTYPES:
        return f"cos is {how.table}; the kernels take {', '.join(DTYPES)}"
    if how and how.head > ROPE_HEAD:
        return f"heads are rotated; the kernels take up to {ROPE_HEAD} elements of those"
    if spec.by_token and longest > ROPE_TOKEN:
        most = f"{ROPE_TOKEN} of rotated ones"
        return f"tokens hold {longest} elements; the kernels take up to {most}"
    if spec.modulated and spec.heads:
        return "a modulated norm has a weight by heads"
    if spec.modulated and spec.hidden > MODULATED_ROW:
        return f"rows are modulated; the kernels take up to {MODULATED_ROW} elements of those"
    if not 1 <= spec.hidden <= MAX_HIDDEN:
        return f"normalized_shape holds {spec.hidden} elements; the kernels take 1 to {MAX_HIDDEN}"
    return None


def cutile_implementation(run: Callable | None = None) -> Implementation:
    """The kernels. run: launches them in the place of cutile.on_device; the tests interpret them.

    What imports cuda.tile is imported when the kernels first serve. Where cuda.tile is missing,
    cutile_refuses has said so before.
    """

    def forward(spec: NormSpec, device: Device, save: bool) -> Callable | None:
        from . import cutile

        return cutile.forward(spec, device.target, save, run)

    def backward(spec: NormSpec, device: Device, needs: Needs) -> Callable:
        from . import cutile

        return cutile.backward(spec, device.target, needs, run)

    return Implementation("cutile", cutile_refuses, forward, backward)


# In order of preference. The last one refuses nothing.
REGISTRY = (
    cutile_implementation(),
    Implementation(
        "reference",
        lambda spec, rows, device: None,
        lambda spec, device, save: reference.bind_forward(spec),
        lambda spec, device, needs: reference.bind_backward(spec, needs),
    ),
)


@cache
def failures() -> dict[tuple[str, NormSpec | None, Device], str]:
    """Why implementations could not serve what they did not refuse, as calls have found out.

    An entry whose spec is None holds for every spec.
    """
    return {}


def record_failure(name: str, spec: NormSpec, device: Device, error: CompileError) -> None:
    """Have an implementation refuse a spec from now on; without a compiler that works, any spec."""
    if isinstance(error, ToolchainError):
        failures()[name, None, device] = str(error)
    else:
        reason = f"{error} (for {spec.op} of {spec.hidden} {spec.dtype})"
        failures()[name, spec, device] = reason


def failure(name: str, spec: NormSpec, device: Device) -> str | None:
    """Why an implementation could not serve a spec, or None."""
    known = failures()
    return known.get((name, None, device)) or known.get((name, spec, device))


def refusals(spec: NormSpec, rows: int, device: Device) -> dict[str, str | None]:
    """Every implementation's name in order of preference, with why it does not serve, or None."""
    return {
        i.name: i.refuses(spec, rows, device) or failure(i.name, spec, device) for i in REGISTRY
    }


def select(spec: NormSpec, rows: int, device: Device, backend: str | None) -> Implementation:
    """The implementation that serves, with a warning, once, where it is not the preferred one.

    Raises ValueError for an unknown backend, RuntimeError when the one asked for refuses.
    """
    if backend is None and (backend := requested_backend()) is not None:
        check_backend(spec.op, backend, "TILENORM_BACKEND")
    elif backend is not None:
        check_backend(spec.op, backend)
    known = {i.name: i for i in REGISTRY}
    reasons = refusals(spec, rows, device)
    if backend is not None:
        if reason := reasons[backend]:
            raise RuntimeError(f"{spec.op}: backend {backend!r} was asked for, but {reason}")
        return known[backend]
    chosen = next(name for name, reason in reasons.items() if reason is None)
    for name, reason in reasons.items():
        if name == chosen:
            break
        message, thread = f"tilenorm: {chosen} runs instead of {name}: {reason}", object()
        if _told().setdefault(message, thread) is thread:
            warnings.warn(message, ReferenceWarning, stacklevel=2)
    return known[chosen]


@cache
def _told() -> dict[str, object]:
    """The warnings so far: each is given once, also to threads that meet a spec at once."""
    return {}


def check_backend(op: str, backend: str, name: str = "argument 'backend'") -> None:
    """Raise ValueError unless there is an implementation of that name.

    name: of what asks for it, the argument or a variable.
    """
    names = [implementation.name for implementation in REGISTRY]
    if backend not in names:
        takes = " or ".join(map(repr, names))
        raise ValueError(f"{op}: {name} takes {takes} or None, got {backend!r}")


def select_reference(
    op: str, specs: Sequence[NormSpec], device: Device | None, backend: str | None, why: str
) -> None:
    """Check that the reference may serve an op that no other implementation can serve.

    specs: of the op's norms; none in a graph, which has no place for a warning. why: the reason.
    Raises and warns as select does.
    """
    preferred = [select(spec, 0, device, backend).name for spec in specs]
    backend = backend or requested_backend()
    if backend not in (None, "reference"):
        raise RuntimeError(f"{op}: backend {backend!r} was asked for, but {why}")
    for name in preferred:
        if name != "reference":
            message = f"tilenorm: reference runs instead of {name}: {why}"
            warnings.warn(message, ReferenceWarning, stacklevel=2)


def requested_backend() -> str | None:
    """TILENORM_BACKEND, an implementation's name. It is read when an op first meets a spec."""
    return settings().backend


@cache
def device_of(kind: str, index: int | None) -> Device:
    """Describes a torch device; of a CUDA device, its architecture and driver."""
    if kind != "cuda":
        return Device(kind)
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    machine = MACHINES.get(properties.name, "")
    target = Target(arch, properties.multi_processor_count, machine)
    return Device(kind, target, driver_version())


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which x's CUDA device is current. It does nothing where that device is current
    already, or where x is not on a CUDA device.
    """
    index = x.get_device()
    here = index < 0 or index == torch_private.current_device()
    return _HERE if here else torch.cuda.device(index)
