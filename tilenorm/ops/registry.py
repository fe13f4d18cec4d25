"""Which implementation serves what: assembled here, in order of preference, and nowhere else."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ..launch.target import MULTIPROCESSORS, Target
from ..launch.toolchain import compiler_path, driver_version
from ..settings import settings
from ..spec import OPS, NormSpec

MAX_HIDDEN = 262144
MAX_ROWS = 2**30  # row numbers are 32-bit, and the last tile of rows may reach past the end
MIN_DRIVER = 13000  # the CUDA version of driver r580, the first to load cuTile's sm_80-90 code
DTYPES = ("float16", "bfloat16", "float32")
BACKENDS = ("cutile", "reference")
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
    """refuses(spec, rows, device) says why this one cannot serve, or None."""

    name: str
    ops: tuple[str, ...]
    refuses: Callable[[NormSpec, int, Device], str | None]


def cutile_refuses(spec: NormSpec, rows: int, device: Device) -> str | None:
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
    return _compiler_missing()


def spec_refused(spec: NormSpec) -> str | None:
    """Why the kernels do not take a spec on any device, or None."""
    for name in ("dtype", "residual", "gate", "weight", "bias"):
        dtype = getattr(spec, name)
        if dtype is not None and dtype not in DTYPES:
            argument = "input" if name == "dtype" else name
            return f"{argument} is {dtype}; the kernels take {', '.join(DTYPES)}"
    if not 1 <= spec.hidden <= MAX_HIDDEN:
        return f"normalized_shape holds {spec.hidden} elements; the kernels take 1 to {MAX_HIDDEN}"
    return None


def serves_all(spec: NormSpec, rows: int, device: Device) -> None:
    """The reference refuses nothing."""


REGISTRY = (
    Implementation("cutile", OPS, cutile_refuses),
    Implementation("reference", OPS, serves_all),
)


def refusals(spec: NormSpec, rows: int, device: Device) -> dict[str, str | None]:
    """Every implementation of a spec's op in order of preference, with why it refuses, or None."""
    return {i.name: i.refuses(spec, rows, device) for i in REGISTRY if spec.op in i.ops}


def select(spec: NormSpec, rows: int, device: Device, backend: str | None) -> str:
    """The name of the implementation that serves; a warning, once, where it is not the first.

    Raises ValueError for an unknown backend, RuntimeError when the one asked for refuses.
    """
    return _select(spec, rows > MAX_ROWS, device, backend)


@cache
def _select(spec: NormSpec, too_long: bool, device: Device, backend: str | None) -> str:
    backend = backend or requested_backend()
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, takes one of {', '.join(BACKENDS)} or None")
    found = refusals(spec, MAX_ROWS + 1 if too_long else 0, device)
    if backend is not None:
        if found[backend]:
            reason = found[backend]
            raise RuntimeError(f"{spec.op}: backend {backend!r} was asked for, but {reason}")
        return backend
    chosen = next(name for name, reason in found.items() if reason is None)
    for name, reason in found.items():
        if name == chosen:
            break
        message = f"tilenorm: {chosen} runs instead of {name}: {reason}"
        warnings.warn(message, ReferenceWarning, stacklevel=2)
    return chosen


def select_transformed(spec: NormSpec, device: Device, backend: str | None) -> None:
    """Answer for the reference where a transform of PyTorch's has to see single operations.

    Raises and warns as select does.
    """
    if select(spec, 0, device, backend) == "cutile":
        refuse_transformed(spec.op, backend)
        message = f"tilenorm: reference runs instead of cutile: {TRANSFORMED}"
        warnings.warn(message, ReferenceWarning, stacklevel=2)


def refuse_transformed(op: str, backend: str | None) -> None:
    """Raise RuntimeError if cuTile was asked for where a transform has to see operations."""
    if (backend or requested_backend()) == "cutile":
        raise RuntimeError(f"{op}: backend 'cutile' was asked for, but {TRANSFORMED}")


def requested_backend() -> str | None:
    """TILENORM_BACKEND: "cutile" or "reference". Read when an op first meets a spec."""
    return settings().backend


@cache
def device_of(kind: str, index: int | None) -> Device:
    """Describes a torch device; of a CUDA device, its architecture and driver."""
    if kind != "cuda":
        return Device(kind)
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    target = Target(arch, properties.multi_processor_count)
    return Device(kind, target, driver_version())


@cache
def _compiler_missing() -> str | None:
    try:
        compiler_path()
    except FileNotFoundError as error:
        return f"its compiler is missing: {error}"
    return None
