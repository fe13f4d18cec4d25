"""The instructions of a cubin, from NVIDIA's disassembler."""

import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_OPERAND = re.compile(r",\s*(?![^\[]*\])")  # commas, but none in brackets


class Instruction(NamedTuple):
    """guard: the predicate that must be true, such as "!P0", or None."""

    guard: str | None
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@cache
def nvdisasm() -> str | None:
    """Where it is: from the package nvidia-cuda-nvdisasm, or on PATH."""
    for folder in sys.path:
        for found in Path(folder).glob("nvidia/*/bin/nvdisasm"):
            return str(found)
    return shutil.which("nvdisasm")


def instructions(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of the one kernel of a cubin, and the index that each label stands at."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm(), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            found.append(_instruction(instruction[2]))
    return found, labels


def _instruction(text: str) -> Instruction:
    text = text.partition("(*")[0].removeprefix("{").strip()  # (*"SpillRefill"*) is a comment
    guard = None
    if text.startswith("@"):
        guard, text = text[1:].split(None, 1)
    name, _, rest = text.partition(" ")
    name, *modifiers = name.split(".")
    operands = tuple(_OPERAND.split(rest.strip())) if rest.strip() else ()
    operands = tuple(operand.strip().replace(".reuse", "") for operand in operands)
    return Instruction(guard, name, tuple(modifiers), operands, text)
