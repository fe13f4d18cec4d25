"""CPU tensors on CUDA's path, with the interpreter for a GPU."""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
from torch import Tensor

from tilenorm.launch import driver
from tilenorm.ops import bound, call, cutile, registry, torch_private
from tilenorm.ops.split import library as split

from ..cases import target
from ..executors import Interpreter

CACHES = registry._select, registry._told, registry.failures, bound._bound, bound.norm_of
CACHES = *CACHES, call.remembered
EACH_WAY = pytest.mark.parametrize("served", ["reference", "kernels"])
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
    interpret = Interpreter(arch).run()
    gpu = replace(GPU, target=target(arch))
    replaced = (
        (bound, "device_of", lambda *_: gpu),
        (split, "device_of", lambda *_: gpu),
        (call, "_index_of", lambda tensor: 0),
        (torch_private, "current_device", lambda: 0),
        (torch_private, "current_stream", lambda index: 0),
        (cutile, "launch", lambda stream, *made: interpret(*made, -1)),
        (cutile, "prepare", lambda *_: driver.never),
    )
    with forgotten(*CACHES), ExitStack() as stack:
        for module, name, function in replaced:
            stack.enter_context(patch.object(module, name, function))
        yield


def by(served: str, device: str = "cpu"):
    """A block in which calls of the CPU are served by the reference, or by the interpreted kernels
    for sm_90 or another architecture.
    """
    if device == "cuda" or served == "reference":
        return nullcontext()
    return pretended_gpu("sm_90" if served == "kernels" else served)


def tensors_among(arguments: tuple) -> list[Tensor]:
    """The tensors of a kernel's arguments, some of which are groups."""
    groups = [a if isinstance(a, tuple) else (a,) for a in arguments]
    return [a for group in groups for a in group if isinstance(a, Tensor)]
