"""The driver, compiler and cache that cuTile uses on this machine."""

import re
import subprocess

from cuda.tile import _compile
from cuda.tile._cext import default_tile_context, get_driver_version


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 13000 is CUDA 13.0."""
    major, minor = get_driver_version()
    return major * 1000 + minor * 10


def compiler_path() -> str:
    """The path of the compiler tileiras.

    Raises FileNotFoundError, which says how to install tileiras, if there is none.
    """
    return _compile._find_compiler_bin().path


def compiler_version() -> str:
    """The version of tileiras, such as "13.4.92"; "unknown" if tileiras does not run."""
    try:
        text = _compile._get_compiler_version_string()
    except FileNotFoundError:
        text = None
    version = re.search(r"V(\d[\d.]*)", text or "")
    return version[1] if version else "unknown"


def cache_folder() -> str | None:
    """The folder in which cuTile keeps compiled kernels for later processes; None if it is off."""
    return default_tile_context.config.cache_dir


def driver_release() -> str:
    """The driver's version from nvidia-smi, such as "580.159.04".

    Without nvidia-smi it is the newest CUDA version that the driver supports.
    """
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return printed.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"CUDA {driver_version() / 1000:g}"
