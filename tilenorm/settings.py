"""Settings from environment variables. No other module of tilenorm reads these variables."""

import os
from pathlib import Path
from typing import NamedTuple


class Settings(NamedTuple):
    """The settings of this process.

    backend: the value of TILENORM_BACKEND ("cutile" or "reference"), or None if it is not set.
    tables: the folder of the tables that `python -m tilenorm tune` writes; it need not exist. None
    where no variable names it and the user has no home folder, as in some containers. debug:
    whether TILENORM_DEBUG asks for checks of values, which wait for the GPU. native: whether calls
    may be served by the extension in C++, which TILENORM_NATIVE=0 forbids. engines: whether
    TILENORM_ENGINES=1 asks for tilenorm's norms in inference engines. rounding: the value of
    TILENORM_ROUNDING ("late" or "early"), which is that of all norms there, or None. one_result:
    whether TILENORM_ONE_RESULT=1 asks for one order of sums of a row in backward passes, in norms
    with a gate and in modulated norms, too (launch/order.py).
    """

    backend: str | None
    tables: Path | None
    debug: bool = False
    native: bool = True
    engines: bool = False
    rounding: str | None = None
    one_result: bool = False


def settings() -> Settings:
    """Read the environment. The tables are in TILENORM_CACHE_DIR, or in the user's cache folder."""
    tables = os.environ.get("TILENORM_CACHE_DIR")
    if not tables:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        tables = None if cache.startswith("~") else Path(cache) / "tilenorm"
    debug = os.environ.get("TILENORM_DEBUG", "0") not in ("", "0")
    native = os.environ.get("TILENORM_NATIVE", "1") != "0"
    backend = os.environ.get("TILENORM_BACKEND") or None
    engines = os.environ.get("TILENORM_ENGINES", "0") not in ("", "0")
    rounding = os.environ.get("TILENORM_ROUNDING") or None
    one_result = os.environ.get("TILENORM_ONE_RESULT", "0") not in ("", "0")
    return Settings(backend, tables and Path(tables), debug, native, engines, rounding, one_result)
