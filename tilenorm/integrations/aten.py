"""override, enable and disable: PyTorch's own norms run tilenorm's CUDA kernels.

F.rms_norm, F.layer_norm, nn.RMSNorm and nn.LayerNorm call four aten operators. The override
replaces the CUDA kernels of these operators. PyTorch's dispatcher runs autograd, autocast,
torch.func and torch.compile before it reaches a CUDA kernel, so all of them work as before.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from ..ops.arguments import default_eps
from ..ops.passes.bound import BoundNorm
from ..ops.passes.gradients import needs_of
from ..ops.passes.reading import vector_of
from ..ops.passes.reference import name_of
from ..ops.passes.registry import MAX_ROWS, cutile_implementation, device_of, on_device_of
from ..ops.pytorch.torch_private import native_router
from ..spec import NormSpec

OPERATORS = (
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)


@contextmanager
def override() -> Iterator[None]:
    """Run tilenorm's kernels for PyTorch's norms on CUDA inside this block, in every thread.

        with tilenorm.override():
            model(x).sum().backward()

    The block affects F.rms_norm, F.layer_norm, their modules, and all other code that calls the
    same aten operators. The outputs have the shapes and dtypes that PyTorch gives. A backward pass
    runs tilenorm's kernels if it is called inside the block, wherever its forward pass was called.

    PyTorch's kernel still runs for a float64 input, for a row of more than 262144 elements, and on
    a GPU that cuTile does not support. The override does not reach norms inside code that
    torch.compile generates, and F.rms_norm of a channels-last input or with a weight whose dtype
    differs from the input's, which PyTorch composes from elementwise operations and a mean.

    PyTorch's own router (torch.backends.python_native) may be switched off and on inside a block:
    its kernels then serve what tilenorm's do not. Blocks may be nested. PyTorch's own kernels are
    restored when the last open block ends, also if it ends with an exception. A block should not
    begin or end while another thread is inside a norm.

    Raises:
        RuntimeError: cuTile supports no GPU of this machine. The message gives the reason.
    """
    _check_served()
    _CUDA.ask(blocks=1)
    try:
        yield
    finally:
        _CUDA.ask(blocks=-1)


def enable() -> None:
    """Like override(), but until disable() is called. A second call does nothing."""
    _check_served()
    _CUDA.ask(enabled=True)


def disable() -> None:
    """Undo enable(). An override() block that is open keeps its effect until it ends."""
    _CUDA.ask(enabled=False)


class Kernels:
    """Replacements for the aten operators: one method per operator, with its name and arguments. It
    returns None if tilenorm's kernels do not support the call.

    runner_of: takes a spec and a device index; returns the kernels' runner, or None if they do not
    support the spec on that device.
    """

    def __init__(self, runner_of: Callable[..., BoundNorm | None]):
        @cache
        def runner(norm, hidden, dtype, weight, bias, index):
            name = name_of(dtype)
            weight, bias = (name if is_asked else None for is_asked in (weight, bias))
            return runner_of(NormSpec(norm, hidden, name, weight, bias), index)

        self._runner = runner

    def native_layer_norm(self, x, shape, weight, bias, eps):
        return self._forward("layer", x, shape, weight, bias, eps)

    def _fused_rms_norm(self, x, shape, weight, eps):
        eps = default_eps(x) if eps is None else eps
        return self._forward("rms", x, shape, weight, None, eps)

    def native_layer_norm_backward(self, dy, x, shape, mean, rstd, weight, bias, mask):
        return self._backward("layer", dy, x, shape, mean, rstd, weight, bias, mask)

    def _fused_rms_norm_backward(self, dy, x, shape, rstd, weight, mask):
        gradients = self._backward("rms", dy, x, shape, None, rstd, weight, None, (*mask, False))
        return gradients and gradients[:2]

    def _forward(self, norm, x, shape, weight, bias, eps) -> tuple[Tensor, ...] | None:
        runner = self._serving(norm, x, shape, weight, bias)
        if runner is None:
            return None
        with on_device_of(x):
            y, *stats = runner.forward(True)((x, weight, bias), eps)
        of_rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
        return y, *(s.view(of_rows) for s in stats)

    def _backward(
        self, norm, dy, x, shape, mean, rstd, weight, bias, mask
    ) -> tuple[Tensor | None, ...] | None:
        runner = self._serving(norm, x, shape, weight, bias)
        if runner is None or (dy.dtype, dy.shape, rstd.dtype) != (x.dtype, x.shape, torch.float32):
            return None
        # The kernels read one mean and one rstd for each row, whatever memory these tensors have.
        rows = x.numel() // runner.spec.hidden
        if any(t is not None and t.numel() != rows for t in (mean, rstd)):
            return None
        spec = runner.spec
        asked = [r for r, need in zip(("x", "weight", "bias"), mask, strict=True) if need]
        needs = needs_of(spec, asked, False)
        if not any(needs.gradients):
            return None, None, None
        saved = {"x": x, "weight": weight, "bias": bias, "rstd": vector_of(rstd)}
        saved["mean"] = mean if mean is None else vector_of(mean)
        kept = [saved[role] for role in spec.kernel_reads]
        with on_device_of(x):
            grads = runner.backward(spec, needs)((dy, None, *kept), 0.0)  # rstd holds eps
        by_role = dict(zip(spec.derived, grads, strict=True))
        return tuple(by_role[role] for role in ("x", "weight", "bias"))

    def _serving(
        self, norm: str, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
    ) -> BoundNorm | None:
        """The runner for a call, or None if its dtypes, devices or shapes are not supported."""
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
    """Registers the kernels under a dispatch key while a block is open or enable() is in effect.
    PyTorch's operator registry belongs to the process, and so does the state here.
    """

    def __init__(self, key: str, kernels: Kernels):
        self._key, self._kernels = key, kernels
        self._lock = threading.Lock()
        self._blocks, self._enabled = 0, False
        self._registered: Library | None = None
        self._fall_back: Callable[[], None] = lambda: None

    def ask(self, blocks: int = 0, enabled: bool | None = None) -> None:
        """Add to the number of open blocks, and set whether enable() is in effect."""
        with self._lock:
            blocks += self._blocks
            enabled = self._enabled if enabled is None else enabled
            wanted = enabled or blocks > 0
            if wanted and self._registered is None:
                self._registered = _register(self._key, self._kernels)
                self._stay_in_front()
            elif not wanted and self._registered is not None:
                self._fall_back()
                self._registered._destroy()
                self._registered = None
            self._blocks, self._enabled = blocks, enabled

    def _stay_in_front(self) -> None:
        """Have PyTorch's router register its kernels behind these, until self._fall_back is called.

        The kernel that was registered last is called first. It holds the one before it, which must
        not be removed before it.
        """
        router = native_router()
        if router is None:
            return
        former = router._register_overrides_from_graph

        @wraps(former)
        def behind(*args, **kwargs):
            with self._lock:
                if self._registered is None:  # called by another's wrapper, which holds this one
                    return former(*args, **kwargs)
                self._registered._destroy()
                try:
                    return former(*args, **kwargs)
                finally:
                    self._registered = _register(self._key, self._kernels)

        def fall_back() -> None:
            if router._register_overrides_from_graph is behind:
                router._register_overrides_from_graph = former

        router._register_overrides_from_graph = behind
        self._fall_back = fall_back


def _register(key: str, kernels: Kernels) -> Library:
    """Register the kernels for a dispatch key; calls that they do not support run the old ones."""
    registered = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns when a registered kernel is replaced. Replacing it is the purpose here.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in OPERATORS:
            kernel = _first(getattr(kernels, name), get_kernel(f"aten::{name}", key))
            registered.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return registered


def _first(ours: Callable, former) -> Callable:
    def kernel(keyset, *arguments):
        results = ours(*arguments)
        return former.call_boxed(keyset, *arguments) if results is None else results

    return kernel


def _cuda_runner(spec, index: int) -> BoundNorm | None:
    device, kernels = device_of("cuda", index), cutile_implementation()
    return None if kernels.refuses(spec, 0, device) else BoundNorm(kernels, spec, device)


def _check_served() -> None:
    reasons = ["PyTorch sees no CUDA GPU"]
    if torch.cuda.is_available():
        spec = NormSpec("rms", 1024, "bfloat16")
        devices = [device_of("cuda", index) for index in range(torch.cuda.device_count())]
        reasons = [cutile_implementation().refuses(spec, 0, device) for device in devices]
    if all(reasons):
        raise RuntimeError(f"tilenorm.override: cuTile supports no GPU here: {reasons[0]}")


_CUDA = Override("CUDA", Kernels(_cuda_runner))
