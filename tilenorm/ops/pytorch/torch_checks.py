"""What the ops rely on in PyTorch's private names: a check for each, which returns True.

A name that exists may have changed its meaning. A check uses the name as the ops do and looks at
the answer. It may raise anything; torch_private takes the public way then. No check but those named
for CUDA starts CUDA, and none but engine_tells runs a backward pass: a process that has done
either cannot fork.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE, STRIDES = (2, 3), (3, 1)
# The dispatch keys of tensors that have nothing to hide. The callers cast as autocast does.
ORDINARY = ("CPU", "CUDA", "BackendSelect", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA")
ORDINARY += ("AutocastCPU", "AutocastCUDA")
# Where a module keeps its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _ones(*shape: int, **how) -> Tensor:
    return torch.ones(shape, device="cpu", **{"dtype": torch.float32, **how})


def compares(TensorGuards) -> bool:
    """Of tensors: type, dispatch keys, dtype, requires_grad, rank, sizes and strides given."""
    x, sizes, strides = _ones(2, 3), [[None, 3]], [[None, 1]]
    check = TensorGuards(x, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    others = [_ones(2, 4), _ones(3, 2).t(), _ones(1, 2, 3), _ones(2, 3, dtype=torch.float64)]
    others += [_ones(2, 3, requires_grad=True), nn.Parameter(x, requires_grad=False)]
    others.append(torch.empty(2, 3, dtype=torch.float32, device="meta"))
    with _Mode():
        in_a_mode = check(x)
    both = TensorGuards(x, x, dynamic_dims_sizes=sizes * 2, dynamic_dims_strides=strides * 2)
    answers = [in_a_mode, both.check(x, x), *map(check, others)]
    return check(x) is check(_ones(5, 3)) is True and not any(answers)


def views(reinterpret) -> bool:
    """The same memory in another shape, without autograd."""
    x = _ones(7, requires_grad=True)[1:]
    view = reinterpret(x, SHAPE, STRIDES)
    same = view.shape == SHAPE and view.stride() == STRIDES and view.data_ptr() == x.data_ptr()
    return same and not view.requires_grad and view.dtype == x.dtype


def allocates_on_cuda(empty) -> bool:
    """A tensor of a shape, strides and a dtype on the current CUDA device."""
    tensor = empty(SHAPE, STRIDES, torch.float64)
    on_current = tensor.device == torch.device("cuda", torch.cuda.current_device())
    is_so_laid_out = tensor.shape == SHAPE and tensor.stride() == STRIDES
    return on_current and is_so_laid_out and tensor.dtype.itemsize == 8


def tells_stream(current_stream) -> bool:
    """The number of a CUDA device's current stream."""
    index = torch.cuda.current_device()
    other = torch.cuda.Stream(index)
    with torch.cuda.stream(other):
        inside = current_stream(index)
    before = torch.cuda.current_stream(index).cuda_stream
    return inside == other.cuda_stream and current_stream(index) == before


def counts_modes(modes) -> bool:
    with _Mode():
        inside = modes()
    return inside == 1 and modes() == 0


def bits_of(Keys, Key, *names: str) -> int:
    """The bits of dispatch keys."""
    keys = 0
    for name in names:
        keys |= Keys(getattr(Key, name)).raw_repr()
    return keys


def tells_keys(keys_of, thread_keys, Keys, Key) -> bool:
    """The dispatch keys of tensors and of the thread, as sets whose bits tell them apart."""

    bits = partial(bits_of, Keys, Key)
    x, others = _ones(2, dtype=torch.complex64), ~bits(*ORDINARY)
    keys = (keys_of(t).raw_repr() for t in (x, x.conj(), torch.empty(2, device="meta")))
    plain, conjugated, on_meta = (bits & others for bits in keys)
    outside = thread_keys().raw_repr() & others
    with _Mode():
        inside = thread_keys().raw_repr() & others
    told = conjugated & bits("Conjugate") and on_meta & bits("Meta") and inside & bits("Python")
    return bool(told) and not (plain or outside)


def tells_transforms(transforms, Transform) -> bool:
    """torch.func's transforms that are active."""
    functorch = torch._C._functorch
    functorch._grad_increment_nesting()
    try:
        inside = isinstance(transforms(), Transform)
    finally:
        functorch._grad_decrement_nesting()
    return inside and not isinstance(transforms(), Transform)


def tells_level(level) -> bool:
    """The level of forward-mode derivatives, negative outside of one."""
    with forward_ad.dual_level():
        inside = forward_ad._current_level
    return type(level) is int and inside >= 0 > forward_ad._current_level


class _Double(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


def is_applied(backward_class) -> bool:
    """A Function without the Python halves of its calls. Its node calls `apply` of this class."""

    class Applied(_Double):
        pass

    x = _ones(2, requires_grad=True)
    node: Any = Applied._backward_cls
    node.apply = Applied.backward
    parent: Any = super(Function, Applied)
    y = parent.apply(x)
    right = issubclass(backward_class, BackwardCFunction)
    right = right and isinstance(y.grad_fn, Applied._backward_cls)
    return right and y.tolist() == y.grad_fn.apply(_ones(2)).tolist() == [2, 2]


def is_below_autograd(BelowAutograd) -> bool:
    x = _ones(2, requires_grad=True)
    with BelowAutograd():
        inside = (x * 2).requires_grad
    return (x * 2).requires_grad and not inside


def normalizes(fused_rms_norm) -> bool:
    """y and rstd (rows, 1) of a matrix, with and without a weight."""
    x, w = _ones(2, 3) * 4, _ones(3) * 3
    y, rstd = fused_rms_norm(x, (3,), w, 9.0)
    bare = fused_rms_norm(x, (3,), None, 9.0)[0]
    right = y.flatten().tolist() + bare.flatten().tolist() + rstd.flatten().tolist()
    wanted = [2.4] * 6 + [0.8] * 6 + [0.2] * 2
    return all(abs(a - b) < 1e-4 for a, b in zip(right, wanted, strict=True))


def is_no_view(unsafe_view) -> bool:
    """The same memory in another shape, which autograd takes for a tensor of its own."""
    x = _ones(6)
    y = unsafe_view(x, SHAPE)
    return y.shape == SHAPE and y.data_ptr() == x.data_ptr() and not y._is_view()


def tells_hooks(has_any_global_hook) -> bool:
    """Whether a hook of all modules is registered; HOOKS hold a module's own."""
    handle = nn.modules.module.register_module_forward_pre_hook(_no_hook)
    try:
        told = bool(has_any_global_hook())
    finally:
        handle.remove()
    module = nn.Module()
    module.register_forward_hook(_no_hook)
    module.register_forward_pre_hook(_no_hook)
    module.register_full_backward_hook(_no_hook)
    module.register_full_backward_pre_hook(_no_hook)
    return told and all(getattr(module, name) for name in HOOKS)


def _no_hook(*_) -> None:
    pass


def engine_tells(pass_wants_all, engine_runs, running_node) -> bool:
    """Of the engine's current pass: whether it wants all gradients, which nodes it runs, and
    which one runs now.
    """
    seen = []

    class Sum(Function):
        @staticmethod
        def forward(ctx, x, w):
            return x + w

        @staticmethod
        def backward(ctx, dy):
            seen.extend((pass_wants_all(), running_node() is ctx, engine_runs(ctx)))
            for node, _ in ctx.next_functions:
                try:
                    seen.append(engine_runs(node))
                except RuntimeError:
                    seen.append("a leaf that grad() returns")
            return dy, dy

    x, w = (_ones(2, requires_grad=True) for _ in range(2))
    torch.autograd.grad(Sum.apply(x * 1, w * 1).sum(), [x])
    torch.autograd.grad(Sum.apply(x, w).sum(), [x])
    Sum.apply(x, w).sum().backward()
    part = [False, True, True]
    expected = [*part, True, False, *part, "a leaf that grad() returns", False]
    return seen == [*expected, True, True, True, True, True]
