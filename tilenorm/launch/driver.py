"""Launches that differ from earlier ones in the addresses of their arrays alone, by CUDA's driver.

cuda.tile.launch wraps every array, hashes every argument and asks the driver for the arrays'
context, in every call. None of that changes where the shapes, strides, constants and alignments are
those of an earlier call. Then the arguments are laid out once, and a call writes the addresses.

The arguments have the binary format of cuTile's calling conventions, which it documents
(https://docs.nvidia.com/cuda/cutile-python/compilation.html). The driver is asked whether the
compiled kernel takes arguments of these sizes.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_uint, c_void_p
from functools import cache, partial
from typing import Any, NamedTuple

from cuda.tile._cext import default_tile_context
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ParameterConstraint,
    ScalarConstraint,
    TupleConstraint,
)

from .calls import Launch
from .kernel import Kernel
from .toolchain import DRIVER

# A function of a stream and the addresses of a call. It returns whether the driver has queued all
# launches. If it has not, cuda.tile.launch says what is wrong.
Repeated = Callable[[int, Sequence[int]], bool]
WORD = 8  # bytes
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
FORMATS = {"float32": "<f", "int32": "<i", "int64": "<q"}  # of numbers, by cuTile's dtypes


class _Config(ctypes.Structure):
    """CUlaunchConfig. cuTile launches blocks of the shape (1, 1, 1)."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("name", ctypes.c_uint64), ("value", c_uint * 16))


class Argument(NamedTuple):
    """An argument in its binary format. place: of an address, in a call's addresses."""

    size: int
    bits: int = 0
    place: int | None = None


class Prepared(NamedTuple):
    """A launch. function: the driver's number of the compiled kernel on the current device."""

    function: int
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    overlap: bool


def repeating(
    queue: Callable,
    launches: Sequence[Prepared],
    addresses: int,
    enter: Callable[[], bool] = lambda: False,
) -> Repeated:
    """A function that makes launches with other addresses, on the same device.

    queue: the driver's cuLaunchKernelEx. addresses: how many a call has. enter: gives the thread
    the device's context, and says whether it had none. Threads that call at once write into
    different copies of the arguments. Where code has left the caches of a CPU, as in a step of a
    model, each object that a call touches takes longer than the call itself. The function's
    attribute `launches` holds the launches, and `parts` what in_parts returns.
    """
    idle: list[tuple] = []
    write = struct.Struct(f"{addresses}Q").pack_into

    def repeat(stream: int, starts: Sequence[int]) -> bool:
        try:
            copy = idle.pop()
        except IndexError:  # the first call, or one beside it
            copy = _copy(launches, addresses)
        words, calls, _ = copy
        write(words, 0, *starts)
        failed, again = 0, True
        while again:
            failed = 0
            for config, at, function, arguments in calls:
                config.stream = stream
                failed = failed or queue(at, function, arguments, None)
            again = bool(failed) and enter()
        idle.append(copy)
        return not failed

    repeat.launches = tuple(launches)  # type: ignore[attr-defined]
    repeat.parts = idle, write, queue  # type: ignore[attr-defined]
    return repeat


def in_parts(repeat: Repeated) -> tuple[list, Callable, Callable]:
    """For who launches without a call of `repeat`: its idle copies of the arguments, each as _copy
    returns it; what writes the addresses into one; and the driver's function. There are no copies
    where the driver is not called, as in tests.
    """
    return getattr(repeat, "parts", ([], never, never))


def _copy(launches: Sequence[Prepared], addresses: int) -> tuple:
    """The words that hold the arguments, what the driver takes for each launch, and what that
    refers to.
    """
    constants = [a.bits for launch in launches for a in launch.arguments]
    words = (ctypes.c_uint64 * (addresses + len(constants)))(*[0] * addresses, *constants)
    start, next_word = ctypes.addressof(words), addresses
    calls, kept = [], []
    for launch in launches:
        places = []
        for argument in launch.arguments:
            places.append(next_word if argument.place is None else argument.place)
            next_word += 1
        arguments = (c_void_p * len(places))(*[start + WORD * place for place in places])
        attributes = (_Attribute * launch.overlap)()
        for attribute in attributes:
            attribute.name, attribute.value[0] = OVERLAP, 1
        grid = (*launch.grid, 1, 1)[:3]
        config = _Config(grid, (1, 1, 1), 0, None, ctypes.addressof(attributes), len(attributes))
        at = ctypes.addressof(config)
        calls.append((config, at, launch.function, ctypes.addressof(arguments)))
        kept += arguments, attributes
    return words, calls, kept


def never(stream: int, starts: Sequence[int]) -> bool:
    """In the place of what `repeating` returns, for launches that cuda.tile.launch has to make."""
    return False


def prepare(
    index: int,
    stream: int,
    launches: Sequence[Launch],
    arrays: tuple,
    numbered: tuple,
    addresses: int,
) -> Repeated | None:
    """What repeats launches that cuda.tile.launch has made with these arrays; None while the stream
    is captured, because loading a kernel may end a capture.

    index: the device's. numbered: the same as `arrays`, with the place of each array among a call's
    addresses. addresses: how many a call has.
    """
    driver, capturing, enter = _driver(), ctypes.c_int(), partial(_enter, index)
    enter()
    if driver.cuStreamIsCapturing(stream, byref(capturing)) or capturing.value:
        return None
    prepared = []
    for kernel, grid, before, take, after, overlap in launches:
        given, places = ((*before, take(of), *after) for of in (arrays, numbered))
        signature = signature_of(kernel, given)
        arguments = tuple(arguments_of(signature, given, places))
        code, symbol, _, libraries = kernel._compile(signature, default_tile_context)
        function = None if libraries else _function(code, symbol, _context())
        if function is None or sizes_of(function) != [a.size for a in arguments]:
            return never
        prepared.append(Prepared(function, grid, arguments, overlap))
    return repeating(driver.cuLaunchKernelEx, prepared, addresses, enter)


def signature_of(kernel: Kernel, given: tuple) -> KernelSignature:
    """The signature with which cuTile's launch function compiles: of the first convention, unless
    the second is needed. Another one would be compiled once more.
    """
    second = KernelSignature.from_kernel_args(kernel, given, CallingConvention.cutile_python_v2())
    if any(map(_needs_second, second.parameters)):
        return second
    return KernelSignature.from_kernel_args(kernel, given, CallingConvention.cutile_python_v1())


def _needs_second(constraint: ParameterConstraint) -> bool:
    if isinstance(constraint, ArrayConstraint):
        return any(size is not None for size in constraint.shape_constant)
    return isinstance(constraint, TupleConstraint)


def arguments_of(signature: KernelSignature, given: tuple, places: tuple) -> Iterator[Argument]:
    """The arguments of a kernel in their binary format, which both conventions share."""
    for each in zip(signature.parameters, given, places, strict=True):
        yield from _arguments(*each)


def _arguments(constraint: ParameterConstraint, value: Any, place: Any) -> Iterator[Argument]:
    match constraint:
        case TupleConstraint():
            for each in zip(constraint.items, value, place, strict=True):
                yield from _arguments(*each)
        case ArrayConstraint():
            yield Argument(WORD, place=place)
            for number in (*value.shape, *value.stride()):
                yield _number(constraint.index_dtype.name, number)
        case ScalarConstraint():
            yield _number(constraint.dtype.name, value)


def _number(dtype: str, value: float) -> Argument:
    packed = struct.pack(FORMATS[dtype], value)
    return Argument(len(packed), int.from_bytes(packed, "little"))


@cache
def _driver() -> ctypes.CDLL:
    """The driver. As in cuTile, a call keeps the interpreter's lock: letting go of it takes longer
    in autograd's thread.
    """
    driver = ctypes.PyDLL(DRIVER)
    address = POINTER(c_void_p)
    driver.cuLaunchKernelEx.argtypes = (c_void_p,) * 4
    driver.cuStreamIsCapturing.argtypes = c_void_p, POINTER(ctypes.c_int)
    driver.cuCtxGetCurrent.argtypes = (address,)
    driver.cuCtxSetCurrent.argtypes = (c_void_p,)
    driver.cuDevicePrimaryCtxRetain.argtypes = address, ctypes.c_int
    driver.cuLibraryLoadData.argtypes = address, ctypes.c_char_p, *(c_void_p,) * 2, c_uint
    driver.cuLibraryLoadData.argtypes += *(c_void_p,) * 2, c_uint
    driver.cuLibraryGetKernel.argtypes = address, c_void_p, ctypes.c_char_p
    driver.cuKernelGetFunction.argtypes = address, c_void_p
    size = POINTER(ctypes.c_size_t)
    driver.cuFuncGetParamInfo.argtypes = c_void_p, ctypes.c_size_t, size, size
    return driver


def addresses() -> tuple[int, int, int]:
    """Of the driver's functions by which the extension in C++ launches: cuLaunchKernelEx,
    cuCtxGetCurrent and cuCtxSetCurrent; zeros where there is no driver.
    """
    try:
        driver: Any = _driver()
    except OSError:
        return 0, 0, 0
    functions = driver.cuLaunchKernelEx, driver.cuCtxGetCurrent, driver.cuCtxSetCurrent
    queue, current, enter = (ctypes.cast(each, c_void_p).value or 0 for each in functions)
    return queue, current, enter


def primary_context(index: int) -> int:
    """The primary context of a device, which PyTorch uses; 0 of a negative index, the CPU's."""
    return 0 if index < 0 else _primary(index) or 0


def _found(function: Callable, *given) -> int | None:
    """The address that a function of the driver writes to its first argument; None if it fails."""
    found = c_void_p()
    return None if function(byref(found), *given) else found.value


def _context() -> int | None:
    return _found(_driver().cuCtxGetCurrent)


def _enter(index: int) -> bool:
    """Give this thread the primary context of a device, if it has none; whether it had none.

    CUDA's runtime does this at a thread's first call. A thread of autograd's may make no such call:
    PyTorch has memory for it, and cuda.tile.launch gives it a context for the launch alone.
    """
    if _context() is not None:
        return False
    context = _primary(index)
    return context is not None and not _driver().cuCtxSetCurrent(context)


@cache
def _primary(index: int) -> int | None:
    """The primary context of a device, which PyTorch uses; it is kept."""
    return _found(_driver().cuDevicePrimaryCtxRetain, index)


@cache
def _function(code: bytes, symbol: str, context: int | None) -> int | None:
    """The number of a compiled kernel, which is loaded into the current context for good."""
    driver = _driver()
    library = _found(driver.cuLibraryLoadData, code, None, None, 0, None, None, 0)
    kernel = library and _found(driver.cuLibraryGetKernel, library, symbol.encode())
    return kernel and _found(driver.cuKernelGetFunction, kernel)


def sizes_of(function: int) -> list[int]:
    """The sizes of the arguments that a compiled kernel takes, in bytes."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not _driver().cuFuncGetParamInfo(function, len(sizes), byref(offset), byref(size)):
        sizes.append(size.value)
    return sizes
