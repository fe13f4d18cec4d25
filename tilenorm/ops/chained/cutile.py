"""The chain by cuTile: which specs one pass serves, and the launch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...launch.calls import ABSENT, ForwardArrays
from ...launch.plan import chain_refused, plan_forward
from ...launch.toolchain import CompileError
from ...spec import NormSpec
from ..cutile import fresh, on_device
from ..layout import as_read, shaped_as
from ..registry import Device, failure, record_failure
from ..tensors import Tensors


def serves(spec: NormSpec, device: Device) -> bool:
    """Whether one pass serves a spec on a device, on which cuTile serves both of its norms."""
    return not failure("cutile", spec, device) and not _refused(spec, device)


@cache
def _refused(spec: NormSpec, device: Device) -> str | None:
    return chain_refused(spec, device.target)


def forward(
    spec: NormSpec, device: Device, tensors: tuple, eps: float, save: bool
) -> tuple[Tensor | None, ...] | None:
    """y, the sum, and each norm's rstd; or None where the kernel does not compile.

    tensors: input, residual, the weight of the norm before the addition and that of the norm after.
    """
    x, residual, weight, after = tensors
    plan = plan_forward(spec, device.target, save)
    shape = x.numel() // spec.hidden, spec.hidden
    y, total = (fresh(x, shape, residual.dtype) for _ in range(2))
    rstds = [fresh(x, shape[:1], torch.float32) if plan.save else None for _ in range(2)]
    if shape[0]:
        read = Tensors(*as_read(Tensors(x, residual, weight=after), spec, shape))
        inner = Tensors(*as_read(Tensors(x, weight=weight), spec, shape))
        made = {"x": read.input, "residual": read.residual}
        made |= {"weight": read.weight, "inner_w": inner.weight}
        made |= {"y": y, "sum": total, "inner_rstd": rstds[0], "rstd": rstds[1]}
        arrays: dict[str, Any] = dict.fromkeys(ForwardArrays._fields, ABSENT)
        arrays |= {name: t for name, t in made.items() if t is not None}
        try:
            on_device(plan.launches(shape[0], eps), ForwardArrays(**arrays), x.get_device())
        except CompileError as error:
            record_failure("cutile", spec, device, error)
            return None
    if x.shape != shape:
        y, total = shaped_as(y, x), shaped_as(total, x)
    return y, total, *rstds
