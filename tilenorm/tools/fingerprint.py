"""fingerprint: what decides the bits of tilenorm's results in this process."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from ..launch import user_table
from ..launch.order import one_result
from ..launch.target import Target
from ..launch.toolchain import COMPILER_PACKAGES, cuda_tile_missing, package_version
from ..launch.tuned.rules import VERSIONS
from ..launch.tuned.tables import TABLES
from ..ops.passes.registry import device_of, refusals
from ..settings import settings
from ..spec import NormSpec

SOURCES = (".py", ".json", ".cpp", ".h")
TRIED = NormSpec("rms", 4096, "bfloat16", "bfloat16")  # a call that the kernels take where they run
DIGITS = 12  # printed digits of a digest


class Fingerprint(NamedTuple):
    """What decides the bits of tilenorm's results. Two that are equal stand for equal bits.

    version: of tilenorm. code: a digest of tilenorm's files. tables: a digest of the measured
    configurations in force, a user's included. compiler: of cuTile and its compiler tileiras.
    target: the GPU as plans know it, or the kind of another device. implementation: what serves
    there; the bits of the reference are also PyTorch's. options: settings that change bits.
    """

    version: str
    code: str
    tables: str
    compiler: str
    target: str
    implementation: str
    options: str

    def __str__(self) -> str:
        """A digest of all fields, and the fields."""
        parts = f"tilenorm {self.version}", f"code {self.code}", f"tables {self.tables}"
        parts = *parts, self.compiler, self.target, self.implementation, self.options
        return f"{_digest(repr(tuple(self)))} ({', '.join(filter(None, parts))})"


def fingerprint(device: torch.device | str | int | None = None) -> Fingerprint:
    """What decides the bits of tilenorm's results in this process, to compare with another's.

    Where two processes have the same fingerprint, the same call on the same rows returns the same
    bits in both: in a rollout engine and in a trainer, say. A call is the same with the same
    function, dtypes and options, `rounding` among them.

    Args:
        device: whose results; None is the current CUDA device, or the CPU where there is none.

    Returns:
        A tuple of strings. `str()` of it is one line that starts with a digest.

    Raises: RuntimeError or AssertionError, PyTorch's own, for a device that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    described = device_of(device.type, index)
    serving = next(n for n, reason in refusals(TRIED, 1, described).items() if reason is None)
    if serving == "reference":
        serving = f"reference of torch {torch.__version__}"
    target, name = described.target, described.kind
    if target:
        name = f"{target.name} of {target.multiprocessors} multiprocessors"
    backend = settings().backend
    options = [f"TILENORM_BACKEND={backend}"] if backend else []
    options += ["TILENORM_ONE_RESULT=1"] if one_result() else []
    return Fingerprint(
        package_version("tilenorm"),
        code_digest(),
        tables_digest(target),
        _compiler(),
        name,
        serving,
        ", ".join(options),
    )


@cache
def code_digest() -> str:
    """A digest of all files of tilenorm, which tells an edited checkout from a release."""
    root = Path(__file__).parents[1]
    digest = sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def tables_digest(target: Target | None) -> str:
    """A digest of the configurations that plans for a target read, or "none"."""
    if target is None:
        return "none"
    users = {} if cuda_tile_missing() else user_table.configs(target.arch)
    return _digest(repr((TABLES.get(target.name), sorted(users.items(), key=repr))))


def other_compiler(target: Target) -> str | None:
    """What is to be known where the compiler is not the one with which the configurations for a
    target were measured, or None.
    """
    if cuda_tile_missing():
        return None
    table, versions = TABLES.get(target.name), user_table.versions()
    measured = table.versions if table else VERSIONS
    if versions == measured:
        return None
    release = ".".join(measured["tileiras"].split(".")[:2])
    remedy = " ".join(f'"{package}=={release}.*"' for package in COMPILER_PACKAGES)
    return (
        f"the configurations for {target.name} were measured with {_listed(measured)}, and this is"
        f" {_listed(versions)}: results are as accurate, but their last bits and their speed may"
        f" differ from what the records say; pip install {remedy}"
    )


def _compiler() -> str:
    if cuda_tile_missing():
        return "no cuTile"
    return _listed(user_table.versions())


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGITS]
