"""The record of a run: JSON lines, one ``run`` line and then one line a measurement.

Records of several runs on one machine can be merged, and are then read as one.
"""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("triton", "cuda-tile", "quack-kernels", "liger-kernel", "tilegym")


@dataclass(frozen=True)
class Cell:
    """One provider on one shape. ``status`` is ok, wrong, refused, failed or skipped; what was
    not timed has no numbers, and ``error`` says why."""

    op: str
    dtype: str
    m: int
    n: int
    direction: str
    provider: str
    bytes: int
    status: str = "ok"
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    timing: str = ""
    error: str = ""

    @property
    def gbps(self) -> float | None:
        return gbps(self.bytes, self.median_us)


@dataclass(frozen=True)
class Copy:
    """A device-to-device copy of an (M, N) tensor: what memory can do."""

    dtype: str
    m: int
    n: int
    bytes: int
    median_us: float
    spread: float
    samples: int
    timing: str

    @property
    def gbps(self) -> float:
        return gbps(self.bytes, self.median_us)


@dataclass(frozen=True)
class Host:
    """Microseconds of the host for one call: forward without grad; forward and backward."""

    op: str
    dtype: str
    m: int
    n: int
    provider: str
    forward_us: float | None = None
    forward_backward_us: float | None = None
    error: str = ""


KINDS = {"cell": Cell, "copy": Copy, "host": Host}


@dataclass
class Record:
    """What was measured, and in which runs: where and when, and who was absent and why."""

    runs: list[dict] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return any(run["device"] == "cpu" for run in self.runs)

    def add(self, line: dict | Cell | Copy | Host) -> None:
        lists = {dict: self.runs, Cell: self.cells, Copy: self.copies, Host: self.hosts}
        lists[type(line)].append(line)


def gbps(nbytes: int, us: float | None) -> float | None:
    return None if us is None else nbytes / us / 1e3


def to_json(line: Cell | Copy | Host | dict) -> str:
    """One line of the file. Rates are written beside the times they follow from."""
    if isinstance(line, dict):
        return json.dumps({"record": "run", **line})
    kind = type(line).__name__.lower()
    rate = {} if isinstance(line, Host) else {"gbps": line.gbps}
    return json.dumps({"record": kind, **asdict(line), **rate})


def read(lines: Iterable[str]) -> Record:
    """The record in a file; ValueError names the line that is not part of one."""
    record = Record()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
            kind = values.pop("record")
            values.pop("gbps", None)
            record.add(values if kind == "run" else KINDS[kind](**values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not part of a bench record: {error!r}") from error
    if not record.runs:
        raise ValueError("no bench record: there is no run line")
    return record


def merge(records: Sequence[Record]) -> Record:
    """One record of several, of one machine. Of what was measured twice the last counts."""
    runs = [run for record in records for run in record.runs]
    machines = sorted({run["machine"] for run in runs})
    if len(machines) > 1:
        raise ValueError(f"records of different machines are no one report: {machines}")
    merged = Record(runs)
    for kind in ("cells", "copies", "hosts"):
        lines = [line for record in records for line in getattr(record, kind)]
        getattr(merged, kind).extend({_what(line): line for line in lines}.values())
    return merged


def _what(line: Cell | Copy | Host) -> tuple:
    """What a line is a measurement of."""
    names = ("op", "dtype", "m", "n", "direction", "provider")
    return tuple(getattr(line, name, None) for name in names)


def first_line(error: BaseException) -> str:
    """The type and the first line that says something, in at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:200]


def describe_run(device: str, arguments: list[str], absent: dict[str, str]) -> dict:
    """Where, when and with what this run is made."""
    import tilenorm

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *arguments]),
        "device": device,
        **(_gpu(device) if device != "cpu" else {"machine": platform.machine()}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tileiras": _tileiras(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tilenorm": tilenorm.__version__,
        "commit": _commit(),
        "absent": absent,
    }


def _gpu(device: str) -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "machine": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(package.removesuffix("-kernels"))  # importable, not installed
        return getattr(module, "__version__", None)


def _tileiras() -> str | None:
    on_path = shutil.which("tileiras")
    found = re.search(r"V(\d+(?:\.\d+)+)", _output(on_path, "--version") or "") if on_path else None
    return found[1] if found else _version("nvidia-cuda-tileiras")


def _commit() -> str | None:
    """The commit of this checkout, with +dirty if it has been edited."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD", lines=1)
    edited = commit and _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+dirty" if edited else commit


def _output(*command: str, lines: int | None = None) -> str | None:
    """What a program prints, or None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join(done.stdout.strip().splitlines()[:lines])
