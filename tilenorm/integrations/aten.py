"""PyTorch's own F.rms_norm, F.layer_norm, nn.RMSNorm and nn.LayerNorm by tilenorm's kernels.

What is replaced are the CUDA kernels of four operators of aten. Autograd, autocast, torch.func and
torch.compile come before these, and stay as they are.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from ..ops import cutile
from ..ops.arguments import default_eps
from ..ops.layout import vector_of
from ..ops.plans import Runner, spec_of
from ..ops.registry import MAX_ROWS, cutile_implementation, device_of
from ..ops.tensors import Saved, Tensors, merged_needs
from ..spec import Options

OPERATORS = (
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)


@contextmanager
def override() -> Iterator[None]:
    """In this block PyTorch's norms on CUDA run tilenorm's kernels, in every thread.

        with tilenorm.override():
            model(x).sum().backward()

    F.rms_norm, F.layer_norm, their modules, and whatever else calls the aten operators under them:
    forward and backward, each by where it is called, with the shapes and dtypes that PyTorch's
    have. What the kernels do not take runs PyTorch's, as before: float64, more than 262144 elements
    in a row, a GPU that cuTile does not serve. Not reached are F.rms_norm with a weight of another
    dtype than the input's, or of a channels-last input, which PyTorch composes of single
    operations, and norms for which torch.compile generates code.

    Blocks may be nested; when the last one ends, whatever was raised in it, PyTorch's own kernels
    are back. A block should not begin or end while another thread is inside a norm.

    Raises RuntimeError, with the reason, where cuTile serves no GPU.
    """
    _check_served()
    _CUDA.begin()
    try:
        yield
    finally:
        _CUDA.end()


def enable() -> None:
    """As override(), until disable() is called. Once enabled, does nothing."""
    _check_served()
    _CUDA.enable(True)


def disable() -> None:
    """Undo enable(). Blocks of override() last until their own end."""
    _CUDA.enable(False)


class Kernels:
    """The operators by name, as aten calls them; each returns None for what it does not serve.

    runner_of: the kernels' runner for a spec and a device's index, or None where they do not serve.
    """

    def __init__(self, runner_of: Callable[..., Runner | None]):
        @cache
        def runner(norm, hidden, dtype, weight, bias, index):
            weight, bias = (dtype if there else None for there in (weight, bias))
            spec = spec_of(Options(hidden, norm), Tensors(dtype, weight=weight, bias=bias))
            return runner_of(spec, index)

        self._runner = runner

    def native_layer_norm(self, x, shape, weight, bias, eps):
        return self._forward("layer", x, shape, weight, bias, eps)

    def _fused_rms_norm(self, x, shape, weight, eps):
        eps = default_eps(x) if eps is None else eps
        return self._forward("rms", x, shape, weight, None, eps)

    def native_layer_norm_backward(self, dy, x, shape, mean, rstd, weight, bias, mask):
        return self._backward("layer", dy, x, shape, mean, rstd, weight, bias, mask)

    def _fused_rms_norm_backward(self, dy, x, shape, rstd, weight, mask):
        found = self._backward("rms", dy, x, shape, None, rstd, weight, None, (*mask, False))
        return found and found[:2]

    def _forward(self, norm, x, shape, weight, bias, eps) -> tuple[Tensor, ...] | None:
        runner = self._serving(norm, x, shape, weight, bias)
        if runner is None:
            return None
        with cutile.on_device_of(x):
            y, _, *stats = runner.training(Tensors(x, weight=weight, bias=bias), eps)
        of_rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
        return y, *(s.view(of_rows) for s in stats if s is not None)

    def _backward(
        self, norm, dy, x, shape, mean, rstd, weight, bias, mask
    ) -> tuple[Tensor | None, ...] | None:
        runner = self._serving(norm, x, shape, weight, bias)
        if runner is None or (dy.dtype, dy.shape, rstd.dtype) != (x.dtype, x.shape, torch.float32):
            return None
        asked = (mask[0], False, False, *mask[1:])
        needs = merged_needs(runner.dtypes, False, asked)
        if not any(needs):
            return None, None, None
        mean = None if mean is None else vector_of(mean)
        saved = Saved(x, None, weight, bias, mean, vector_of(rstd))
        with cutile.on_device_of(x):
            grads = runner.backward(needs)(dy, None, saved, 0.0)  # rstd holds eps
        return grads[0], *grads[3:]

    def _serving(
        self, norm: str, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
    ) -> Runner | None:
        """The runner for tensors of one dtype and device whose shapes fit."""
        shape, dtype, index = tuple(shape), x.dtype, x.get_device()
        if not shape or x.shape[-len(shape) :] != shape:
            return None
        for parameter in (weight, bias):
            if parameter is not None and (
                parameter.dtype != dtype
                or parameter.shape != shape
                or parameter.get_device() != index
            ):
                return None
        hidden = math.prod(shape)
        if x.numel() > MAX_ROWS * hidden:
            return None
        return self._runner(norm, hidden, dtype, weight is not None, bias is not None, index)


class Override:
    """Kernels registered for a dispatch key while a block or a call of enable asks for them.

    The state of a registry of PyTorch's, which is the process's: how many ask, and its handle.
    """

    def __init__(self, key: str, kernels: Kernels):
        self._key, self._kernels = key, kernels
        self._lock = threading.Lock()
        self._blocks, self._enabled = 0, False
        self._registered: Library | None = None

    def begin(self) -> None:
        with self._lock:
            self._ask(self._blocks + 1, self._enabled)

    def end(self) -> None:
        with self._lock:
            self._ask(self._blocks - 1, self._enabled)

    def enable(self, enabled: bool) -> None:
        with self._lock:
            self._ask(self._blocks, enabled)

    def _ask(self, blocks: int, enabled: bool) -> None:
        wanted = enabled or blocks > 0
        if wanted and self._registered is None:
            self._registered = _register(self._key, self._kernels)
        elif not wanted and self._registered is not None:
            self._registered._destroy()
            self._registered = None
        self._blocks, self._enabled = blocks, enabled


def _register(key: str, kernels: Kernels) -> Library:
    """Kernels in front of those that are registered for the key, which serve what these do not."""
    former = {name: get_kernel(f"aten::{name}", key) for name in OPERATORS}
    registered = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns that kernels are replaced, which is the purpose here.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in OPERATORS:
            kernel = _first(getattr(kernels, name), former[name])
            registered.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return registered


def _first(ours: Callable, former) -> Callable:
    def kernel(keyset, *arguments):
        found = ours(*arguments)
        return former.call_boxed(keyset, *arguments) if found is None else found

    return kernel


def _cuda_runner(spec, index: int) -> Runner | None:
    device, kernels = device_of("cuda", index), cutile_implementation()
    return None if kernels.refuses(spec, 0, device) else Runner(kernels, spec, device)


def _check_served() -> None:
    reasons = ["PyTorch sees no CUDA GPU"]
    if torch.cuda.is_available():
        spec = spec_of(Options(1024, "rms"), Tensors(torch.bfloat16))
        devices = [device_of("cuda", index) for index in range(torch.cuda.device_count())]
        reasons = [cutile_implementation().refuses(spec, 0, device) for device in devices]
    if all(reasons):
        raise RuntimeError(f"tilenorm.override: cuTile serves no GPU here: {reasons[0]}")


_CUDA = Override("CUDA", Kernels(_cuda_runner))
