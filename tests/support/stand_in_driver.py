"""Runs programs that launch kernels by cuTile's own launch function, without a GPU.

In the program a library stands in for NVIDIA's driver. It launches nothing.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from tilenorm.spec import TENSORS, NormSpec

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".c")
NAME = "libcuda.so.1"
STRINGS = {"torch.float32": "<f4", "torch.float16": "<f2", "torch.int32": "<i4"}
STRINGS |= {"torch.uint8": "|u1"}


def built(folder: Path) -> Path:
    """The library, compiled into a folder. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    path = folder / NAME
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", path, SOURCE], check=True)
    return path


def check(program: str, folder: Path) -> None:
    """Run a Python program, which has to succeed, with the library. Its compile cache is in the
    folder.
    """
    built(folder)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_TILE_")}
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_TILE_CACHE_DIR": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def address(like: Tensor) -> int:
    """An address that nobody reads, on 16 bytes where the tensor starts on 16 bytes, and another
    for each tensor.
    """
    return 16 * (id(like) % (1 << 40)) + like.data_ptr() % 16


class Array:
    """What a launch takes for a tensor without memory."""

    def __init__(self, like: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(like.shape),
            "typestr": STRINGS[str(like.dtype)],
            "data": (address(like), False),
            "strides": tuple(s * like.itemsize for s in like.stride()),
            "version": 3,
        }


def arrays_of(arrays: Sequence) -> tuple:
    """ForwardArrays or BackwardArrays of tensors without memory, as a launch takes them."""
    return tuple(
        arrays_of(a) if isinstance(a, tuple) else Array(a) if isinstance(a, Tensor) else a
        for a in arrays
    )


def queue() -> Callable:
    """cuLaunchKernelEx of the library that stands for the driver."""
    function = ctypes.PyDLL(NAME).cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


def last_launch(sizes: Sequence[int], launch: Callable[[], object]) -> list[int]:
    """What the driver gets from a launch with arguments of these sizes: see the C source."""
    library = ctypes.CDLL(NAME)
    library.stand_in_launch.restype = ctypes.POINTER(ctypes.c_uint64)
    library.stand_in_take(len(sizes))
    launch()
    words, first = library.stand_in_launch(), 9
    found = [words[first + i] % (1 << 8 * size) for i, size in enumerate(sizes)]
    return [*words[:first], *found]


def in_float16(spec: NormSpec) -> NormSpec:
    """The spec with float16 in the place of what NumPy's interface has no string for."""
    dtypes = {name: "float16" for name in TENSORS if getattr(spec, name) == "bfloat16"}
    return replace(spec, **dtypes)
