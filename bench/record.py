"""The record of a run: JSON lines, one ``run`` line and then one line a measurement.

Records of several runs on one machine can be merged, and are then read as one.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
    """Microseconds of the host for one call: forward without grad; forward and backward.

    Medians; of several rounds, the least.
    """

    op: str
    dtype: str
    m: int
    n: int
    provider: str
    forward_us: float | None = None
    forward_backward_us: float | None = None
    error: str = ""
    rounds: int = 1


@dataclass(frozen=True)
class FirstCall:
    """Seconds of the first call of a spec in a process, its compiling included: with empty caches,
    and in a later process with what the former left on the disk."""

    op: str
    dtype: str
    m: int
    n: int
    direction: str
    provider: str
    cold_s: float | None = None
    warm_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Precompile:
    """Seconds in which ``python -m tilenorm precompile`` compiles specs, from an empty cache."""

    op: str
    arguments: str
    cores: int
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Step:
    """A training step of one variant of a model.

    ``norm_kernels_ms`` is the GPU time in one step of each kernel that does a norm; ``same_bits``
    whether a second run from the same start had the same losses and weights.
    """

    model: str
    variant: str
    tokens: int
    status: str = "ok"
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    first_s: float | None = None
    norm_kernels_ms: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    same_bits: bool | None = None
    error: str = ""


LISTS = {
    Cell: "cells",
    Copy: "copies",
    Host: "hosts",
    FirstCall: "first_calls",
    Precompile: "precompiles",
    Step: "steps",
}
KINDS = {kind.__name__.lower(): kind for kind in LISTS}
Line = Cell | Copy | Host | FirstCall | Precompile | Step


@dataclass
class Record:
    """What was measured, and in which runs: where and when, and who was absent and why."""

    runs: list[dict] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)
    precompiles: list[Precompile] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return any(run["device"] == "cpu" for run in self.runs)

    def add(self, line: dict | Line) -> None:
        lines = self.runs if isinstance(line, dict) else getattr(self, LISTS[type(line)])
        lines.append(line)

    def filtered(self, kept: Callable[[Line], bool]) -> "Record":
        """The same runs with those of their lines that are kept."""
        lists = {name: list(filter(kept, getattr(self, name))) for name in LISTS.values()}
        return Record(self.runs, **lists)


def gbps(nbytes: int, us: float | None) -> float | None:
    return None if us is None else nbytes / us / 1e3


def to_json(line: Line | dict) -> str:
    """One line of the file. Rates are written beside the times they follow from."""
    if isinstance(line, dict):
        return json.dumps({"record": "run", **line})
    rate = {"gbps": line.gbps} if hasattr(line, "gbps") else {}
    return json.dumps({"record": type(line).__name__.lower(), **asdict(line), **rate})


def from_json(text: str) -> Line | dict:
    """What to_json wrote."""
    values = json.loads(text)
    kind = values.pop("record")
    values.pop("gbps", None)
    return values if kind == "run" else KINDS[kind](**values)


def read(lines: Iterable[str]) -> Record:
    """The record in a file; ValueError names the line that is not part of one."""
    record = Record()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record.add(from_json(text))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not part of a bench record: {error!r}") from error
    if not record.runs:
        raise ValueError("no bench record: there is no run line")
    return record


@contextmanager
def writing(path: str | None, run: dict) -> Iterator[tuple[Record, Callable[[Line], None]]]:
    """A record of one run, and what adds a line to it and, at once, to the file if there is one."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    record = Record()
    with open(path or os.devnull, "w") as file:

        def emit(line: Line | dict) -> None:
            record.add(line)
            print(to_json(line), file=file, flush=True)

        emit(run)
        yield record, emit


def merge(records: Sequence[Record]) -> Record:
    """One record of several, of one machine. Of what was measured twice the last counts."""
    runs = [run for record in records for run in record.runs]
    machines = sorted({run["machine"] for run in runs})
    if len(machines) > 1:
        raise ValueError(f"records of different machines are no one report: {machines}")
    merged = Record(runs)
    for kind in LISTS.values():
        lines = [line for record in records for line in getattr(record, kind)]
        getattr(merged, kind).extend({what(line): line for line in lines}.values())
    return merged


def what(line: Line) -> tuple:
    """What a line is a measurement of."""
    names = ("op", "dtype", "m", "n", "direction", "provider", "arguments", "model", "variant")
    return type(line), *(getattr(line, name, None) for name in names)


def first_line(error: BaseException) -> str:
    """The type and the first line that says something, in at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:200]
