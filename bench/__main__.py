"""``python -m bench``: measure, or with ``--from`` print what was measured before.

``python -m bench train`` and ``python -m bench first-call`` measure a training step, and compiling;
what they record is printed by ``--from`` too.
"""

import argparse
import math
import sys

from bench import compare, first_call, plot, provenance, record, report, train
from bench.cases import (
    DIRECTIONS,
    DTYPES,
    HOST,
    LATENCIES,
    OPS,
    SUITE_DIRECTIONS,
    SUITES,
    select,
)
from bench.providers import PROVIDERS, attendance
from bench.run import GpuLost, run

COMMANDS = {"train": train.main, "first-call": first_call.main}
CPU_ELEMENTS = 1 << 18
CPU_BUDGET_S = 0.02


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--op", nargs="+", choices=OPS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--hidden", nargs="+", type=int, metavar="N")
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=(*DIRECTIONS, *LATENCIES, HOST),
        help="by default those of the suite, and host times",
    )
    parser.add_argument("--provider", nargs="+", choices=PROVIDERS)
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="skip what is left after this time"
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="FILE.jsonl",
        help="print records of one machine again, as one report",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="OLD.jsonl",
        help="also print what is slower than in these records; if anything is, exit with status 1",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw GB/s against N (needs matplotlib)")
    return parser.parse_args(argv)


def _narrowed(whole: record.Record, args: argparse.Namespace) -> record.Record:
    """What the options leave of a record."""

    def kept(line) -> bool:
        wanted = {"op": args.op, "dtype": args.dtype, "n": args.hidden}
        wanted |= {"direction": args.direction, "provider": args.provider}
        if isinstance(line, record.Host):  # of one shape, whatever shapes are asked for
            wanted = {"op": args.op, "provider": args.provider}
            if args.direction and HOST not in args.direction:
                return False
        return all(
            not names or getattr(line, key, names[0]) in names for key, names in wanted.items()
        )

    return whole.filtered(kept)


def _measured(args: argparse.Namespace, argv: list[str]) -> record.Record:
    """Run, writing each line to ``--out`` as soon as it is known."""
    device = provenance.device()
    cases = select(args.suite, args.op, args.dtype, args.hidden)
    if not cases or set(args.hidden or ()) - {case.n for case in cases}:
        sizes = {}
        for case in select(args.suite, None, args.dtype):
            sizes.setdefault(case.op, {})[case.n] = None
        listed = "; ".join(f"{op} {sorted(found)}" for op, found in sizes.items())
        sys.exit(f"suite {args.suite} has no such case; its N are {listed}")
    if device == "cpu":
        print(report.CPU_NOTICE, file=sys.stderr)
        cases = list(dict.fromkeys(case.shrunk(CPU_ELEMENTS) for case in cases))
    ops = dict.fromkeys(case.op for case in cases)
    present, absent = attendance(ops, args.provider or list(PROVIDERS), device)
    directions = args.direction or (HOST, *SUITE_DIRECTIONS.get(args.suite, DIRECTIONS))
    budget = {"budget_s": CPU_BUDGET_S} if device == "cpu" else {}
    made = provenance.describe_run(device, argv, absent)
    with record.writing(args.out, made) as (result, emit):
        try:
            run(cases, present, directions, device, emit, args.max_seconds, **budget)
        except GpuLost as error:
            print(f"the GPU was lost, so the run ends here: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted; what was measured follows", file=sys.stderr)
    return result


def _read(paths: list[str]) -> record.Record:
    records = []
    for path in paths:
        with open(path) as file:
            records.append(record.read(file))
    return record.merge(records)


def main(argv: list[str]) -> int:
    """Run a command; the exit status is 1 if something is slower than what it is compared with."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    args = _arguments(argv)
    old = _read(args.compare) if args.compare else None
    found = _narrowed(_read(args.sources), args) if args.sources else _measured(args, argv)
    print(report.render(found, args.markdown))
    if args.plot:
        plot.save(found, args.plot)
    if old is None:
        return 0
    count, lines = compare.slower(old, found)
    print("\n".join([f"\n{count} compared, {len(lines)} slower", *lines]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
