"""Twins: copies of a norm module with random parameters on the CPU, and runs that are watched.

Recognition compares the outputs of runs. That a forward computes the same for all other inputs, and
does no more than compute, follows from what the runs do besides. A run must not change the
module, its inputs, or the variables that its functions use, print, log, or draw random numbers. A
run of fake tensors with symbolic sizes must not branch on sizes or values.
"""

import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# What a forward cannot change by itself, or whose changes only PyTorch makes.
UNCHANGING = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
# Functions and methods of Python whose call is more than computation, and such of PyTorch.
EFFECTS = {"print", "write", "open", "input", "warn", "register_hook", "exec", "set_rng_state"}
# Operators that may leave all values of a few inputs as they are, and change those of others.
PIECEWISE = {"clamp", "clamp_min", "clamp_max", "clip", "where", "nan_to_num", "maximum", "minimum"}
PIECEWISE |= {"hardtanh", "masked_fill", "threshold", "index_put", "masked_scatter"}
QUIET = ("torch", __package__.partition(".")[0])  # packages that keep caches of their own
MESSAGE = 200  # characters of an error's message that a reason has
TRACED_SIZES = (5, 7, 11, 13, 17)  # each one differs: equal sizes would share a symbol


class Unrecognised(Exception):
    """The module is left as it is; the message gives the reason."""


class Refused(Unrecognised):
    """The forward does not take an input, or does not return a tensor of its shape."""


class NeedsGPU(Refused):
    """The forward takes no tensors on the CPU."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def twin_of(module: nn.Module, dtype: torch.dtype, training: bool = True) -> nn.Module:
    """A module of the same class, with random parameters on the CPU and copies of attributes."""
    parameters = {
        name: nn.Parameter(random(p.shape, dtype, seed))
        for seed, (name, p) in enumerate(parameters_of(module).items())
    }
    replaced = {"training": training, "_parameters": module._parameters | parameters}
    attributes = {n: v for n, v in vars(module).items() if n not in replaced}
    # A forward may change containers: tree_map copies them. Other objects are shared.
    copied = tree_map(lambda v: v.copy() if type(v) is set else v, attributes)
    return instance_of(type(module), copied | replaced)


def instance_of(cls: Any, attributes: dict[str, Any]) -> nn.Module:
    """A module of a class with these attributes, which no __init__ has made."""
    module = object.__new__(cls)
    module.__dict__ = attributes
    return module


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module of the same state and a subclass with another forward."""
    cls: Any = type(module)
    return instance_of(type(cls)(cls.__name__, (cls,), {"forward": forward}), vars(module))


def on_device(module: nn.Module, device: str) -> nn.Module:
    """A module of the same state that takes and gives tensors on the CPU, and whose forward runs on
    another device.
    """
    cls: Any = type(module)

    def forward(self, *inputs):
        parameters = {name: p.to(device) for name, p in parameters_of(self).items()}
        moved = instance_of(cls, vars(self) | {"_parameters": self._parameters | parameters})
        y = cls.forward(moved, *[t.to(device) for t in inputs])
        return y.cpu() if isinstance(y, Tensor) else y

    return with_forward(module, forward)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normally distributed float32 numbers, rounded to the dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def run(twin: nn.Module, *inputs: Tensor) -> Tensor:
    """The result of the class's forward, without hooks. Raises Refused where it takes no such
    inputs, and Unrecognised where it does more than compute.
    """
    before = state_of((vars(twin), inputs)), torch.get_rng_state()
    watch, collects = _Watch(), gc.isenabled()
    gc.disable()  # what finalizers of other objects do would count as the forward's
    sys.setprofile(watch)
    try:
        y = type(twin).forward(twin, *inputs)
    except Exception as error:
        if _needs_a_gpu(error):
            text = "its forward does not run on the CPU, and patch has found no GPU that runs it: "
            raise NeedsGPU(f"{text}{place_of(error)}{_first_line_of(error)}") from error
        raise Refused(f"its forward raised {place_of(error)}") from error
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    if state_of((vars(twin), inputs)) != before[0]:
        raise Unrecognised("its forward changes the module or its input")
    if not torch.equal(torch.get_rng_state(), before[1]):
        raise Unrecognised("its forward draws random numbers")
    if watch.effect:
        raise Unrecognised(f"its forward {watch.effect}")
    if not isinstance(y, Tensor):
        raise Refused(f"its forward returns a {type(y).__name__}, not a tensor")
    if y.shape != inputs[0].shape:
        raise Refused(f"its forward maps shape {list(inputs[0].shape)} to {list(y.shape)}")
    return y


def check_branches(twin: nn.Module, tail: tuple[int, ...], dims: int, number: int) -> None:
    """Raise Unrecognised if the forward asks for values, or for sizes of its input before the tail.

    dims, number: how many dimensions the input has, and how many tensors forward takes.
    """
    dynamic = dims - len(tail)
    shape = TRACED_SIZES[:dynamic] + tail
    sizes = ShapeEnv()
    fake = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    kinds = [DimDynamic.DYNAMIC] * dynamic + [DimDynamic.STATIC] * len(tail)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it logs what we report
    disabled, logger.disabled = logger.disabled, True
    try:
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        x = fake.from_tensor(torch.empty(shape), symbolic_context=context)
        # What a cache would keep is not asked for again, and takes a third of patch's time.
        with fake, disable_fake_tensor_cache(fake), _Operators() as operators:
            x.requires_grad_()
            type(twin).forward(twin, *(x, torch.empty_like(x))[:number])
    except Exception as error:
        text = "its forward branches on values, or PyTorch cannot trace it with unknown sizes"
        raise Unrecognised(text) from error
    finally:
        logger.disabled = disabled
    if sizes.guards:
        raise Unrecognised("its forward branches on sizes of its input")
    piecewise = sorted(operators.names & PIECEWISE)
    if piecewise:
        raise Unrecognised(f"its forward selects values by {', '.join(piecewise)}")


class _Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__.rstrip("_"))
        return function(*args, **(kwargs or {}))


class _Watch:
    """A profile function that looks for effects of the functions that are not PyTorch's. effect:
    what such a function does besides computing; "" for nothing. What a first call does once is no
    effect of the forward: imports, Triton's compilations, and what PyTorch logs.
    """

    def __init__(self):
        self.effect, self._before = "", {}
        self._once: FrameType | None = None  # such a call that has not returned

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        function, caller = frame.f_code.co_name, frame.f_back
        if self._once is None and event == "call" and _is_done_once(frame):
            self._once = frame
        if self._once:
            if event == "return" and frame is self._once:
                self._once = None
            return
        if event == "c_call":
            function, caller = getattr(argument, "__name__", ""), frame
        if event in ("call", "c_call") and function in EFFECTS and not _is_of(caller, *QUIET):
            self.effect = f"calls {function}"
        if _is_of(frame, *QUIET):
            return
        if event == "call":
            self._before[frame] = _variables(frame)
            if _is_of(frame, "logging"):
                self.effect = "logs"
        elif event == "return" and self._before.pop(frame, None) not in (None, _variables(frame)):
            self.effect = f"changes variables outside of {function}"


def _is_done_once(frame: FrameType) -> bool:
    """Whether a call does what a first call of a forward does."""
    by_pytorch = _is_of(frame, "logging") and _is_of(frame.f_back, *QUIET)
    return by_pytorch or _is_of(frame, "importlib", "triton")


def _is_of(frame: FrameType, *packages: str) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0] in packages


def _variables(frame: FrameType) -> list:
    """The state of the variables that a function shares with others, and of their attributes."""
    code = frame.f_code
    states = []
    for value in (frame.f_globals[n] for n in code.co_names if n in frame.f_globals):
        attributes = getattr(value, "__dict__", {})
        states.append(state_of((value, *(attributes[n] for n in code.co_names if n in attributes))))
    shared = frame.f_locals if code.co_freevars else {}
    return states + [state_of(shared[name]) for name in code.co_freevars if name in shared]


def state_of(value: Any, objects: bool = True) -> object:
    """A description of a value that differs after a change of it or of a container in it. objects:
    whether attributes of other objects are part of it.
    """
    leaves, structure = tree_flatten(value)
    return structure, [_state_of_leaf(leaf, objects) for leaf in leaves]


def _state_of_leaf(value: Any, objects: bool) -> object:
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return id(value), version, len(value._backward_hooks or ())
    if isinstance(value, (int, float, str, set)):
        return type(value), repr(value)
    if objects and not isinstance(value, UNCHANGING):
        return id(value), state_of(getattr(value, "__dict__", None), objects=False)
    return id(value)


def place_of(error: Exception) -> str:
    """What was raised, and where in code that is neither PyTorch's nor this package's. A message of
    PyTorch would speak of inputs that nobody but patch has made.
    """
    lines = [(f, n) for f, n in walk_tb(error.__traceback__) if not _is_of(f, *QUIET, "concurrent")]
    places = [f" in line {n} of {Path(f.f_code.co_filename).name}" for f, n in lines]
    return type(error).__name__ + "".join(places[-1:])


def _first_line_of(error: Exception) -> str:
    """The beginning of an error's message, in parentheses; "" without a message."""
    line, *_ = str(error).strip().splitlines() or [""]
    return f" ({shorten(line, MESSAGE)})" if line else ""


def _needs_a_gpu(error: Exception) -> bool:
    """Whether a forward was refused tensors that are on the CPU. On a GPU too, an error that speaks
    of CUDA counts as such: the reason has the error's message, and tells which it is.
    """
    of_triton = any(_is_of(frame, "triton") for frame, _ in walk_tb(error.__traceback__))
    return of_triton or any(word in str(error).lower() for word in ("cuda", "'cpu' backend"))
