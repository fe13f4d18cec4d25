"""The functions of the registry's entry cutile, by its documentation of Implementation.

Each makes a plan for a spec and returns what launches it. launcher: the keyword argument `run` of
these functions, or nothing. This module imports cuda.tile.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType

from ..launch.calls import Needs
from ..launch.plan import BackwardPlan, ForwardPlan, plan_backward, plan_forward
from ..spec import NormSpec
from . import cutile
from .quantized import cutile as quantized_cutile
from .registry import Device
from .split import cutile as split


def forward(spec: NormSpec, device: Device, save: bool, launcher: dict) -> Callable:
    plan = plan_forward(spec, device.target, save)
    if not spec.quantized:
        return _bound(cutile.forward, plan, launcher)
    if plan.spec.quantized:
        return _bound(quantized_cutile.forward, plan, launcher)
    return partial(quantized_cutile.cast_apart, spec, plan, **launcher)


def backward(spec: NormSpec, device: Device, needs: Needs, launcher: dict) -> Callable:
    return _bound(cutile.backward, plan_backward(spec, device.target, needs), launcher)


def piece(name: str, spec: NormSpec, device: Device, launcher: dict) -> Callable:
    return partial(getattr(split, name), spec, device.target, **launcher)


def _bound(function: Callable, plan: ForwardPlan | BackwardPlan, launcher: dict) -> Callable:
    if launcher:
        return partial(function, plan, **launcher)
    return MethodType(function, plan)  # a call takes less time than a partial's
