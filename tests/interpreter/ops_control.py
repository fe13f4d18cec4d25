"""Block indices, compile-time evaluation, assertions and printing."""

import re
import sys

import cuda.tile as ct

from . import dtypes
from .dispatch import current, describe, implements
from .errors import InterpreterError
from .tile import LoopIndex, Tile, as_int, as_tile, constant_int, scalar


def _axis(axis) -> int:
    if constant_int(axis, "axis") not in (0, 1, 2):
        raise ct.TileTypeError(f"axis must be 0, 1 or 2, got {axis}")
    return axis


@implements(ct.bid)
def _bid(axis):
    return scalar(current().block[_axis(axis)], ct.int32)


@implements(ct.num_blocks)
def _num_blocks(axis):
    return scalar(current().grid[_axis(axis)], ct.int32)


@implements(ct.assume_divisible_by)
def _assume_divisible_by(x, divisor):
    if as_int(x, "x", signed_only=False) % constant_int(divisor, "divisor"):
        raise InterpreterError(f"{x} is not divisible by {divisor}, as assume_divisible_by() says")
    return x


@implements(ct.grid_dependency_control_wait)
@implements(ct.grid_dependency_control_launch_dependents)
def _grid_dependency_control():
    return None


def unwrap_loop_indices(value):
    """Turn loop indices into Python integers, as the compiler does in static expressions."""
    if isinstance(value, LoopIndex):
        return int(value.data)
    if isinstance(value, tuple):
        return tuple(unwrap_loop_indices(v) for v in value)
    return value


@implements(ct.static_eval)
def _static_eval(expr):
    return unwrap_loop_indices(expr)


@implements(ct.static_assert)
def _static_assert(condition, message=None):
    if not isinstance(condition, bool):
        raise ct.TileTypeError(f"static_assert needs a constant boolean, got {describe(condition)}")
    if not condition:
        text = "" if message is None else describe(message)
        raise ct.TileStaticAssertionError(text)


@implements(ct.ensure_constant)
def _ensure_constant(value):
    if isinstance(value, Tile):
        raise ct.TileStaticAssertionError(
            "Argument of ensure_constant() is not a compile-time constant"
        )
    return value


@implements(ct.assert_)
def _assert(cond, message=None):
    cond = as_tile(cond)
    if cond.dtype != ct.bool_:
        raise ct.TileTypeError(f"the condition must be boolean, got {cond.describe()}")
    if not cond.data.all():
        raise InterpreterError(f"assertion failed: {message or ''}")


@implements(ct.print)
def _print(*args, sep=" ", end="\n"):
    print(*args, sep=sep, end=end)


_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|L|z|j|t)?([diuoxXeEfFgGaA])")


@implements(ct.printf)
def _printf(format, *args):
    values = iter(args)

    def convert(match):
        tile, kind = as_tile(next(values)), match[1]
        if (kind in "diuoxX") == dtypes.is_float(tile.dtype):
            raise ct.TileTypeError(f"{match[0]} does not fit {tile.describe()}")
        return _c_format(re.sub(r"[hlLzjt]", "", match[0]), tile.data.tolist())

    sys.stdout.write(_CONVERSION.sub(convert, format).replace("%%", "%"))


def _c_format(conversion: str, value) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_c_format(conversion, v) for v in value) + "]"
    return conversion % value
