"""A user's own measured configurations: `python -m tilenorm tune` writes them, plans read them.

Each architecture has one JSON file, in the folder that settings.py names. A table serves only the
versions of cuTile and of its compiler that it was measured with. A table with one invalid entry is
ignored as a whole.
"""

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ..settings import settings
from ..spec import MAX_TERMS, NormSpec
from .config import Config, Served, built, data_of
from .target import Target
from .toolchain import compiler_version

FORMAT = 3  # raise it too if kernels change so much that older measurements mislead


class TableWarning(UserWarning):
    """A user's table is ignored; the message says why."""


@dataclass(frozen=True, order=True)
class Key:
    """The specs that an entry serves."""

    direction: str
    op: str  # the operation, as in the shipped tables
    item_bytes: int  # bytes of an element of the widest tensor that has rows
    hidden: int  # N
    aligned: bool  # as in NormSpec
    heads: bool  # each head has a weight of its own
    terms: int = 1  # how many tensors make up dy in a backward pass; older tables do not have it

    @classmethod
    def of(cls, spec: NormSpec, direction: str, op: str, terms: int = 1) -> "Key":
        heads = spec.heads > 0
        return cls(direction, op, spec.widest_item, spec.hidden, spec.aligned, heads, terms)


@dataclass(frozen=True)
class Entry:
    """A configuration and its measurement."""

    key: Key
    config: Config
    us: float  # the median of the samples
    spread: float  # of the samples, relative to the median
    samples: int  # how many samples
    gb_s: float
    rows: int  # of what was timed
    spec: str  # of what was timed
    registers: dict[str, int]  # of a thread, by kernel
    spills: dict[str, int]  # bytes that a thread spills, by kernel
    gpu: str  # the last three say where and when it was measured
    driver: str
    date: str


def path_of(arch: str) -> Path:
    """The file of an architecture's table. Raises FileNotFoundError where there is no folder."""
    folder = settings().tables
    if folder is None:
        raise FileNotFoundError("there is no home folder: set TILENORM_CACHE_DIR to a folder")
    return folder / f"{arch}.json"


def versions() -> dict[str, str]:
    """The versions of the tools on which a kernel's speed depends."""
    import cuda.tile as ct  # may be missing; then nothing is planned, and nobody asks

    return {"tileiras": compiler_version(), "cuda-tile": ct.__version__}


def write(path: Path, arch: str, entries: Iterable[Entry]) -> None:
    """Add entries to the table at a path. A missing or invalid table is replaced.

    Plans that are made later use the entries.
    """
    try:
        kept = {entry.key: entry for entry in read(path, arch)}
    except (OSError, ValueError):
        kept = {}
    kept |= {entry.key: entry for entry in entries}
    table = {"format": FORMAT, "arch": arch, "versions": versions()}
    entries = [kept[key] for key in sorted(kept)]
    table["entries"] = [asdict(entry) | {"config": data_of(entry.config)} for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    # A process that reads at the same time finds the old table or the new one.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(table, indent=1) + "\n")
    draft.replace(path)
    configs.cache_clear()


def read(path: Path, arch: str) -> list[Entry]:
    """The entries of a table.

    Raises OSError if the file cannot be read, and ValueError with the reason if the table is
    invalid or is for another machine.
    """
    table = json.loads(path.read_text())
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it is not a table of format {FORMAT}")
    if table.get("arch") != arch:
        raise ValueError(f"it is for {table.get('arch')}, not for {arch}")
    if table.get("versions") != versions():
        raise ValueError(f"it was measured with {table.get('versions')}, not with {versions()}")
    known = {"format", "arch", "versions", "entries"}
    if set(table) != known or not isinstance(table["entries"], list):
        raise ValueError(f"its fields are {', '.join(table)}")
    return [_decoded(number, entry, arch) for number, entry in enumerate(table["entries"])]


@cache
def configs(arch: str) -> dict[Key, Config]:
    """The configurations of a user's table. A process reads the table, or warns about it, once."""
    try:
        path = path_of(arch)
        return {entry.key: entry.config for entry in read(path, arch)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        message = f"tilenorm ignores {path}: {error}; `python -m tilenorm tune` makes a new one"
        warnings.warn(message, TableWarning, stacklevel=2)
        return {}


def _decoded(number: int, data: dict, arch: str) -> Entry:
    try:
        entry = built(Entry, data)
        key, config = entry.key, entry.config
        reason = config.refusal(Served(key.hidden, key.item_bytes, key.aligned, Target.of(arch)))
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"entry {number}: {error}") from error
    if not 1 <= key.terms <= MAX_TERMS:
        reason = f"a backward pass takes 1 to {MAX_TERMS} terms of dy"
    if config.direction != key.direction:
        reason = f"{type(config).__name__} does not serve the {key.direction} pass"
    if key.op.startswith("modulated") and sum(config.widths or (key.hidden,)) < key.hidden:
        reason = "blocks do not share rows that are modulated"
    if reason:
        raise ValueError(f"entry {number}, {key}: {reason}")
    return entry
