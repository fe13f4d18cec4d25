"""Finds kernels that an earlier process compiled, without tracing them again.

The key of a cubin in cuTile's cache is its bytecode. To compute that key, every process traces the
kernel's Python again, which takes 0.05 to 0.3 s for each kernel. This module adds a second key: a
hash of everything that the bytecode depends on. The cubins of this module lie in cuTile's cache
folder, and cuTile evicts them like its own.
"""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import cuda.tile as ct
from cuda.tile.compilation import KernelSignature
from cutile_cache._cache import MetadataV1, cache_store

from .. import kernels
from .toolchain import compiler_path

# Environment variables that do not change a kernel. Any other CUDA_TILE_ variable may change or log
# the compilation, so it turns this module off.
HARMLESS = {"CUDA_TILE_CACHE_DIR", "CUDA_TILE_CACHE_SIZE", "CUDA_TILE_TEMP_DIR"}
HARMLESS |= {"CUDA_TILE_COMPILER_TIMEOUT_SEC"}


def key_of(kernel: ct.kernel, signature: KernelSignature, capability: tuple[int, int]) -> str:
    """The key of what a kernel compiles to. The signature has a symbol."""
    parts = kernel._pyfunc.__name__, signature, kernel._compiler_options, capability
    return hashlib.sha256("\n".join([_origin(), *map(repr, parts)]).encode()).hexdigest()


def is_off(folder: str | None) -> bool:
    """Whether kernels are neither looked up in a folder nor stored there."""
    return folder is None or any(k.startswith("CUDA_TILE_") for k in os.environ.keys() - HARMLESS)


def store(folder: str, key: str, cubin: bytes, symbol: str) -> None:
    """Keep a cubin for later processes. A folder that cannot be written is not an error."""
    cache_store(folder, key, cubin, MetadataV1(kernel_names=[symbol]).to_dict())


@cache
def _origin() -> str:
    """A hash of the kernels' sources, and the identity of cuTile, the compiler and Python."""
    sources = hashlib.sha256()
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        sources.update(path.name.encode() + path.read_bytes())
    compiler = os.path.realpath(compiler_path())
    stat = os.stat(compiler)
    built = f"{compiler} {stat.st_size} {stat.st_mtime_ns}"
    python = f"Python {sys.version_info[:2]}"
    return f"{sources.hexdigest()} cuda-tile {ct.__version__} {built} {python}"
