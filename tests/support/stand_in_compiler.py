"""A program in the place of tileiras, which compiles nothing and fails where a test wants it to."""

import os
from functools import cache
from pathlib import Path
from unittest.mock import patch

from cuda.tile import _compile
from cuda.tile._cext import default_tile_context

from tilenorm.launch import disk_cache, kernel, tiling
from tilenorm.launch.calls import bound
from tilenorm.ops.passes import cutile
from tilenorm.tools.precompile import cubin_of

from .executors import Interpreter

SCRIPT = """#!/bin/sh
basename -- "$1" >> {log}
if [ "$1" = --version ]; then {version}; exit; fi
case "$(basename "$1")" in
{broken}
esac
echo cubin > "$3"
"""
CRASH, HANG = "kill -SEGV $$", "exec sleep 60"
ERROR = "echo 'error: out of registers' >&2; exit 5"
ARCH = "sm_90"
VERSION = "13.4.92"


def has_ptxas(toolkit: Path, version: str) -> None:
    """A toolkit gets a ptxas that does no more than print its version."""
    ptxas = toolkit / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True, exist_ok=True)
    ptxas.write_text(f"#!/bin/sh\necho 'stand-in, V{version}'\n")
    ptxas.chmod(0o755)


class Compiler:
    """The program. cuTile finds it, and what earlier tests compiled is forgotten."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.path, self.log = folder / "bin" / "tileiras", folder / "log"
        self.log.touch()
        has_ptxas(folder, VERSION)
        self.is_of(VERSION)
        binary = _compile._CompilerBinary(str(self.path), os.environ["PATH"], "", False)
        monkeypatch.setattr(_compile, "_find_compiler_bin", lambda: binary)
        for name in ("_get_compiler_version_string", "_get_max_supported_bytecode_version"):
            monkeypatch.setattr(_compile, name, cache(getattr(_compile, name).__wrapped__))
        monkeypatch.setattr(default_tile_context.config, "cache_dir", str(folder / "cache"))
        monkeypatch.setattr(kernel, "_hinted", cache(lambda: {}))
        for kept in (tiling.COLUMN_SUM, tiling.CLEAR_SLOTS):
            monkeypatch.setattr(kept, "_found", {})
        disk_cache._origin.cache_clear()

    def breaks(self, **how: str) -> None:
        """From now on it fails for these kernels, by the commands of the shell."""
        broken = "\n".join(f"{kernel}*) {command} ;;" for kernel, command in how.items())
        parts = {"version": self.version, "broken": broken or "none) ;;"}
        self.path.write_text(SCRIPT.format(log=self.log, **parts))
        self.path.chmod(0o755)

    def is_of(self, version: str) -> None:
        """From now on it prints this version. It is asked once."""
        self.version = f"echo 'stand-in, V{version}'"
        self.breaks()

    def ends_after(self, seconds: float) -> None:
        self.monkeypatch.setattr(kernel, "TIMEOUT", seconds)

    def runs(self, kernel: str) -> int:
        """How often it was run for a kernel."""
        return sum(line.startswith(kernel) for line in self.log.read_text().splitlines())


def compiling_launch(stream: int, launches, arrays: tuple) -> None:
    """Launch in the interpreter, and compile each kernel first, as cuTile does."""
    interpret = Interpreter("sm_90").run()
    for launch in launches:
        [call] = bound([launch], arrays)
        cubin_of(call, ARCH)
        interpret([launch], arrays, -1)


def compiling_gpu():
    """In this block, inside of pretended_gpu, launches compile."""
    return patch.object(cutile, "launch", compiling_launch)
