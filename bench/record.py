"""A record is a JSON-lines file: one ``run`` line, then one line for each measurement.

A record is written line by line while the run goes on, so a run that is cut off leaves a record of
everything that it had measured. Records of several runs on one machine can be merged into one.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import RELEASE, RESUMED
from bench.op import HOST

# What has to be equal for a run to go on in the file of another: of times of kernels also the suite
# and the kernels, and of tests all source files, their own too.
IDENTITY = ("machine", "tilenorm", "torch", "rms_norm", "cuda", "driver", "tileiras", "python")
IDENTITY = (*IDENTITY, "packages")
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """The median of samples, and the ends of its interval, or None with too few samples."""

    median: float
    low: float | None = None
    high: float | None = None


def estimate(samples: Sequence[float]) -> Estimate | None:
    """The median of the samples with its interval, or None without samples.

    The interval contains the median of what the samples are drawn from, with CONFIDENCE. It is that
    of the sign test (W. R. Thompson, Annals of Mathematical Statistics 7, 1936): from the k-th
    smallest sample to the k-th largest. The median is below the k-th smallest of n independent
    samples if fewer than k samples are below it, with the probability Σ_{i < k} C(n, i) / 2^n for
    every continuous distribution; for others it is at most that. k is the largest number with which
    both sides together have at most the probability 1 - CONFIDENCE. Below 6 samples there is none.
    """
    n, k, below = len(samples), 0, 1
    while 2 * below <= (1 - CONFIDENCE) * 2**n:
        k += 1
        below += math.comb(n, k)
    found = sorted(samples)
    ends = (found[k - 1], found[n - k]) if k else ()
    return Estimate(statistics.median(samples), *ends) if samples else None


@dataclass(frozen=True)
class Copy:
    """The time of a device-to-device copy of an (M, N) tensor: the speed that memory allows.

    ``error`` says why it is not timed, or why no CUDA graph times it.
    """

    dtype: str
    m: int
    n: int
    bytes: int
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    timing: str = ""
    error: str = ""

    @property
    def gbps(self) -> float | None:
        return None if self.median_us is None else self.bytes / self.median_us / 1e3


@dataclass(frozen=True, kw_only=True)
class Cell(Copy):
    """The time of one provider on one shape in one direction, with the fields of a copy's.

    ``status`` is ok, wrong, refused or failed. A cell that is not ok has no numbers.
    """

    op: str
    direction: str
    provider: str
    status: str = "ok"
    groups: int = 1


@dataclass(frozen=True)
class Shaped:
    """What a provider did with an op on M rows of N elements."""

    op: str
    dtype: str
    m: int
    n: int
    provider: str


@dataclass(frozen=True)
class Host(Shaped):
    """Host microseconds of a call: a forward without grad, a forward, and a forward with its
    backward, by the clock and of all threads. Each is the least median of several rounds.

    ``way``: see bench.host. ``spread`` is the largest (p80 - p20) / median of these medians.
    ``path``: see provenance.host_path.
    """

    forward_us: float | None = None
    forward_backward_us: float | None = None
    error: str = ""
    way: str = "call"
    forward_cpu_us: float | None = None
    forward_backward_cpu_us: float | None = None
    forward_grad_us: float | None = None
    forward_grad_cpu_us: float | None = None
    spread: float | None = None
    path: str = ""

    direction = HOST


@dataclass(frozen=True)
class FirstCall(Shaped):
    """Seconds of the first call of a spec in a process, with the compilation in it.

    ``cold_s`` starts from empty caches. ``warm_s`` is of a second process, with the first's caches.
    """

    direction: str
    cold_s: float | None = None
    warm_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Accuracy(Shaped):
    """The largest errors of one provider on one kind of inputs, by the result's name."""

    inputs: str
    ulps: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Precompile:
    """Seconds that ``python -m tilenorm precompile`` takes with an empty cache."""

    op: str
    arguments: str
    cores: int
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Pair:
    """Training steps of two variants of one model, in one process and over the same weights.

    ``label`` names the model, its sizes and how it is trained. ``pairs_us`` has the microseconds of
    the base's step and of the variant's step, for each pair of steps. ``asked`` is how many pairs
    the command asked for; a run that is out of time makes fewer. ``peak_bytes``, ``losses``,
    ``kernels`` and ``reports`` have an entry for each of the two. The losses are of the first
    forward, from the same weights, and ``step_losses`` of all steps in order. ``gradient_change``
    is the norm of the difference of the two first gradients divided by the norm of the base's: the
    largest of all parameters, and ``gradient`` is the parameter's name. ``kernels`` has the name,
    calls and milliseconds of each kernel of one step. ``reports`` say what tilenorm replaced.

    With several ``gpus``, ``ranks`` has the times and peaks of each process, and ``pairs_us`` and
    ``peak_bytes`` are the largest of any process.
    """

    label: str
    base: str
    variant: str
    tokens: int
    asked: int
    status: str = "ok"
    pairs_us: list[list[float]] = field(default_factory=list)
    peak_bytes: list[int | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_change: float | None = None
    gradient: str = ""
    kernels: list[list[dict]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    gpus: int = 1
    ranks: list[dict] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def medians_us(self) -> list[float]:
        """The median step of the base and of the variant."""
        return [statistics.median(times) for times in zip(*self.pairs_us, strict=True)]

    @property
    def gpu_tokens(self) -> list[float]:
        """The tokens a second of one GPU, of the base and of the variant."""
        return [self.tokens / self.gpus / us * 1e6 for us in self.medians_us]

    @property
    def difference_us(self) -> Estimate | None:
        """How many microseconds longer the variant's step is than the base's."""
        return estimate([variant - base for base, variant in self.pairs_us])

    @property
    def more_tokens(self) -> Estimate | None:
        """How many more tokens the variant takes in a second, as a share of the base's."""
        return estimate([base / variant - 1 for base, variant in self.pairs_us])


@dataclass(frozen=True)
class Turns:
    """Host microseconds of a provider of a call, or of a variant of a step, in rounds with others.

    ``label`` names the call or the model. ``us`` has the samples of each phase, one a round; its
    last phase is the whole. ``base`` is the provider that the others are compared with, and
    ``norms`` the number of norms in what is measured. ``way`` and ``path``: as of a Host.
    """

    way: str
    label: str
    base: str
    provider: str
    norms: int = 1
    us: dict[str, list[float]] = field(default_factory=dict)
    path: str = ""
    error: str = ""

    @property
    def whole(self) -> list[float]:
        return [*self.us.values()][-1]

    def ratio(self, base: "Turns") -> Estimate | None:
        """How many times the base's time the whole takes."""
        return estimate([mine / other for mine, other in zip(self.whole, base.whole, strict=True)])

    def more_us(self, base: "Turns") -> list[float]:
        """The microseconds a norm that each phase takes longer than the base's: medians."""
        pairs = [zip(self.us[phase], base.us[phase], strict=True) for phase in base.us]
        return [statistics.median(a - b for a, b in pair) / self.norms for pair in pairs]


@dataclass(frozen=True)
class Tests:
    """What the tests that need a GPU did at a commit.

    ``failed`` has the first error of each case by its name, and ``skipped`` the number of cases by
    the reason. ``native`` says whether the extension in C++ served repeated calls.
    """

    date: str
    commit: str
    versions: str
    native: bool
    passed: int
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    not_reached: int = 0
    seconds: float = 0.0


KINDS = (Cell, Copy, Host, FirstCall, Precompile, Accuracy, Pair, Turns, Tests)
Line = Cell | Copy | Host | FirstCall | Precompile | Accuracy | Pair | Turns | Tests


def _of(kind: type) -> Any:
    return property(lambda record: [line for line in record.lines if type(line) is kind])


@dataclass
class Record:
    """All measurements of one or more runs. Each of ``runs`` says where, when and with which
    versions it was made, and which providers were absent and why.
    """

    runs: list[dict] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    cells, copies, hosts, first_calls, precompiles, accuracies, pairs, turns, tests = map(
        _of, KINDS
    )

    @property
    def timed_pairs(self) -> list[Pair]:
        """Those for which there was time."""
        return [pair for pair in self.pairs if pair.pairs_us]

    @property
    def judged_pairs(self) -> list[Pair]:
        """Those whose median has an interval: there were enough pairs of steps to say something."""
        return [pair for pair in self.timed_pairs if pair.more_tokens.low is not None]

    @property
    def on_cpu(self) -> bool:
        return any(run["device"] == "cpu" for run in self.runs)

    @property
    def copied(self) -> dict[tuple, float]:
        """GB/s of a copy by (dtype, M, N)."""
        return {(copy.dtype, copy.m, copy.n): copy.gbps for copy in self.copies}

    def add(self, line: dict | Line) -> None:
        (self.runs if isinstance(line, dict) else self.lines).append(line)

    def narrowed(self, **wanted: Sequence | None) -> "Record":
        """The same runs, with only the lines whose fields have one of the wanted values.

        ``wanted`` maps a field's name to a list of values, or to None for all values. A field that
        a line does not have is not compared. Host times are not narrowed by shape or dtype, because
        they are measured on one shape only.
        """
        asked = {name: values for name, values in wanted.items() if values}

        def kept(line: Line) -> bool:
            free = ("n", "dtype") if isinstance(line, Host) else ()
            names = [name for name in asked if hasattr(line, name) and name not in free]
            return all(getattr(line, name) in asked[name] for name in names)

        return Record(self.runs, list(filter(kept, self.lines)))


def to_json(line: Line | dict) -> str:
    """One line of the file."""
    if isinstance(line, dict):
        return json.dumps({"record": "run", **line})
    return json.dumps({"record": type(line).__name__.lower(), **asdict(line)})


def from_json(text: str) -> Line | dict:
    """The line that ``to_json`` wrote."""
    values = json.loads(text)
    name = values.pop("record")
    if name == "run":
        return values
    kind = {kind.__name__.lower(): kind for kind in KINDS}[name]
    known = {field.name for field in fields(kind)}  # earlier versions wrote others, too
    return kind(**{name: value for name, value in values.items() if name in known})


def read(lines: Iterable[str]) -> Record:
    """The record in a file.

    A last line that was cut off is ignored. Raises ValueError with the number of the first other
    line that is not part of a record.
    """
    record = Record()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record.add(from_json(text))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if record.runs and not text.rstrip().endswith("}"):
                break  # only the last line of a run that was cut off has no closing brace
            raise ValueError(f"line {number} is not part of a bench record: {error!r}") from error
    if not record.runs:
        raise ValueError("no bench record: there is no run line")
    return record


def load(paths: Sequence[str | Path]) -> Record:
    """The records in several files, merged."""
    return merge([read(Path(path).read_text().splitlines()) for path in paths])


@contextmanager
def writing(path: str | None, run: dict) -> Iterator[tuple[Record, Callable[[Line], None]]]:
    """A record of a run, and a function that adds a line to it, and at once to the file at
    ``path``, if a path is given.

    The record is empty, or, of a suite in RESUMED, what the file has, if it exists. Exits if that
    is of another suite, version or machine, or of other kernels.
    """
    record = Record()
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if run.get("suite") in RESUMED and path and Path(path).exists():
        whole, end, _ = Path(path).read_text().rpartition("\n")  # without a line that was cut off
        Path(path).write_text(whole + end)
        record = load([path])
        for earlier in record.runs:
            for name in ("suite", "kernels", *IDENTITY):
                if earlier.get(name) != run.get(name):
                    what = f"{name} {earlier.get(name)}, not {run.get(name)}: give another file"
                    raise SystemExit(f"{path} is of {what}")
    with open(path or os.devnull, "a" if record.runs else "w") as file:

        def emit(line: Line | dict) -> None:
            record.add(line)
            print(to_json(line), file=file, flush=True)

        emit(run)
        yield record, emit


def append(path: str, run: dict, line: Line) -> None:
    """Add a run with one line to the record at a path, which may have other runs of this machine.

    Raises ValueError where it has those of another machine.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    earlier = [load([path])] if Path(path).exists() else []
    merge([*earlier, Record([run], [line])])
    with open(path, "a") as file:
        print(to_json(run), to_json(line), sep="\n", file=file)


def merge(records: Sequence[Record]) -> Record:
    """One record of several, all of one machine, and of the same kernels if one is a release's.

    Where two records measured the same thing, the later record counts.
    """
    runs = [run for record in records for run in record.runs]
    machines = sorted({run["machine"] for run in runs})
    if len(machines) > 1:
        raise ValueError(f"records of different machines cannot be merged: {machines}")
    released = [run for run in runs if run.get("suite") == RELEASE]
    if released and len({kernels_of(run) for run in runs}) > 1:
        commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in runs))
        raise ValueError(f"a release's record is shown beside no other kernels', got {commits}")
    return Record(
        runs, [*{what(line): line for record in records for line in record.lines}.values()]
    )


def kernels_of(run: dict) -> tuple:
    """What tells the kernels of a run from others. Runs of before 0.4 do not have their digest."""
    return (run["kernels"],) if run.get("kernels") else (run["commit"], run.get("sources"))


def by_shape(records: Iterable[Record]) -> dict[tuple, dict[str, Cell]]:
    """The latest number of each provider at each (op, direction, dtype, N, M), in order."""
    shapes: dict[tuple, dict[str, Cell]] = {}
    for record in sorted(records, key=lambda record: record.runs[-1]["date"]):
        for cell in filter(lambda cell: cell.gbps, record.cells):
            where = cell.op, cell.direction, cell.dtype, cell.n, cell.m
            shapes.setdefault(where, {})[cell.provider] = cell
    return dict(sorted(shapes.items()))


def what(line: Line) -> tuple:
    """The key of what a line measures: two lines with equal keys measure the same thing."""
    names = "op dtype m n groups way direction provider arguments label base variant inputs path"
    names += " commit native"
    return type(line), *(getattr(line, name, None) for name in names.split())
