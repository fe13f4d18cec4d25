"""The driver, compiler and cache that cuTile uses on this machine."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import metadata

DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
# cuTile takes the compiler from these packages if all three are of one release. It then ignores
# PATH and CUDA_HOME, so that their installation mends a compiler from any other place.
COMPILER_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
OLDEST_COMPILER = (13, 4)  # 13.3 has no grid_dependency_control_wait, 13.2 has no sm_90
REMEDY = "pip install " + " ".join(f'"{name}>=13.4,<14"' for name in COMPILER_PACKAGES)


class CompileError(Exception):
    """A kernel does not compile on this machine. The message is one line that names it."""


class ToolchainError(CompileError):
    """The compiler does not serve, whatever the kernel. The message names the remedy."""


@cache
def cuda_tile_missing() -> str | None:
    """Why cuda.tile cannot be imported here, and the remedy, or None.

    Whoever imports cuda.tile asks this first. It is then loaded when the kernels are first asked
    for, because it takes 0.2 s, which a process that imports tilenorm alone does not pay.
    """
    try:
        from cuda.tile import _compile  # noqa: F401
        from cuda.tile._cext import default_tile_context  # noqa: F401
    except ImportError as error:
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else "does not load"
        remedy = "on Linux and Windows: pip install 'cuda-tile>=1.7,<2'"
        return f"cuda-tile {state} ({error}); {remedy}"
    return None


def driver_version() -> int:
    """The newest CUDA version that the driver supports: 13000 is CUDA 13.0.

    The driver itself is asked, because cuTile raises RuntimeError for one before CUDA 13.
    Raises OSError without a driver.
    """
    version = ctypes.c_int()
    ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def compiler_path() -> str:
    """The path of the compiler tileiras. Raises FileNotFoundError if there is none."""
    from cuda.tile import _compile

    return _compile._find_compiler_bin().path


def compiler_version() -> str:
    """The version of tileiras, such as "13.4.92"; "unknown" if tileiras does not run."""
    from cuda.tile import _compile

    try:
        text = _compile._get_compiler_version_string()
    except FileNotFoundError:
        text = None
    return _version_in(text)


def _version_in(text: str | None) -> str:
    """The version in what tileiras or ptxas prints of itself."""
    version = re.search(r"V(\d[\d.]*)", text or "")
    return version[1] if version else "unknown"


@cache
def compiler_problem() -> str | None:
    """Why tileiras cannot compile the kernels, and the remedy, or None. Nothing is compiled."""
    from cuda.tile import _compile

    try:
        path = compiler_path()
        printed = _compile._get_compiler_version_string()
    except FileNotFoundError:
        packages = ", ".join(f"{name} {package_version(name)}" for name in COMPILER_PACKAGES)
        packages += "; all three have to be of one release"
        return f"its compiler tileiras is missing ({packages}): {REMEDY}"
    if printed is None:
        return f"its compiler {path} does not run: {REMEDY}"
    version = compiler_version()
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST_COMPILER:
        needs = "the kernels need {}.{} or later".format(*OLDEST_COMPILER)
        return f"its compiler {path} is tileiras {version}; {needs}: {REMEDY}"
    return None


@cache
def toolkit_problem() -> str | None:
    """Why this machine's CUDA toolkit may be the reason for a kernel that does not compile, and the
    remedy; None where it is not.

    tileiras runs ptxas and libnvvm of the toolkit that a variable names, or else those beside
    itself. If they are of another release, tileiras fails on most kernels, and does not say why.
    Some pairs serve, such as tileiras 13.4 with ptxas 13.3. So this is asked only after a failure.
    """
    from cuda.tile import _compile

    binary = _compile._find_compiler_bin()
    # cuTile hides CUDA_HOME and CUDA_PATH from the tileiras of the packages. An empty variable
    # counts too.
    names = ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH")[: 3 if binary.pass_cuda_home_var else 1]
    variable = next((name for name in names if name in os.environ), None)
    beside = os.path.dirname(os.path.dirname(os.path.realpath(binary.path)))
    folder = os.environ[variable] if variable else beside
    ptxas = shutil.which("ptxas", path=os.path.join(folder, "bin"))
    version = compiler_version()
    ptxas_version = "missing"
    if ptxas is not None:
        ptxas_version = _version_in(_compile._try_get_compiler_version(ptxas))
        if ptxas_version.split(".")[:2] == version.split(".")[:2]:
            return None
    text = f"its compiler {binary.path} (tileiras {version}) fails: it uses ptxas and libnvvm of "
    text += f"{variable}={folder}" if variable else folder
    text += f", where ptxas is {ptxas_version}, and needs those of its own release: "
    if variable is None:
        return text + REMEDY
    return f"{text}unset {variable}" + (f", or {REMEDY}" if variable in names[1:] else "")


def package_version(package: str) -> str:
    """The version of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cache_folder() -> str | None:
    """The folder in which cuTile keeps compiled kernels for later processes; None if it is off."""
    from cuda.tile._cext import default_tile_context

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
