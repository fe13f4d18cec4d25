"""``python -m bench``: measure, or with ``--from`` print what was measured before."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench import plot, record, report
from bench.cases import DIRECTIONS, DTYPES, OPS, SUITES, select
from bench.providers import PROVIDERS
from bench.run import GpuLost, run

CPU_ELEMENTS = 1 << 18
CPU_BUDGET_S = 0.02


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument("--op", nargs="+", choices=OPS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--hidden", nargs="+", type=int, metavar="N")
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS)
    parser.add_argument("--provider", nargs="+", choices=PROVIDERS)
    parser.add_argument("--max-seconds", type=float, help="skip what is left after this time")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write the record")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="FILE.jsonl",
        help="print records of one machine again, as one report",
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
        return all(
            not names or getattr(line, key, names[0]) in names for key, names in wanted.items()
        )

    cells, copies, hosts = (
        list(filter(kept, lines)) for lines in (whole.cells, whole.copies, whole.hosts)
    )
    return replace(whole, cells=cells, copies=copies, hosts=hosts)


def _measured(args: argparse.Namespace, argv: list[str]) -> record.Record:
    """Run, writing each line to ``--out`` as soon as it is known."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = select(args.suite, args.op, args.dtype, args.hidden)
    if not cases or set(args.hidden or ()) - {case.n for case in cases}:
        sizes = {}
        for case in select(args.suite, None, args.dtype):
            sizes.setdefault(case.op, {})[case.n] = None
        listed = "; ".join(f"{op} {sorted(found)}" for op, found in sizes.items())
        sys.exit(f"suite {args.suite} has no such case; its N are {listed}")
    if device == "cpu":
        print(report.CPU_NOTICE, file=sys.stderr)
        cases = [case.shrunk(CPU_ELEMENTS) for case in cases]
    else:
        # A shape that tilenorm's kernels do not serve is shown as refused. Timing the reference
        # in its place would not be a measurement of tilenorm.
        os.environ.setdefault("TILENORM_BACKEND", "cutile")
    present, absent = _attendance(cases, args.provider or list(PROVIDERS), device)
    result = record.Record()
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with open(args.out or os.devnull, "w") as file:

        def emit(line) -> None:
            result.add(line)
            print(record.to_json(line), file=file, flush=True)

        emit(record.describe_run(device, argv, absent))
        directions = args.direction or DIRECTIONS
        budget = {"budget_s": CPU_BUDGET_S} if device == "cpu" else {}
        try:
            run(cases, present, directions, device, emit, args.max_seconds, **budget)
        except GpuLost as error:
            print(f"the GPU was lost, so the run ends here: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted; what was measured follows", file=sys.stderr)
    return result


def _attendance(cases, names, device) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Which providers take part in each op; and of those that miss some, why."""
    present, reasons = {}, {}
    for op in dict.fromkeys(case.op for case in cases):
        why = {name: PROVIDERS[name].absent(OPS[op], device) for name in names}
        present[op] = [name for name in names if why[name] is None]
        for name in filter(why.get, names):
            reasons.setdefault(name, {})[why[name]] = None  # a set that keeps its order
    return present, {name: "; ".join(found) for name, found in reasons.items()}


def _read(path: str) -> record.Record:
    with open(path) as file:
        return record.read(file)


def main(argv: list[str]) -> None:
    args = _arguments(argv)
    if args.sources:
        found = _narrowed(record.merge([_read(path) for path in args.sources]), args)
    else:
        found = _measured(args, argv)
    print(report.render(found, args.markdown))
    if args.plot:
        plot.save(found, args.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
