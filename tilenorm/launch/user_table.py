"""A user's own measured configurations: what `python -m tilenorm tune` writes and plans read.

One JSON file an architecture, in the folder of settings.py. It serves only the versions that it was
measured with, and is used whole or not at all.
"""

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import NamedTuple, get_args, get_origin, get_type_hints

import cuda.tile as ct

from ..settings import settings
from ..spec import NormSpec
from .config import FORMS, Backward, Config, Hints, RowForward, Served, SharedForward, StreamForward
from .target import Target
from .toolchain import compiler_version

FORMAT = 3  # to be raised, too, when kernels change so much that older measurements mislead


class TableWarning(UserWarning):
    """A user's table is ignored, and why."""


class Key(NamedTuple):
    """Which specs an entry serves: rows of N, of one operation, in one direction.

    op: as in the shipped tables. item_bytes: of the widest tensor with rows. aligned: as in
    NormSpec. heads: whether weights belong to heads.
    """

    direction: str
    op: str
    item_bytes: int
    hidden: int
    aligned: bool
    heads: bool

    @classmethod
    def of(cls, spec: NormSpec, direction: str, op: str) -> "Key":
        return cls(direction, op, spec.widest_item, spec.hidden, spec.aligned, spec.heads > 0)


@dataclass(frozen=True)
class Entry:
    """A configuration and what was measured of it: median and spread of the samples, GB/s.

    rows, spec: what was timed. spills: bytes a thread by kernel. gpu, driver, date: where and when.
    """

    key: Key
    config: RowForward | StreamForward | SharedForward | Backward
    us: float
    spread: float
    samples: int
    gb_s: float
    rows: int
    spec: str
    registers: dict[str, int]
    spills: dict[str, int]
    gpu: str
    driver: str
    date: str


def path_of(arch: str) -> Path:
    return settings().tables / f"{arch}.json"


def versions() -> dict[str, str]:
    """On which code a kernel's speed depends."""
    return {"tileiras": compiler_version(), "cuda-tile": ct.__version__}


def write(path: Path, arch: str, entries: Iterable[Entry]) -> None:
    """Put entries into the table at a path, which is made, or replaced where it does not serve.

    Plans that are made from then on see them.
    """
    try:
        kept = {entry.key: entry for entry in read(path, arch)}
    except (OSError, ValueError):
        kept = {}
    kept |= {entry.key: entry for entry in entries}
    table = {"format": FORMAT, "arch": arch, "versions": versions()}
    table["entries"] = [_encoded(kept[key]) for key in sorted(kept)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever reads meanwhile finds the old table or the new one.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(table, indent=1) + "\n")
    draft.replace(path)
    configs.cache_clear()


def read(path: Path, arch: str) -> list[Entry]:
    """The entries of a table. Raises ValueError, which says why, for one that does not serve here.

    Raises OSError for one that cannot be read.
    """
    table = json.loads(path.read_text())
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it is no table of format {FORMAT}")
    if table.get("arch") != arch:
        raise ValueError(f"it is of {table.get('arch')}, not of {arch}")
    if table.get("versions") != versions():
        raise ValueError(f"it was measured with {table.get('versions')}, here are {versions()}")
    known = {"format", "arch", "versions", "entries"}
    if set(table) != known or not isinstance(table["entries"], list):
        raise ValueError(f"its fields are {', '.join(table)}")
    return [_decoded(number, entry, arch) for number, entry in enumerate(table["entries"])]


@cache
def configs(arch: str) -> dict[Key, Config]:
    """What plans for an architecture read: once a process, with one warning for a table ignored."""
    path = path_of(arch)
    try:
        return {entry.key: entry.config for entry in read(path, arch)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        message = f"tilenorm ignores {path}: {error}; `python -m tilenorm tune` makes a new one"
        warnings.warn(message, TableWarning, stacklevel=2)
        return {}


def _encoded(entry: Entry) -> dict:
    form = {"form": type(entry.config).__name__}
    return asdict(entry) | {"key": entry.key._asdict(), "config": form | asdict(entry.config)}


def _decoded(number: int, data: dict, arch: str) -> Entry:
    try:
        data = dict(data)
        config = dict(data.pop("config"))
        forms = {form.__name__: form for form in FORMS}
        config = _built(forms[config.pop("form")], config)
        key = Key(**data.pop("key"))
        entry = _built(Entry, data | {"key": key, "config": config})
        reason = config.refusal(Served(key.hidden, key.item_bytes, key.aligned, Target.of(arch)))
        if config.direction != key.direction:
            reason = f"{type(config).__name__} is none of the {key.direction} pass"
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"entry {number}: {error}") from error
    if reason:
        raise ValueError(f"entry {number}, {key}: {reason}")
    return entry


def _built(form: type, data: dict):
    """A dataclass from exactly its fields, each of its type."""
    kinds = get_type_hints(form)
    names = [field.name for field in fields(form)]
    if set(data) != set(names):
        raise ValueError(f"{form.__name__} has {', '.join(data)}; it takes {', '.join(names)}")
    values = {}
    for name, value in data.items():
        if kinds[name] is Hints:
            value = _built(Hints, value)
        elif isinstance(value, list):
            value = tuple(value)
        kind = kinds[name]
        options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if type(value) not in {get_origin(option) or option for option in options}:
            raise ValueError(f"{form.__name__}: {name} is {value!r}")
        values[name] = value
    return form(**values)
