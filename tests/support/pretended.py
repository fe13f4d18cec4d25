"""CPU tensors on CUDA's path, with the interpreter for a GPU."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from tilenorm.ops import call
from tilenorm.ops.passes import bound, cutile, native, registry
from tilenorm.ops.pytorch import torch_private

from . import calls
from .cases import target
from .executors import Interpreter

WARM = 4  # calls after which the extension serves
CACHES = registry._told, registry.failures, bound.bound_for, bound.norm_of
CACHES = *CACHES, call.remembered, SimpleNamespace(cache_clear=native.state().forget)
GPU = registry.Device("cuda", target("sm_90"), 13000)


@contextmanager
def forgotten(*caches):
    """What these remember is forgotten before this block and after it."""
    with ExitStack() as stack:
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


@contextmanager
def pretended_gpu(arch: str = "sm_90"):
    """In this block calls on CPU tensors are served as on the current device 0 of CUDA."""
    interpret = in_turn(Interpreter(arch).run())
    gpu = replace(GPU, target=target(arch))
    replaced = (
        (bound, "device_of", lambda *_: gpu),
        (call, "_index_of", lambda tensor: 0),
        (torch_private, "current_device", lambda: 0),
        (torch_private, "current_stream", lambda index: 0),
        (cutile, "launch", lambda stream, *made: interpret(*made, -1)),
        (cutile, "prepare", partial(repeating, interpret)),
    )
    with forgotten(*CACHES), ExitStack() as stack:
        for module, name, function in replaced:
            stack.enter_context(patch.object(module, name, function))
        yield


def in_turn(function: Callable) -> Callable:
    """The function, for one thread after the other: the interpreter changes cuda.tile meanwhile."""
    lock = threading.RLock()

    def call(*given):
        with lock:
            return function(*given)

    return call


def repeating(
    interpret: Callable, index: int, stream: int, launches, arrays, numbered, count: int
) -> Callable:
    """As driver.prepare: interprets the launches with what lies at the addresses of a call."""

    like = without_memory(arrays)

    def repeat(_: int, addresses: list[int]) -> bool:
        assert len(addresses) == count
        interpret(launches, there(like, numbered, addresses), -1)
        return True

    return repeat


def without_memory(arrays):
    """Tensors as the given ones, or tuples of them, on the meta device."""
    if not isinstance(arrays, tuple):
        return torch.empty_strided(arrays.shape, arrays.stride(), dtype=arrays.dtype, device="meta")
    found = map(without_memory, arrays)
    return type(arrays)(*found) if hasattr(arrays, "_fields") else tuple(found)


def there(like, place, addresses: list[int]):
    """Tensors as the given ones, or tuples of them, at the addresses of those places."""
    if isinstance(like, tuple):
        found = [there(*each, addresses) for each in zip(like, place, strict=True)]
        return type(like)(*found) if hasattr(like, "_fields") else tuple(found)
    last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * ((last + 1) * like.itemsize)).from_address(addresses[place])
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def by(served: str, device: str = "cpu"):
    """A block in which calls of the CPU are served by the reference, or by the interpreted kernels
    for sm_90 or another architecture. served: with "extension", the extension in C++, which the
    fixture of this name has loaded, launches the kernels: each call is made until it knows it.
    """
    if device == "cuda" or served == "reference":
        return nullcontext()
    if served == "extension":
        return warm_gpu()
    return pretended_gpu("sm_90" if served == "kernels" else served)


@contextmanager
def warm_gpu():
    """As pretended_gpu, where `calls.call` and `calls.step` repeat until the extension serves."""
    with pretended_gpu(), patch.object(calls, "TIMES", WARM):
        yield


def tensors_among(arguments: tuple) -> Iterator[Tensor]:
    """The tensors of a kernel's arguments, some of which are groups."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from tensors_among(argument)
        elif isinstance(argument, Tensor):
            yield argument
