"""Every private name of PyTorch's that the ops use, with what it saves and what replaces it.

A name that this PyTorch lacks, or that does not do here what its check in torch_checks.py asks of
it, is None, and the function beside it takes the public way. The times are host times of a call:
those with a GPU by PyTorch 2.11 on the host of an H200, the others by PyTorch 2.13 on a CPU.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from operator import attrgetter
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling

from . import torch_checks as checks


def _passes(check: Callable[..., bool], *names) -> bool:
    """Whether private names do what a check asks of them.

    This module may be imported in a mode, a transform or a context that gives tensors another
    device. The thread of a check is in none of them. Together the checks take a few ms.
    """
    try:
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(check, *names).result() is True
    except Exception:  # what has another meaning may raise anything
        return False


def _named(path: str):
    """What torch has under a dotted path, or None."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return None


def _found(check: Callable[..., bool], *paths: str):
    """What torch has under each of the paths, if all of them together pass the check, else None."""
    names = tuple(map(_named, paths))
    if None in names or not _passes(check, *names):
        names = (None,) * len(paths)
    return names if len(names) > 1 else names[0]


# Compares of each tensor the type, dispatch keys, dtype, device, requires_grad, and given sizes.
# 0.15 µs a call; without it every call is checked again.
TensorGuards = _found(checks.compares, "_C._dynamo.guards.TensorGuards")

# A view that autograd does not see. as_strided takes twice as long, and in autograd's thread more,
# because it lets go of the interpreter's lock.
_reinterpret_tensor = _found(checks.views, "_C._dynamo.guards._reinterpret_tensor")

# An allocation on the current CUDA device in 0.8 µs, where torch.empty takes 2.2; in autograd's
# thread 4 µs instead of 9, because it does not let go of the interpreter's lock.
_empty_strided_cuda = _named("_C._dynamo.guards._empty_strided_cuda")

# The current stream's number in 0.07 µs, where torch.cuda.current_stream takes 3.8. Absent from
# builds without CUDA.
_current_raw_stream = _named("_C._cuda_getCurrentRawStream")

# How many modes see every operation. TensorGuards overlooks some of them. PyTorch has no public way
# to ask: without this name no call is direct, and the dispatcher takes every call to the ops.
_dispatch_modes = _found(checks.counts_modes, "_C._len_torch_dispatch_stack")

# A tensor's dispatch keys, and those that a thread adds to every tensor's: a mode or a transform
# adds one. Without one of these names no call is direct either.
_keys_of, _thread_keys, _Keys, _Key = _found(
    checks.tells_keys,
    "_C._dispatch_keys",
    "_C._dispatch_tls_local_include_set",
    "_C.DispatchKeySet",
    "_C.DispatchKey",
)

# torch.func's transforms that are active. Without these two PyTorch refuses to transform the ops.
_transforms, _Transform = _found(
    checks.tells_transforms, "_C._functorch.peek_interpreter_stack", "_C._functorch.CInterpreter"
)

# The forward-mode level, negative outside of one. The public way asks each tensor for its tangent.
_forward_mode = _found(checks.tells_level, "autograd.forward_ad._current_level") is not None

# The class of a Function's backward pass. With it, calls leave out the Python halves of
# Function.apply and of the backward pass: 7 of 22 µs for a Function that does nothing.
_backward_class = _found(checks.is_applied, "autograd.Function._backward_cls")

# Whether the engine's current pass is that of a backward() without `inputs`, which wants all
# gradients; whether a pass runs a node of the graph; and the node that it runs now. Without one of
# these names grad(y, [x]) computes dW as well, and grad(y, [w]) computes dx.
_pass_wants_all = _named("autograd.Variable._execution_engine.is_checkpoint_valid")
_engine_runs = _named("_C._will_engine_execute_node")
_running_node = _named("_C._current_autograd_node")

# Runs an op as if autograd were off, for less time than register_autograd's own layer, which takes
# 8 µs of a call that needs no gradient.
BelowAutograd = _found(checks.is_below_autograd, "_C._AutoDispatchBelowAutograd")

# y and rstd of F.rms_norm in one call. Without it the reference computes its own formula.
fused_rms_norm = _found(checks.normalizes, "_fused_rms_norm")

# view, whose result autograd takes for a tensor of its own. Zero-bubble pipelines detach a stage's
# outputs in place, which views refuse: without it a stage on the CPU cannot end with a norm.
_unsafe_view = _found(checks.is_no_view, "ops.aten._unsafe_view.default")


def reshaped(fresh: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor, which nothing else uses, in another shape."""
    return fresh.view(shape) if _unsafe_view is None else _unsafe_view(fresh, shape)


def _empty_cuda_public(shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _stream_public(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _at_first_call(name: str, check: Callable[..., bool], private, public: Callable) -> Callable:
    """A function that makes the check, and puts what this module then has under `name` in its own
    place. The check starts CUDA, so it waits for a call that does so anyway.
    """

    def first(*args):
        globals()[name] = private if _passes(check, private) else public
        return globals()[name](*args)

    return public if private is None else first


reinterpret = _reinterpret_tensor or (lambda x, *how: x.as_strided(*how).detach())
# Callers ask this module for these three at each call.
empty_strided_cuda = _at_first_call(
    "empty_strided_cuda", checks.allocates_on_cuda, _empty_strided_cuda, _empty_cuda_public
)
current_stream = _at_first_call(
    "current_stream", checks.tells_stream, _current_raw_stream, _stream_public
)
current_device = torch.cuda.current_device
modes: Callable[[], int] = _dispatch_modes or (lambda: 1)  # unknown, so perhaps one


def in_transform() -> bool:
    """Whether torch.func transforms what is called now."""
    # torch.compile takes `is not None` of what _transforms returns for true here.
    return _transforms is not None and isinstance(_transforms(), _Transform)


OTHER_BITS = 0 if _keys_of is None else ~checks.bits_of(_Keys, _Key, *checks.ORDINARY)


def has_ordinary_keys(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no tensor has, and the thread adds, another dispatch key than those of ordinary
    tensors on the CPU or on CUDA. Where that is unknown, no.
    """
    if _keys_of is None:
        return False
    keys = _thread_keys().raw_repr()
    for tensor in tensors:
        if tensor is not None:
            keys |= _keys_of(tensor).raw_repr()
    return not keys & OTHER_BITS


# An attribute, because a function takes longer in every call. Unknown, the level is that of one.
forward_mode = forward_ad if _forward_mode else SimpleNamespace(_current_level=0)


def in_forward_mode(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward-mode derivatives may be asked for. True says so of no tensor alone."""
    if _forward_mode:
        return forward_mode._current_level >= 0
    present = [t for t in tensors if t is not None]
    return any(forward_ad.unpack_dual(t).tangent is not None for t in present)


def fast_apply(function):
    """Function.apply for calls that no transform of torch.func sees."""
    if _backward_class is None:
        return function.apply
    function._backward_cls.apply = function.backward  # autograd finds it by this name
    return super(Function, function).apply


def asked_of(ctx) -> tuple[bool, ...]:
    """Which inputs of a Function need a gradient that the engine's current pass uses.

    Up to PyTorch 2.13, ctx.needs_input_grad tells what the forward pass knew. PyTorch's own
    nodes ask task_should_compute_output, which Python cannot call. What is asked here in its place
    takes 1 µs, and 9 µs more for each leaf whose gradient torch.autograd.grad is asked for.
    """
    mask = ctx.needs_input_grad
    # TorchDynamo cannot trace what asks the engine.
    if is_dynamo_compiling() or not _engine_tells() or _pass_wants_all():
        return mask
    if _running_node() is not ctx:
        return mask  # called in a pass of another graph, or by compiled autograd
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    if len(nodes) != sum(mask):
        return mask  # this PyTorch keeps needs_input_grad up to date, as is proposed for it
    used = []
    for node in nodes:
        try:
            used.append(_engine_runs(node))
        except RuntimeError:  # what the engine answers of a leaf whose gradient grad() returns
            used.append(True)
    if not any(used) and not _engine_runs(ctx):
        return mask  # the engine of torch.distributed.rpc knows no node
    of_each = iter(used)
    return tuple([needed and next(of_each) for needed in mask])


@cache
def _engine_tells() -> bool:
    """The check runs backward passes, so it waits for one that runs anyway."""
    names = _pass_wants_all, _engine_runs, _running_node
    return None not in names and _passes(checks.engine_tells, *names)


# PyTorch's own kernels in Python, by the language that they are written in.
NATIVE = {"cutedsl": "quack"}
RMS_NORM_ON_CUDA = ("_fused_rms_norm", "CUDA")


def ragged_dimension(x: Tensor) -> int:
    """The ragged dimension of a jagged nested tensor. Without the attribute, the first after the
    batch, where nested tensors have it until they are transposed.
    """
    return getattr(x, "_ragged_idx", 1)


def autocast_casts(norm: str) -> bool:
    """Whether PyTorch's autocast on CUDA computes its norm in float32: RMSNorm from 2.12 on."""
    return norm == "layer" or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def inductor_calls():
    """Inductor's table of what its generated code calls in place of an op, or None.

    It is there from PyTorch 2.11 on, once Inductor is loaded; else generated code calls the op.
    """
    return sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen")


def keep_every_argument(ops: Sequence) -> None:
    """Have DTensor's cache tell calls of ops apart by every argument, absent tensors included.

    The public registration keeps the tensors that are there, and all from the first integer on:
    to the cache of PyTorch 2.9 a call with a residual is then one with a gate, and a bias alone is
    a weight alone. Without these names its key stays so.
    """
    from torch.distributed.tensor import DTensor

    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        infos.update(dict.fromkeys(ops, RuntimeSchemaInfo(static_argnum=0)))
    except (ImportError, AttributeError, TypeError):
        return


def native_router():
    """The module that registers PyTorch's own kernels in Python over those of aten, or None.

    PyTorch 2.13 has it, 2.9 does not. It calls the function below for each operator whose kernels
    it registers anew. Without that, nobody is told of its switches, torch.backends.python_native.
    """
    router = getattr(getattr(torch, "_native", None), "registry", None)
    return router if hasattr(router, "_register_overrides_from_graph") else None


def rms_norm_of_torch() -> str:
    """Whose kernels F.rms_norm runs on CUDA: ATen's, or before them those that PyTorch's router has
    registered, quack's where the package nvidia-cutlass-dsl is installed.
    """
    graphs = getattr(native_router(), "_graphs", {})
    nodes = [n for key, of_key in graphs.items() if key[-2:] == RMS_NORM_ON_CUDA for n in of_key]
    names = [NATIVE.get(node.dsl_name, node.dsl_name) for node in nodes if node.active]
    return ", else ".join([*names, "ATen"])


# The hooks of all modules. Without this name every module counts as one with hooks.
_has_any_global_hook = _found(checks.tells_hooks, "nn.modules.module._has_any_global_hook")


def is_its_forward(module: torch.nn.Module) -> bool:
    """Whether module(x) is the forward of its class: no hooks, and no forward of its own."""
    if _has_any_global_hook is None or _has_any_global_hook() or "forward" in vars(module):
        return False
    return not any(getattr(module, name, True) for name in checks.HOOKS)


def inductor_joint_config():
    """Inductor's configuration, or None if it has no passes of graphs.

    Such a pass changes the joint graph of forward and backward before it is cut in two, under the
    option joint_custom_post_pass. Without these names no sum is folded into a gradient.
    """
    try:
        from torch._inductor import config, custom_graph_pass
    except ImportError:
        return None
    known = hasattr(custom_graph_pass, "CustomGraphPass")
    return config if known and hasattr(config, "joint_custom_post_pass") else None
