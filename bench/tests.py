"""``python -m bench tests`` runs the tests that need a GPU, on this machine's GPU, to their end.

Cases that need much memory take turns, and a case that does not end within five minutes is ended
and named. ``--out FILE.jsonl`` gets a line with what passed, what failed and what was skipped, and
why; lines of other commits stay in it. What each case did stands in FILE.cases, from which a run of
the same sources, versions and machine goes on: only cases without an outcome run. A case that has
failed does not run again.

Words behind ``--`` are given to pytest: ``python -m bench tests -- tests/kernels``. The tests are
not part of the installed package, so that this needs a checkout.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from bench import command, provenance, worker
from bench.record import IDENTITY, Tests, append

BROKEN = (3, 4)  # pytest's exit codes of a run that an error of its own, or a wrong option, ended
QUICK_AND_SLOW = "slow or not slow"  # pyproject's own options leave the slow cases out


def main(argv: list[str]) -> int:
    given, more = _split(argv)
    parser = command.parser("tests", __doc__)
    most = worker.MOST_PROCESSES
    text = f"that run tests beside each other; default: {most}, or all cores but one"
    parser.add_argument("--processes", type=int, help=text)
    parser.add_argument("--native", action="store_true", help="with the extension in C++")
    args = parser.parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("there is no GPU: `python -m pytest` runs the tests that need none")
    run = provenance.describe_run("cuda", ["tests", *argv], {})
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(args.out).with_suffix(".cases") if args.out else Path(folder) / "cases"
        _run(cases, run, args, more, Path(folder))
        found = summary(cases.read_text().splitlines(), run, args.native)
    print(told(found))
    if args.out:
        append(args.out, run, found)
    return 1 if found.failed or found.not_reached else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words before "--", and those behind it."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _run(cases: Path, run: dict, args, more: list[str], folder: Path) -> None:
    """Run the cases that have no outcome."""
    identity = {name: run.get(name) for name in ("sources", *IDENTITY)}
    identity |= {"tests": provenance.sources(".", of="tests"), "native": args.native}
    done = folder / "done"
    done.write_text("\n".join(_done(cases, identity)))
    if not cases.exists():
        cases.write_text(json.dumps({"run": identity}) + "\n")
    processes = args.processes or worker.PROCESSES
    # A process has one case waiting, so that few stand behind those that take minutes.
    options = ["-q", "-n", str(processes), "--maxschedchunk=1", "-m", QUICK_AND_SLOW, "--only-gpu"]
    # As words of their own, paths outside the checkout would keep pytest from finding it.
    options += [f"--outcomes={cases.resolve()}", f"--leave-out={done}"]
    options += ["--native"] * args.native
    start = time.monotonic()
    limit = args.max_seconds if args.max_seconds < float("inf") else None
    try:
        words = [sys.executable, "-m", "pytest", *options, *more]
        code = subprocess.run(words, cwd=provenance.ROOT, timeout=limit).returncode
        if code in BROKEN:
            sys.exit(f"pytest exited with {code}: no summary is made")
    except subprocess.TimeoutExpired:
        print(f"out of time after {limit:.0f} s; the same command goes on", file=sys.stderr)
    with cases.open("a") as file:
        print(json.dumps({"seconds_of_run": time.monotonic() - start}), file=file)


def _done(cases: Path, identity: dict) -> list[str]:
    """The cases that have an outcome, if the file is of the same sources, versions and machine.
    Else the file is begun anew.
    """
    lines = _lines(cases.read_text().splitlines()) if cases.exists() else []
    if lines and lines[0].get("run") == identity:
        return list(dict.fromkeys(line["test"] for line in lines if "test" in line))
    cases.unlink(missing_ok=True)
    return []


def _lines(text: Iterable[str]) -> list[dict]:
    """The lines of a file of cases, without a last line that was cut off."""
    return [json.loads(line) for line in text if line.endswith("}")]


def summary(text: Iterable[str], run: dict, native: bool) -> Tests:
    """What a file of cases says. A case of which any phase failed has failed."""
    seconds = 0.0
    collected: set[str] = set()
    passed: set[str] = set()
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for line in _lines(text):
        collected.update(line.get("collected", ()))
        seconds += line.get("seconds_of_run", 0.0)
        if "test" in line:
            name, why = line["test"], line["why"]
            if line["outcome"] == "failed":
                failed.setdefault(name, why)
            elif line["outcome"] == "skipped":
                skipped[name] = why
            else:
                passed.add(name)
    reasons = Counter(skipped.values())
    return Tests(
        date=run["date"][:10],
        commit=run["commit"] or "unknown",
        versions=f"{run['torch']}, driver {run['driver']}, tileiras {run['tileiras']}",
        native=native,
        passed=len(passed - {*failed}),
        failed=failed,
        skipped=dict(reasons.most_common()),
        not_reached=len(collected - passed - {*failed} - {*skipped}),
        seconds=round(seconds, 1),
    )


def told(of: Tests) -> str:
    """A summary as text, what failed first."""
    lines = [f"failed: {name}: {why}" for name, why in of.failed.items()]
    lines += [f"skipped {count}: {why}" for why, count in of.skipped.items()]
    skipped = sum(of.skipped.values())
    last = f"{of.passed} passed, {len(of.failed)} failed, {skipped} skipped"
    return "\n".join([*lines, f"{last}, {of.not_reached} not reached, in {of.seconds:.0f} s"])
