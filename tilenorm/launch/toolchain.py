"""What cuTile itself finds on this machine: driver, compiler, cache."""

from cuda.tile import _compile
from cuda.tile._cext import default_tile_context, get_driver_version


def driver_version() -> int:
    """The newest CUDA version that the driver serves, 13000 for 13.0."""
    major, minor = get_driver_version()
    return major * 1000 + minor * 10


def compiler_path() -> str:
    """Where tileiras is. Raises FileNotFoundError, with how to install it, if nowhere."""
    return _compile._find_compiler_bin().path


def cache_folder() -> str | None:
    """Where cuTile keeps what it compiled, for any process of this user; None if it does not."""
    return default_tile_context.config.cache_dir
