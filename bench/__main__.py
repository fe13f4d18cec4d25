"""``python -m bench`` measures, and prints what it measured.

``--from`` prints records of earlier runs, and ``--markdown FILE ...`` writes what documents and the
pages of records print. Neither measures anything.

``python -m bench train`` compares training steps, ``python -m bench first-call`` measures how long
compiling takes, ``python -m bench accuracy`` measures errors, ``python -m bench host`` host time,
and ``python -m bench tests`` runs the tests that need a GPU. ``--from`` prints their records too.
``--check FILE ...`` compares this machine with records of it, in two minutes.

The suite "release" measures every op, in every dtype, on a machine. "latency" has the decode steps
of an engine, and "rotation" norms of queries and keys with their rotation. Started again with the
same ``--out``, these three go on where they ended.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from bench import (
    accuracy,
    command,
    documents,
    first_call,
    guard,
    host,
    plot,
    record,
    report,
    tests,
    train,
)
from bench.cases import OPS, SUITE_DIRECTIONS, SUITES, select
from bench.compiling import compile_all
from bench.op import DIRECTIONS, HOST, INFERENCE
from bench.run import GpuLost, run
from bench.text import distinct, grouped

COMMANDS = {"train": train, "first-call": first_call, "accuracy": accuracy, "host": host}
COMMANDS |= {"tests": tests}
CPU_ELEMENTS = 1 << 18


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("", __doc__, op=None, dtype=None, hidden=None, provider=None)
    parser.add_argument("--suite", choices=SUITES, default="quick")
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=(*DIRECTIONS, INFERENCE, HOST),
        help="default: the directions of the suite, and host times",
    )
    text = "compile in several processes what the caches lack, before anything is timed"
    parser.add_argument("--compile-first", action="store_true", help=text)
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        metavar="FILE.jsonl",
        help="print the records of one machine as one report, and measure nothing",
    )
    parser.add_argument(
        "--markdown",
        nargs="*",
        metavar="FILE",
        help="print Markdown tables; with files, write the pages of records (FILE.jsonl), and what"
        " stands between the markers of documents (FILE.md)",
    )
    text = "compare this machine with records of it; exits with 1 where tilenorm is slower"
    parser.add_argument("--check", nargs="+", metavar="FILE.jsonl", help=text)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw GB/s against N (needs matplotlib)")
    return parser


def _measured(args: argparse.Namespace, argv: list[str]) -> record.Record:
    """The record of a run. Each line is written to ``--out`` as soon as it is measured."""
    cases = select(args.suite, args.op, args.dtype, args.hidden)
    if not cases or set(args.hidden or ()) - {case.n for case in cases}:
        by_op = grouped(select(args.suite, None, args.dtype), "op").items()
        listed = "; ".join(f"{op} {sorted(distinct(of_op, 'n'))}" for op, of_op in by_op)
        sys.exit(f"suite {args.suite} has no such case; its N are {listed}")
    directions = args.direction or (HOST, *SUITE_DIRECTIONS.get(args.suite, DIRECTIONS))
    ops = dict.fromkeys(case.op for case in cases)
    with command.running(args, argv, ops, suite=args.suite) as made:
        if made.device == "cpu":
            print(report.CPU_NOTICE, file=sys.stderr)
            cases = list(dict.fromkeys(OPS[case.op].shrunk(case, CPU_ELEMENTS) for case in cases))
        ahead = args.compile_first and made.device != "cpu"
        before = partial(compile_all, device=made.device, late=made.late) if ahead else None
        try:
            run(cases, made, directions, before)
        except GpuLost as error:
            print(f"the GPU no longer works, so the run ends here: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("interrupted; the measurements until now follow", file=sys.stderr)
    return made.record


def main(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]].main(argv[1:])
    args = _parser().parse_args(argv)
    if args.check:
        return guard.main(args.check)
    for path in map(Path, args.markdown or ()):
        documents.update(path)
    if args.markdown:
        return 0
    if args.sources:
        fields = {"op": args.op, "dtype": args.dtype, "n": args.hidden}
        fields |= {"direction": args.direction, "provider": args.provider}
        found = record.load(args.sources).narrowed(**fields)
        print(report.render(found, args.markdown is not None))
    else:
        found = _measured(args, argv)
    if args.plot:
        plot.save(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
