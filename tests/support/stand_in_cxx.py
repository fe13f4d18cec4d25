"""A shell script in the place of the C++ compiler, which makes any file, or fails."""

from pathlib import Path

import pytest

from tilenorm.ops.passes.native import build
from tilenorm.ops.passes.native.build import BuildError

SCRIPT = """#!/bin/sh
echo run >> {log}
for word in "$@"; do [ "$before" = -o ] && output=$word; before=$word; done
{commands}
"""
GOOD = 'echo extension > "$output"'
FAILS = "echo error: no >&2; exit 1"


class Cxx:
    """The program, which CXX names."""

    def __init__(self, folder: Path, monkeypatch):
        self.path, self.log = folder / "stand-in", folder / "log"
        monkeypatch.setenv("CXX", str(self.path))
        self.does(GOOD)

    def does(self, commands: str) -> None:
        """From now on it runs these commands of the shell. $output is the file to be written."""
        self.log.write_text("")
        self.path.write_text(SCRIPT.format(log=self.log, commands=commands))
        self.path.chmod(0o755)

    @property
    def runs(self) -> int:
        """How often it was run since it does what it does."""
        return len(self.log.read_text().split())


def built(aside: bool = False) -> Path:
    return build.build(print, aside)


def failing(aside: bool = False) -> str:
    with pytest.raises(BuildError) as raised:
        built(aside)
    return str(raised.value)
