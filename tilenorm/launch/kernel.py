"""A kernel that compiles once, in bounded time, and remembers where it does not compile.

This module has the only calls to cuTile's launch.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from threading import Lock

import cuda.tile as ct
from cuda.tile._cext import TileContext, get_compute_capability

# The function as cuTile's C extension defines it. Other packages replace cuda.tile.launch for the
# whole process: TileGym by a function that takes no programmatic_dependent_launch.
from cuda.tile._cext import launch as launch_kernel
from cuda.tile.compilation import KernelSignature
from cutile_cache._cache import cache_lookup

from . import disk_cache
from .calls import Launch
from .config import Hints
from .toolchain import CompileError, ToolchainError, compiler_problem, make_folder, toolkit_problem

TIMEOUT = 120.0  # seconds of one run of the compiler. The slowest kernel takes 5.


class Kernel(ct.kernel):
    """A cuTile kernel that looks in the cache before it is traced.

    Threads that need the same code at once wait for one compilation. A compilation that failed is
    not repeated in this process.
    """

    def __init__(self, function: Callable, /, **hints):
        super().__init__(function, **hints)
        self._lock, self._found = Lock(), {}

    def _compile(
        self,
        signature: KernelSignature,
        context: TileContext,
        compute_capability: tuple[int, int] | None = None,
    ):
        """Compile for a signature. cuTile calls this method when a signature is launched first.

        Raises CompileError where the compiler is missing, fails, or does not end.
        """
        symbol = signature.symbol or signature.with_mangled_symbol(self._pyfunc.__name__).symbol
        signature = signature.with_symbol(symbol)
        capability = compute_capability or get_compute_capability()
        known = repr(signature), capability
        with self._lock:
            if known not in self._found:
                self._found[known] = self._first(signature, bounded(context), capability)
        compiled = self._found[known]
        if isinstance(compiled, CompileError):
            # A new exception, because a raised one keeps its frames.
            raise type(compiled)(str(compiled))
        return compiled

    def _first(
        self, signature: KernelSignature, context: TileContext, capability
    ) -> tuple | CompileError:
        """What cuTile's _compile returns, or why there is none."""
        try:
            return self._cached(signature, context, capability)
        except (ct.TileError, OSError, subprocess.SubprocessError) as error:
            problem = compiler_problem()
            if problem is None and isinstance(error, ct.TileError):
                problem = toolkit_problem()
            if problem is not None:
                return ToolchainError(problem)
            name = self._pyfunc.__name__
            arch = "sm_{}{}".format(*capability)
            reason = f"does not compile for {arch}: {reason_of(error)}"
            return CompileError(f"its kernel {name} {reason}")

    def _cached(self, signature: KernelSignature, context: TileContext, capability) -> tuple:
        folder = context.config.cache_dir
        if disk_cache.is_off(folder):
            return super()._compile(signature, context, capability)
        key = disk_cache.key_of(self, signature, capability)
        if cubin := cache_lookup(folder, key):
            return cubin, signature.symbol, None, ()
        cubin, symbol, _, libraries = compiled = super()._compile(signature, context, capability)
        if not libraries:
            disk_cache.store(folder, key, cubin, symbol)
        return compiled


def bounded(context: TileContext) -> TileContext:
    """The context with a time limit, and without a cache folder that cannot be made.

    cuTile has no time limit unless CUDA_TILE_COMPILER_TIMEOUT_SEC sets one, and raises OSError
    after it has compiled a kernel if it cannot make the folder.
    """
    config = context.config
    if config.compiler_timeout_sec is None:
        config = replace(config, compiler_timeout_sec=TIMEOUT)
    if config.cache_dir is not None:
        try:
            make_folder(config.cache_dir)
        except OSError:
            config = replace(config, cache_dir=None)
    return TileContext(config=config)


def reason_of(error: Exception) -> str:
    """The message of a failed compilation in one line."""
    return " ".join(getattr(error, "message", str(error)).split())[:400]


def hinted(kernel: ct.kernel, hints: Hints) -> Kernel:
    """A kernel with compiler hints. It is remembered, because it holds its compiled code.

    Threads that ask at once get the same kernel, because cuTile may crash if a kernel is destroyed
    after its launch. A second kernel that a thread made meanwhile was never launched.
    """
    key = kernel._pyfunc, hints
    kernels = _hinted()
    return kernels.get(key) or kernels.setdefault(key, Kernel(kernel._pyfunc, **hints.given()))


@cache
def _hinted() -> dict[tuple[Callable, Hints], Kernel]:
    return {}


def launch(stream: int, launches: Sequence[Launch], arrays: tuple) -> None:
    """Queue the launches, with these arrays filled in, on a CUDA stream of the current device."""
    for kernel, grid, before, take, after, overlap in launches:
        arguments = (*before, take(arrays), *after)
        if overlap:
            launch_kernel(stream, grid, kernel, arguments, programmatic_dependent_launch=True)
        else:
            launch_kernel(stream, grid, kernel, arguments)
