"""``python -m bench --check RECORD.jsonl ...`` says whether a change has made tilenorm slower.

It times eight shapes and two host times in about two minutes, on the machine that the records name,
and compares them with the records: one of the suite "release" has the shapes, and one of
``python -m bench host`` the host times. It prints a line for each, and exits with 1 where one is
slower by more than 5%. Run it before and after a change of kernels or of launches.

The shapes are a forward and a backward pass of four ops, timed as in the record. The host of a
virtual machine is faster at one hour than at another, so that a host time is compared as a multiple
of PyTorch's time, which is measured in turns with it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench import command, host, provenance, report, run
from bench.cases import OPS
from bench.op import DIRECTIONS, Case
from bench.record import Cell, Copy, Host, Record, load
from bench.text import columns

MOST_SLOWER = 0.05
CHECKED = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
SHAPES = tuple((op, way) for op in CHECKED for way in DIRECTIONS)
N, DTYPE = 4096, "bfloat16"
HOST_OPS = ("rms_norm", "layer_norm")
HOST_TIME = report.NEVER_LEFT_OUT[-1]  # of a forward and its backward


@dataclass(frozen=True)
class Compared:
    """A figure beside the record's. Both are times, or multiples of PyTorch's times."""

    what: str
    unit: str
    before: float
    now: float | None
    error: str = ""

    @property
    def slower(self) -> bool:
        """Whether it is slower than it may be. A figure that fails is."""
        return self.now is None or self.now > (1 + MOST_SLOWER) * self.before

    @property
    def row(self) -> list[str]:
        if self.now is None:
            return [self.what, f"{self.before:.2f} {self.unit}", self.error, "failed"]
        both = [f"{figure:.2f} {self.unit}" for figure in (self.before, self.now)]
        return [self.what, *both, f"{self.now / self.before:.3f}{' SLOWER' * self.slower}"]


def main(paths: Sequence[str]) -> int:
    """Exits with a message where the records cannot be compared with this machine."""
    records = [load([path]) for path in paths]  # of several commits, so that none is merged
    device = provenance.device()
    machine = provenance.describe_run(device, [], {})["machine"]
    for path, record in zip(paths, records, strict=True):
        if machine != (expected := record.runs[0]["machine"]):
            sys.exit(f"{path} is of {expected}, and this machine is {machine}: nothing is compared")
    cells = cells_of([cell for record in records for cell in record.cells])
    before = host_ratios([line for record in records for line in record.hosts])
    missing = [f"{op} {way}" for op, way in SHAPES if (op, way) not in cells]
    missing += [f"host time of {op}" for op in HOST_OPS if op not in before]
    if missing:
        sys.exit(f"{', '.join(paths)}: no {', no '.join(missing)}")
    found = [*_shapes(cells, device), *_hosts(before, device)]
    header = ["figure", "record", "now", "times the record's"]
    print(columns(header, [of.row for of in found], markdown=False))
    slower = [of.what for of in found if of.slower]
    print(f"slower by more than {MOST_SLOWER:.0%}: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


def cells_of(cells: Iterable[Cell]) -> dict[tuple[str, str], Cell]:
    """The cells of tilenorm that are timed again, by op and direction."""
    mine = [cell for cell in cells if cell.provider == report.OURS and cell.median_us]
    return {
        (cell.op, cell.direction): cell
        for cell in mine
        if (cell.op, cell.direction) in SHAPES and (cell.n, cell.dtype) == (N, DTYPE)
    }


def host_ratios(hosts: Iterable[Host]) -> dict[str, float]:
    """How many times PyTorch's host time tilenorm's is, by the op."""
    times = {
        (line.op, line.provider): us
        for line in hosts
        if line.way == "call" and (us := getattr(line, HOST_TIME))
    }
    both = [op for op in HOST_OPS if {(op, report.OURS), (op, "torch")} <= {*times}]
    return {op: times[op, report.OURS] / times[op, "torch"] for op in both}


def _course(device: str, op: str, providers: list[str], emit: Callable) -> command.Run:
    return command.Run(device, {op: providers}, Record(), emit, lambda: False)


def _shapes(cells: dict[tuple[str, str], Cell], device: str) -> Iterator[Compared]:
    for op in CHECKED:
        first = cells[op, DIRECTIONS[0]]
        case = Case(op, first.dtype, first.m, first.n, first.groups)
        lines: list[Copy] = []
        run.run([case], _course(device, op, [report.OURS], lines.append), DIRECTIONS)
        for cell in (line for line in lines if isinstance(line, Cell)):
            before = cells[op, cell.direction]
            what = f"{op} {cell.direction}, {cell.dtype}, {cell.m} x {cell.n}"
            yield Compared(what, "µs", before.median_us, cell.median_us, cell.error)


def _hosts(before: dict[str, float], device: str) -> Iterator[Compared]:
    for op in HOST_OPS:
        names = ["torch", report.OURS]
        course = _course(device, op, names, lambda line: None)
        lines = host.times(OPS[op], names, course, "call", command.told)
        what = f"host time of {op}, forward and backward, beside PyTorch's"
        error = "; ".join(line.error for line in lines if line.error)
        yield Compared(what, "×", before[op], host_ratios(lines).get(op), error)
