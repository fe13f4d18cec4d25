"""The functions of the registry's entry cutile, by its documentation of Implementation.

Each makes a plan for a spec and binds it. launcher: the keyword argument `run` of the functions
that bind, or nothing. This module imports cuda.tile.
"""

from collections.abc import Callable
from functools import partial

from ..launch.calls import Needs
from ..launch.plan import chain_refused, plan_backward, plan_forward
from ..spec import NormSpec
from . import cutile
from .registry import Device
from .split import cutile as split


def forward(spec: NormSpec, device: Device, save: bool, launcher: dict) -> Callable | None:
    """None for a chain that one pass does not serve."""
    if spec.inner and chain_refused(spec, device.target):
        return None
    plan = plan_forward(spec, device.target, save)
    if spec.inner:
        return cutile.bind_chain(plan, **launcher)
    if not spec.quantized:
        return cutile.bind_forward(plan, **launcher)
    if plan.spec.quantized:
        return cutile.bind_quantized(plan, **launcher)
    return cutile.bind_cast_apart(spec, plan, **launcher)


def backward(spec: NormSpec, device: Device, needs: Needs, launcher: dict) -> Callable:
    return cutile.bind_backward(plan_backward(spec, device.target, needs), **launcher)


def piece(name: str, spec: NormSpec, device: Device, launcher: dict) -> Callable:
    return partial(getattr(split, name), spec, device.target, **launcher)
