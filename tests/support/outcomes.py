"""What each case did, written as soon as it is known, so that a run that is cut off has it too."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest


class Outcomes:
    """A plugin of the process that the user started. Each line is a dict: `collected`, the names of
    the cases, or `test`, `outcome` ("passed", "failed" or "skipped"), `seconds` and `why`.
    """

    def __init__(self, path: Path):
        self._path = path

    def _write(self, **line) -> None:
        with self._path.open("a") as file:
            print(json.dumps(line), file=file)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with pytest-xdist other processes collect
            self._write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids: Iterable[str]) -> None:
        self._write(collected=list(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case is passed when its call is, and failed when any phase is."""
        if report.passed and report.when != "call":
            return
        why = ""
        if report.skipped:
            why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "xfail"
        elif report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            errors = [line[1:].strip() for line in lines if line.startswith("E ")]
            why = (errors or lines[-1:] or [""])[0][:300]
        outcome = report.outcome
        self._write(test=report.nodeid, outcome=outcome, seconds=report.duration, why=why)
