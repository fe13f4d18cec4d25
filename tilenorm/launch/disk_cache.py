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
from cuda.tile._cext import TileContext, get_compute_capability
from cuda.tile.compilation import KernelSignature
from cutile_cache._cache import MetadataV1, cache_lookup, cache_store

from .. import kernels
from .toolchain import compiler_path

# Environment variables that do not change a kernel. Any other CUDA_TILE_ variable may change or log
# the compilation, so it turns this module off.
HARMLESS = {"CUDA_TILE_CACHE_DIR", "CUDA_TILE_CACHE_SIZE", "CUDA_TILE_TEMP_DIR"}


class Kernel(ct.kernel):
    """A cuTile kernel that looks in the cache before it is traced."""

    def _compile(
        self,
        signature: KernelSignature,
        context: TileContext,
        compute_capability: tuple[int, int] | None = None,
    ):
        """Compile for a signature. cuTile calls this method when a signature is launched first."""
        folder = context.config.cache_dir
        if folder is None or any(k.startswith("CUDA_TILE_") for k in os.environ.keys() - HARMLESS):
            return super()._compile(signature, context, compute_capability)
        name = self._pyfunc.__name__
        symbol = signature.symbol or signature.with_mangled_symbol(name).symbol
        capability = compute_capability or get_compute_capability()
        parts = (name, signature.with_symbol(symbol), self._compiler_options, capability)
        key = hashlib.sha256("\n".join([_origin(), *map(repr, parts)]).encode()).hexdigest()
        if cubin := cache_lookup(folder, key):
            return cubin, symbol, None, ()
        cubin, symbol, _, libraries = compiled = super()._compile(signature, context, capability)
        if not libraries:
            metadata = MetadataV1(kernel_names=[symbol])
            cache_store(folder, key, cubin, metadata.to_dict())
        return compiled


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
