"""Settings from environment variables. No other module of tilenorm reads these variables."""

import os
from pathlib import Path
from typing import NamedTuple


class Settings(NamedTuple):
    """The settings of this process.

    backend: the value of TILENORM_BACKEND ("cutile" or "reference"), or None if it is not set.
    tables: the folder of the tables that `python -m tilenorm tune` writes; it need not exist.
    """

    backend: str | None
    tables: Path


def settings() -> Settings:
    """Read the environment. The tables are in TILENORM_CACHE_DIR, or in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tables = os.environ.get("TILENORM_CACHE_DIR") or Path(cache) / "tilenorm"
    return Settings(os.environ.get("TILENORM_BACKEND") or None, Path(tables))
