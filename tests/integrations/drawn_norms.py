"""Draws norm modules, part by part, and inputs for them. Every function takes a random.Random."""

import inspect
import math
import warnings
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.calls import random

N = 8
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Whether a forward leaves early, by what its module and its input are.
EARLY = {
    "none": lambda module, x: False,
    "empty": lambda module, x: x.numel() == 0,
    "one row": lambda module, x: x.numel() == x.shape[-1],
    "matrix": lambda module, x: x.dim() == 2,
    "no gradients": lambda module, x: not torch.is_grad_enabled(),
    "strided": lambda module, x: not x.is_contiguous(),
    "float16": lambda module, x: x.dtype is torch.float16,
    "long": lambda module, x: x.shape[0] > 20,
    "odd": lambda module, x: x.shape[0] % 5 == 0 and x.shape[0] > 3,
    "large": lambda module, x: bool((x.abs() > 1e5).any()),
    "training": lambda module, x: module.training,
}
# The values of each part; the first one is that of an ordinary norm, and drawn most often.
PARTS = {
    "norm": ("rms", "layer", "torch", "mean of the batch", "detached mean", "another scale"),
    "shape": ((N,), None, (1, N), (1, 1, N), (), (1,), (3, 1), (3, N), (1, 3, N), (0,)),
    "bias": (False, True),
    "offset": (0.0, 1.0),
    "cast": ("float32", "none", "16 bits"),
    "x̂": ("none", "input", "weight"),
    "output": ("input", "none", "weight"),
    "eps": ("attribute", "hard-coded", "of the input", "of the length", "outside"),
    "second": ("none", "gate", "gate=None", "needs gate=None", "residual=None", "flip=False"),
    "gate": ("after", "before", "sigmoid", "gelu"),
    "view": ("none", "rows", "groups", "groups of unknown size", "transposed", "no images"),
    "early": (*EARLY, "too long", "clamped", "detached in 16 bits"),
    "effect": (
        *("none", "attribute", "count", "list", "global", "print", "warning", "in place"),
        *("parameter", "noise", "hook", "closure"),
    ),
}
CALLS = []


def parts(rng: Random) -> dict:
    """A value of each part. At most three or so are not ordinary."""
    names = *PARTS, *("early",) * 6, *("effect", "second") * 2
    odd = rng.choices(names, k=rng.choice((0, 1, 1, 2, 2, 3)))
    return {
        name: rng.choice(values) if name in odd else values[0] for name, values in PARTS.items()
    }


def with_parts(parts: dict[str, object]) -> nn.Module:
    """A module whose other parts are ordinary."""
    ordinary = {name: values[0] for name, values in PARTS.items()}
    return drawn_class(ordinary | parts)()


def gated_norm() -> nn.Module:
    """An RMSNorm of an input, which a gate multiplies if there is one."""
    return with_parts({"second": "gate=None", "gate": "before"})


def drawn_class(parts: dict) -> type[nn.Module]:
    """A class of norms that these parts describe."""
    count = 0

    def arguments_of(forward):
        kinds = {
            "none": lambda self, x: forward(self, x),
            "gate": lambda self, x, z: forward(self, x, z),
            "residual=None": lambda self, x, residual=None: forward(self, x, None, residual),
            "flip=False": lambda self, x, flip=False: forward(self, -x if flip else x),
        }
        return kinds.get(parts["second"], lambda self, x, gate=None: forward(self, x, gate))

    class DrawnNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps, self.calls, self.history, self.group_size = 1e-5, 0, [], 4
            shape = parts["shape"]
            self.g = None if shape is None else nn.Parameter(torch.ones(shape))
            self.b = (
                nn.Parameter(torch.zeros(shape)) if shape is not None and parts["bias"] else None
            )

        @arguments_of
        def forward(self, x, gate=None, residual=None):
            nonlocal count
            if residual is not None:
                x = x + residual
            if EARLY.get(parts["early"], EARLY["none"])(self, x):
                return x * 1
            if parts["early"] == "too long" and len(x) > 20:
                raise ValueError("at most 20 rows")
            if parts["second"] == "needs gate=None":
                gate = gate * 1
            y = scaled(parts, self, viewed(parts, self, x, gate), gate, x)
            count += parts["effect"] == "closure"
            has_effect(parts["effect"], self, x, y)
            return (y, x) if residual is not None else y

    return DrawnNorm


def viewed(parts: dict, module: nn.Module, x: Tensor, gate: Tensor | None) -> Tensor:
    """x̂."""
    shape, dtype = x.shape, x.dtype
    if parts["early"] == "clamped":
        x = x.clamp(-6e4, 6e4)
    if parts["cast"] != "none":
        x = x.to(torch.float32 if parts["cast"] == "float32" else torch.bfloat16)
    if gate is not None and parts["gate"] == "before":
        x = x * F.silu(gate.to(x.dtype))
    match parts["view"]:
        case "rows":
            x = x.view(-1, shape[-1])
        case "groups":
            x = x.view(*shape[:-1], shape[-1] // module.group_size, module.group_size)
        case "groups of unknown size":
            x = x.reshape(*shape[:-1], 2, -1)
        case "transposed":
            x = x.transpose(0, 1)
        case "no images" if x.dim() == 4:
            raise ValueError("takes no images")
    y = normalised(parts, module, x)
    y = y.transpose(0, 1) if parts["view"] == "transposed" else y.view(shape)
    if parts["early"] == "detached in 16 bits" and dtype != torch.float32:
        y = y + (x.mean() - x.mean().detach()).to(y.dtype)
    if parts["x̂"] == "input":
        y = y.to(dtype)
    if parts["x̂"] == "weight" and module.g is not None:
        y = y.to(module.g.dtype)
    return y


def normalised(parts: dict, module: nn.Module, x: Tensor) -> Tensor:
    eps = 1e-6 if parts["eps"] == "hard-coded" else module.eps
    if parts["eps"] == "of the input":
        eps = eps * x.square().mean(-1, keepdim=True)
    if parts["eps"] == "of the length":
        eps = eps * len(x)
    if parts["norm"] == "torch":
        return F.rms_norm(x, x.shape[-1:], None, eps if isinstance(eps, float) else 1e-6)
    if parts["norm"] in ("layer", "detached mean"):
        mean = x.mean(-1, keepdim=True)
        x = x - (mean if parts["norm"] == "layer" else mean.detach())
    variance = x.square().mean((0, -1) if "batch" in parts["norm"] else -1, keepdim=True)
    if parts["eps"] == "outside":
        return x / (variance.sqrt() + eps)
    scale = 1.00001 if parts["norm"] == "another scale" else 1
    return x * torch.rsqrt(variance + eps) * scale


def scaled(parts: dict, module: nn.Module, y: Tensor, gate: Tensor | None, x: Tensor) -> Tensor:
    """The weight, the bias, the gate, and the last cast."""
    if module.g is not None:
        y = y * (module.g + parts["offset"])
        y = y if module.b is None else y + module.b
    if gate is not None and parts["gate"] != "before":
        act = {"after": F.silu, "sigmoid": torch.sigmoid, "gelu": F.gelu}[parts["gate"]]
        y = y * act(gate.to(y.dtype))
    if parts["output"] == "weight" and module.g is not None:
        return y.to(module.g.dtype)
    return y.to(x.dtype) if parts["output"] == "input" else y


def has_effect(kind: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
    match kind:
        case "attribute":
            module.last = y.detach().float().square().mean()
        case "count":
            module.calls += 1
        case "list":
            module.history.append(len(x))
        case "global":
            CALLS.append(1)
        case "print":
            print("a norm of", tuple(x.shape))
        case "warning":
            warnings.warn("a norm", stacklevel=2)
        case "in place":
            with torch.no_grad():
                x.add_(1)
        case "parameter" if module.g is not None:
            with torch.no_grad():
                module.g.mul_(0.5)
        case "noise":
            torch.rand(3)
        case "hook" if y.requires_grad:
            y.register_hook(lambda grad: CALLS.append(2))


def module_of(rng: Random, parts: dict) -> nn.Module:
    module = drawn_class(parts)().to(rng.choice(DTYPES)).train(rng.random() < 0.5)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed))
    return module


def inputs_of(rng: Random, module: nn.Module) -> list[Tensor]:
    """Arguments of a call: an input of any rank, empty, of one row or column, or strided."""
    trailing = rng.choice((*((N,),) * 10, (3, N), (1, N), (1,), (N, 1), (5,), ()))
    leading = [rng.choice((1, 2, 5, 0, 25)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
    shape = *leading, *trailing
    dtype = module.g.dtype if module.g is not None and rng.random() < 0.6 else rng.choice(DTYPES)
    scale = rng.choice((1.0, 1.0, 1e-3, 30.0, 1e5))

    def tensor(seed: int) -> Tensor:
        sizes = shape[::-1] if kind == "transposed" else (*shape, 2) if kind == "strided" else shape
        made = (random(*sizes, seed=seed) * (1.0 if seed else scale)).to(dtype)
        if kind == "transposed":
            return made.permute(tuple(reversed(range(len(shape)))))
        return made[..., 0] if kind == "strided" else made

    kind = rng.choice(("contiguous", "contiguous", "strided", "transposed"))
    takes = len(inspect.signature(module.forward).parameters)
    count = rng.choice((1, takes, takes, 2)) if math.prod(shape) < 10**5 else 1
    return [tensor(seed) for seed in range(count)]
