"""The driver, compiler and cache that cuTile uses on this machine."""

import ctypes
import os
import re
import subprocess
import tempfile

try:  # here alone: where it is missing, nothing else that imports cuda.tile is imported
    from cuda.tile import _compile
    from cuda.tile._cext import default_tile_context

    CUDA_TILE_MISSING = None
except ImportError as error:
    _state = "is not installed" if isinstance(error, ModuleNotFoundError) else "does not load"
    CUDA_TILE_MISSING = (
        f"cuda-tile {_state} ({error}); on Linux and Windows: pip install 'cuda-tile>=1.7,<1.8'"
    )

DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"


class CompileError(Exception):
    """A kernel does not compile on this machine. The message is one line that names it."""


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 13000 is CUDA 13.0.

    The driver itself is asked, because cuTile raises RuntimeError for one before CUDA 13.
    Raises OSError without a driver.
    """
    version = ctypes.c_int()
    ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


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


def toolkit_variable() -> str | None:
    """The environment variable, as NAME=VALUE, that tells tileiras which CUDA toolkit to use.

    None if it is not set, or if cuTile hides it from tileiras, as from the one of the pip package.
    """
    if not _compile._find_compiler_bin().pass_cuda_home_var:
        return None
    found = (name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    return next((f"{name}={os.environ[name]}" for name in found), None)


def cache_folder() -> str | None:
    """The folder in which cuTile keeps compiled kernels for later processes; None if it is off."""
    return default_tile_context.config.cache_dir


def make_folder(folder: str) -> None:
    """Make cuTile's cache folder.

    Raises OSError if it cannot be made, or if there is no home folder: cuTile would then make a
    folder named ~ in the working directory.
    """
    if folder.startswith("~"):
        raise FileNotFoundError("there is no home folder, and CUDA_TILE_CACHE_DIR names no other")
    os.makedirs(folder, exist_ok=True)


def cache_problem() -> str | None:
    """Why cuTile keeps no compiled kernel for later processes, or None."""
    folder = cache_folder()
    if folder is None:
        return "cuTile's cache is off (CUDA_TILE_CACHE_DIR)"
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))  # a full disk has no room for this
    except OSError as error:
        return f"cuTile's cache cannot be written ({error})"
    return None


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
