"""What cuTile itself finds on this machine: driver, compiler, cache."""

import re
import subprocess

from cuda.tile import _compile
from cuda.tile._cext import default_tile_context, get_driver_version


def driver_version() -> int:
    """The newest CUDA version that the driver serves, 13000 for 13.0."""
    major, minor = get_driver_version()
    return major * 1000 + minor * 10


def compiler_path() -> str:
    """Where tileiras is. Raises FileNotFoundError, with how to install it, if nowhere."""
    return _compile._find_compiler_bin().path


def compiler_version() -> str:
    """Of tileiras, "13.4.92"; "unknown" where there is none that runs. Asked once a process."""
    try:
        told = _compile._get_compiler_version_string()
    except FileNotFoundError:
        told = None
    found = re.search(r"V(\d[\d.]*)", told or "")
    return found[1] if found else "unknown"


def cache_folder() -> str | None:
    """Where cuTile keeps what it compiled, for any process of this user; None if it does not."""
    return default_tile_context.config.cache_dir


def driver_release() -> str:
    """As nvidia-smi tells it, "580.159.04"; where it does not, the CUDA version that it serves."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return told.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"CUDA {driver_version() / 1000:g}"
