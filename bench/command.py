"""What the commands of the bench have in common: options, and a run with its record and report."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench import provenance, record, report
from bench.cases import OPS
from bench.op import DTYPES
from bench.providers import PROVIDERS, attendance

OPTIONS: dict[str, dict] = {
    "op": {"nargs": "+", "choices": OPS},
    "dtype": {"nargs": "+", "choices": DTYPES},
    "hidden": {"nargs": "+", "type": int, "metavar": "N"},
    "provider": {"nargs": "+", "choices": PROVIDERS},
    "max-seconds": {"type": float, "help": "start nothing more after this time"},
}
START = time.monotonic()


def parser(command: str, description: str, ops=OPS, **defaults) -> argparse.ArgumentParser:
    """A parser with the options that every command has, and those that have a default here."""
    made = argparse.ArgumentParser(
        f"python -m bench {command}".strip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    made.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    made.add_argument("--markdown", action="store_true", help="print Markdown tables")
    for name, default in ({"max-seconds": math.inf} | defaults).items():
        given = OPTIONS[name] | ({"choices": ops} if name == "op" else {})
        made.add_argument(f"--{name}", default=default, **given)
    return made


def told(text: str) -> None:
    """Print a line of progress to stderr, with the time so far."""
    print(f"{time.monotonic() - START:4.0f} s  {text}", file=sys.stderr, flush=True)


class Run(NamedTuple):
    """The course of a command: the providers that have each op, the record so far, what adds a line
    to it, and whether the time is over.
    """

    device: str
    present: dict[str, list[str]]
    record: record.Record
    emit: Callable
    late: Callable[[], bool]


@contextmanager
def running(
    args: argparse.Namespace, argv: list[str], ops: Iterable[str] = (), quiet=False, **fields
) -> Iterator[Run]:
    """Write a record, and print it at the end, unless another process does so. ``fields`` are more
    fields of the run's line. A record of the suite "release" goes on where it ended.
    """
    device, end = provenance.device(), time.monotonic() + args.max_seconds
    present, absent = attendance(ops, getattr(args, "provider", ()) or list(PROVIDERS), device)
    made = provenance.describe_run(device, argv, absent) | fields
    with record.writing(None if quiet else args.out, made) as (found, emit):
        yield Run(device, present, found, emit, lambda: time.monotonic() > end)
    if not quiet:
        print(report.render(found, args.markdown not in (None, False)))
