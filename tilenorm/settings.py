"""What the environment asks for: read here and nowhere else."""

import os
from pathlib import Path
from typing import NamedTuple


class Settings(NamedTuple):
    """backend: TILENORM_BACKEND, "cutile" or "reference". tables: the folder of a user's tables."""

    backend: str | None
    tables: Path


def settings() -> Settings:
    """TILENORM_CACHE_DIR, if set, is the folder; it may be one that does not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tables = os.environ.get("TILENORM_CACHE_DIR") or Path(cache) / "tilenorm"
    return Settings(os.environ.get("TILENORM_BACKEND") or None, Path(tables))
