"""Each public function and module, as one table: how it is called with random tensors."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilenorm
from tilenorm.spec import Quantization
from tilenorm.table import ADDEND, BRANCH_PORTS, MODULATED_NORMS, OPS, ROTATED_NORMS

from .calls import EPS, random
from .quantized import arguments

ROWS, HIDDEN = 6, 256
CHAINS = tuple(name for name, op in OPS.items() if op.calls)
HOW = Quantization("block", layout="column", output=True, amax=True)
Outputs = dict[str, Tensor]


class Use(NamedTuple):
    """A public function or module.

    rows, parameters: the names of its tensors. make: of the parameters by name, a function of rows
    that returns outputs by name. like: the function whose outputs are the same. mixed: whether rows
    and parameters may have two dtypes. same_bits: whether each state gives the same bits, as
    tilenorm promises for what it computes. around: the context of forward and backward pass.
    """

    rows: tuple[str, ...]
    parameters: tuple[str, ...]
    make: Callable[[dict[str, Tensor]], Callable[..., Outputs]]
    like: str
    mixed: bool = True
    same_bits: bool = True
    around: Callable[[], AbstractContextManager] = nullcontext

    def tensors(self, dtypes: tuple, device: str) -> dict[str, Tensor]:
        """All tensors by name, the same values on each device. dtypes: of rows, of parameters."""
        made = {}
        for seed, name in enumerate((*self.rows, *self.parameters)):
            row = name in self.rows
            shape = (ROWS, HIDDEN) if row else (HIDDEN,)
            values = random(*shape, dtype=dtypes[not row], device=device, seed=seed)
            made[name] = nn.Parameter(values)
        return made

    def bound(self, tensors: dict[str, Tensor]) -> tuple[Callable[..., Outputs], list[Tensor]]:
        """The function of rows, and the rows."""
        function = self.make({name: tensors[name] for name in self.parameters})
        return function, [tensors[name] for name in self.rows]


def outputs_of(returned) -> Outputs:
    """The outputs by name, of whatever a function returns."""
    if hasattr(returned, "_asdict"):
        return {name: t for name, t in returned._asdict().items() if t is not None}
    returned = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(("output", "residual_out")[: len(returned)], returned, strict=True))


def of_function(name: str, parameters: dict[str, Tensor], **options) -> Callable[..., Outputs]:
    function = getattr(tilenorm, name)

    def call(*rows):
        more = {}
        if name in ROTATED_NORMS:
            return rotated(function, *rows, **parameters, **options)
        if name in MODULATED_NORMS:  # they take the residual by its name
            rows, more = rows[:1], {"residual": rows[1]}
        return outputs_of(function(*rows, (HIDDEN,), **parameters, **more, eps=EPS, **options))

    return call


def rotated(function: Callable, input: Tensor, key: Tensor, **given) -> Outputs:
    """Each row has one head. Eager and compiled code compute the tables exactly."""
    cos = torch.arange(HIDDEN // 2, device=input.device) / HIDDEN
    tables, rows = (cos, 1 - cos), (input.unsqueeze(1), key.unsqueeze(1))
    made = function(rows[0], (HIDDEN,), *tables, key=rows[1], eps=EPS, **given)
    return dict(zip(("output", "key_output"), made, strict=True))


def of_module(kind: type[nn.Module], parameters: dict[str, Tensor]) -> Callable[..., Outputs]:
    is_ours = kind.__module__.startswith("tilenorm")
    module = kind(HIDDEN, eps=EPS) if is_ours else copy.deepcopy(_patched(kind))
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    return lambda x: {"output": module(x)}


def of_modulated(kind: type[nn.Module], parameters: dict[str, Tensor]) -> Callable[..., Outputs]:
    module, given = kind(HIDDEN, EPS, True), dict(parameters)
    for name in [n for n in ("weight", "bias") if n in given]:
        setattr(module, name, given.pop(name))
    return lambda x, residual: outputs_of(module(x, residual=residual, **given))


@cache
def _patched(kind: type[nn.Module]) -> nn.Module:
    """patch tries a norm for a quarter of a second."""
    module = kind(HIDDEN, eps=EPS)
    tilenorm.patch(module)
    return module


def of_pytorch(function: Callable, parameters: dict[str, Tensor]) -> Callable[..., Outputs]:
    return lambda x: {"output": function(x, (HIDDEN,), **parameters, eps=EPS)}


def _uses() -> dict[str, Use]:
    found, weight, both = {}, ("weight",), ("weight", "bias")
    one, two = ("input",), ("input", "residual")
    for name, op in OPS.items():
        taken = [port for port in op.takes if port not in (ADDEND, *BRANCH_PORTS)]
        rows = [port.name for port in taken if port.dims in ("... n", "t k d")]
        parameters = [port.name for port in taken if port.parameter or port.dims == "g n"]
        make = partial(of_function, name, **(arguments(HOW) if op.quantized else {}))
        like = name.removesuffix("_quantized")
        found[name] = Use(tuple(rows), tuple(parameters), make, like)
    for norm, function, names in (
        ("RMSNorm", "rms_norm", weight),
        ("LayerNorm", "layer_norm", both),
    ):
        ours, theirs = getattr(tilenorm, norm), getattr(nn, norm)
        found[norm] = Use(one, names, partial(of_module, ours), function)
        patched = partial(of_module, theirs)
        found[f"patch of {norm}"] = Use(one, names, patched, function, False)
        by_group = ("scale", "shift", "gate", *names)
        make = partial(of_modulated, getattr(tilenorm, f"Modulated{norm}"))
        found[f"Modulated{norm}"] = Use(two, by_group, make, f"modulated_{function}")
        make = partial(of_pytorch, getattr(F, function))
        found[f"override of {function}"] = Use(
            one, names, make, function, False, False, tilenorm.override
        )
    return found


USES = _uses()


def of_kernels(name: str) -> Use:
    """A use that the kernels serve in one pass: RMSNorms have no bias."""
    use = USES[name]
    if name not in OPS or "rms" not in name:
        return use
    return use._replace(parameters=tuple(n for n in use.parameters if n != "bias"))
