"""Kernels that an earlier process compiled, found without being traced again.

cuTile keeps cubins by their bytecode, which it makes anew from a kernel's Python in every process,
in 0.05 to 0.3 s a kernel. Here a cubin's key is of what that bytecode is made of. Cubins lie in
cuTile's own cache, next to those it keeps, and leave it with them.
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

# What a process can be told that changes nothing of a kernel; anything else may be meant to show or
# to alter its compilation.
HARMLESS = {"CUDA_TILE_CACHE_DIR", "CUDA_TILE_CACHE_SIZE", "CUDA_TILE_TEMP_DIR"}


class Kernel(ct.kernel):
    """A cuTile kernel that asks the cache before it is traced."""

    def _compile(
        self,
        signature: KernelSignature,
        context: TileContext,
        compute_capability: tuple[int, int] | None = None,
    ):
        """What cuTile calls when it has not launched a signature before, and what it returns."""
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
    """The sources of all kernels, and which cuTile, compiler and Python make code of them."""
    sources = hashlib.sha256()
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        sources.update(path.name.encode() + path.read_bytes())
    compiler = os.path.realpath(compiler_path())
    found = os.stat(compiler)
    made = f"{compiler} {found.st_size} {found.st_mtime_ns}"
    return f"{sources.hexdigest()} cuda-tile {ct.__version__} {made} Python {sys.version_info[:2]}"
