"""Repeats launches by CUDA's driver, with other addresses of the arrays.

cuda.tile.launch wraps every array, hashes every argument and asks the driver for the arrays'
context, in every call. None of that changes where shapes, strides, constants and alignments are
those of an earlier call. So the arguments are laid out once, and each call writes its addresses.

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
# launches. Where it has not, the caller launches by cuda.tile.launch, which says what is wrong.
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
    """An argument in its binary format."""

    size: int  # in bytes
    bits: int = 0
    place: int | None = None  # where an address stands among a call's addresses


class Prepared(NamedTuple):
    """A launch."""

    function: int  # the driver's number of the compiled kernel on the current device
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

    queue: the driver's cuLaunchKernelEx. addresses: how many addresses a call has. enter: gives the
    thread the device's context, and says whether it had none.

    Threads that call at once write into different copies of the arguments. The function touches few
    objects: in a step of a model, code and objects have left the caches of the CPU, and each object
    takes longer than the call itself. The function's attribute `launches` holds the launches, and
    `parts` what in_parts returns.
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
        failed = 0
        again = True
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
    """What a caller needs that launches without a call of `repeat`.

    That is the idle copies of its arguments, each as _copy returns it, a function that writes the
    addresses into a copy, and the driver's function. There are no copies where the driver is not
    called, as in tests.
    """
    return getattr(repeat, "parts", ([], never, never))


def _copy(launches: Sequence[Prepared], addresses: int) -> tuple:
    """A copy of the arguments.

    It is a tuple of the words that hold the arguments, of what the driver takes for each launch,
    and of objects to which the latter refers.
    """
    constants = [a.bits for launch in launches for a in launch.arguments]
    words = (ctypes.c_uint64 * (addresses + len(constants)))(*[0] * addresses, *constants)
    start = ctypes.addressof(words)
    next_word = addresses
    calls = []
    referred = []
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
        referred += arguments, attributes
    return words, calls, referred


def never(stream: int, starts: Sequence[int]) -> bool:
    """Stands for what `repeating` returns, where cuda.tile.launch has to make the launches."""
    return False


def prepare(
    index: int,
    stream: int,
    launches: Sequence[Launch],
    arrays: tuple,
    numbered: tuple,
    addresses: int,
) -> Repeated | None:
    """What repeats launches that cuda.tile.launch has made with these arrays.

    It is None while the stream is captured, because loading a kernel may end a capture. index: that
    of the device. numbered: as `arrays`, but of each array its place among a call's addresses.
    addresses: how many addresses a call has.
    """
    driver = _driver()
    capturing = ctypes.c_int()
    enter = partial(_enter, index)
    enter()
    if driver.cuStreamIsCapturing(stream, byref(capturing)) or capturing.value:
        return None
    prepared = []
    for kernel, grid, before, take, after, overlap in launches:
        values, places = ((*before, take(of), *after) for of in (arrays, numbered))
        signature = signature_of(kernel, values)
        arguments = tuple(arguments_of(signature, values, places))
        code, symbol, _, libraries = kernel._compile(signature, default_tile_context)
        function = None if libraries else _function(code, symbol, _context())
        if function is None or sizes_of(function) != [a.size for a in arguments]:
            return never
        prepared.append(Prepared(function, grid, arguments, overlap))
    return repeating(driver.cuLaunchKernelEx, prepared, addresses, enter)


def signature_of(kernel: Kernel, values: tuple) -> KernelSignature:
    """The signature with which cuTile's launch function compiles.

    It has the first calling convention, unless the arguments need the second. A kernel with another
    signature would be compiled once more.
    """
    second = KernelSignature.from_kernel_args(kernel, values, CallingConvention.cutile_python_v2())
    if any(map(_needs_second, second.parameters)):
        return second
    return KernelSignature.from_kernel_args(kernel, values, CallingConvention.cutile_python_v1())


def _needs_second(constraint: ParameterConstraint) -> bool:
    if isinstance(constraint, ArrayConstraint):
        return any(size is not None for size in constraint.shape_constant)
    return isinstance(constraint, TupleConstraint)


def arguments_of(signature: KernelSignature, values: tuple, places: tuple) -> Iterator[Argument]:
    """The arguments of a kernel in their binary format. Both conventions have the same format."""
    for constraint, value, place in zip(signature.parameters, values, places, strict=True):
        yield from _arguments(constraint, value, place)


def _arguments(constraint: ParameterConstraint, value: Any, place: Any) -> Iterator[Argument]:
    match constraint:
        case TupleConstraint():
            for item in zip(constraint.items, value, place, strict=True):
                yield from _arguments(*item)
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
    """The driver. As in cuTile, a call keeps the interpreter's lock.

    To let go of the lock takes longer than the call, in autograd's thread.
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
    """The addresses of the driver's functions by which the extension in C++ launches.

    They are cuLaunchKernelEx, cuCtxGetCurrent and cuCtxSetCurrent; zeros where there is no driver.
    """
    try:
        driver: Any = _driver()
    except OSError:
        return 0, 0, 0
    functions = driver.cuLaunchKernelEx, driver.cuCtxGetCurrent, driver.cuCtxSetCurrent
    queue, current, enter = (ctypes.cast(f, c_void_p).value or 0 for f in functions)
    return queue, current, enter


def primary_context(index: int) -> int:
    """The primary context of a device, which PyTorch uses; 0 of a negative index, the CPU's."""
    return 0 if index < 0 else _primary(index) or 0


def _address_from(function: Callable, *arguments) -> int | None:
    """The address that a function of the driver writes to its first argument; None if it fails."""
    address = c_void_p()
    return None if function(byref(address), *arguments) else address.value


def _context() -> int | None:
    return _address_from(_driver().cuCtxGetCurrent)


def _enter(index: int) -> bool:
    """Give this thread the primary context of a device if it has no context. Return whether it did.

    CUDA's runtime does this at a thread's first call. A thread of autograd may make no such call:
    PyTorch has memory at hand, and cuda.tile.launch gives the thread a context only for its launch.
    """
    if _context() is not None:
        return False
    context = _primary(index)
    return context is not None and not _driver().cuCtxSetCurrent(context)


@cache
def _primary(index: int) -> int | None:
    """The primary context of a device, which PyTorch uses. It is retained for good."""
    return _address_from(_driver().cuDevicePrimaryCtxRetain, index)


@cache
def _function(code: bytes, symbol: str, context: int | None) -> int | None:
    """The driver's number of a compiled kernel. The kernel is loaded into the current context for
    good.
    """
    driver = _driver()
    library = _address_from(driver.cuLibraryLoadData, code, None, None, 0, None, None, 0)
    kernel = library and _address_from(driver.cuLibraryGetKernel, library, symbol.encode())
    return kernel and _address_from(driver.cuKernelGetFunction, kernel)


def sizes_of(function: int) -> list[int]:
    """The sizes of the arguments that a compiled kernel takes, in bytes."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not _driver().cuFuncGetParamInfo(function, len(sizes), byref(offset), byref(size)):
        sizes.append(size.value)
    return sizes
