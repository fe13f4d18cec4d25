"""The interpreter gives expressions the compiler's dtypes, and rejects what the compiler rejects.

The compiler's type checking needs no GPU.
"""

import operator
from itertools import product

import cuda.tile as ct
import pytest
import torch
from cuda.tile._compile import compile_tile
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature

from tests import interpreter
from tests.interpreter.dtypes import TORCH_DTYPE
from tests.ops.helpers import slow

_NAMES = ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NAMES += ("float16", "bfloat16", "float32", "float64")
DTYPES = [getattr(ct, name) for name in _NAMES]
CONSTANTS = [True, 1, 300, -1, 1 << 40, 1.5]
TILES = list(product(DTYPES, DTYPES))
MIXED = [*product(DTYPES, CONSTANTS), *product(CONSTANTS, DTYPES)]
BINARY = [operator.add, operator.truediv, operator.mod, operator.lt, operator.and_]
BINARY += [operator.lshift, ct.maximum]
UNARY = [ct.exp, ct.abs, operator.neg, operator.invert, operator.pos]
REDUCTIONS = [ct.sum, ct.max]
REJECTIONS = (ct.TileTypeError, ct.TileValueError)


def choose(x, y):
    return ct.where(ct.full((2,), 1, ct.bool_), x, y)


# An operation and pairs of operands. An operand is a constant, or a dtype for a tile of that dtype.
EXPRESSIONS = {
    **{f"{op.__name__} of two tiles": (op, TILES) for op in BINARY},
    **{f"{op.__name__} of a tile and a constant": (op, MIXED) for op in BINARY},
    **{op.__name__: (op, [(x,) for x in DTYPES]) for op in UNARY},
    **{op.__name__: (op, [(x, 0) for x in DTYPES]) for op in REDUCTIONS},
    "where": (choose, TILES),
}


def compiled(kernel, *constraints):
    """Compile a kernel up to the compiler's type checking, without making a cubin."""
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v1())
    compile_tile(kernel._annotated_function, [signature], return_cubin=False)


def interpreted(kernel, *args):
    interpreter.launch((1,), kernel, args)


def tile(dtype):
    return ct.full((2,), 1, dtype)


def result_dtype(run, op, operands) -> str | None:
    """The dtype of an operation, or None if `run` rejects it."""
    are_tiles = tuple(isinstance(x, ct.DType) for x in operands)
    first, second = (*operands, None)[:2]
    dtypes = []

    @ct.kernel
    def kernel():
        a = tile(first) if are_tiles[0] else first
        if len(are_tiles) == 2:
            b = tile(second) if are_tiles[1] else second
            result = op(a, b)
        else:
            result = op(a)
        ct.static_eval(dtypes.append(result.dtype))

    try:
        run(kernel)
    except REJECTIONS:
        return None
    return dtypes[0].name


# They promote as the other operators do, and 169 pairs of dtypes take the compiler half a second.
SLOW = ("truediv", "mod", "lt", "lshift", "maximum")
QUICK = [name for name in EXPRESSIONS if not name.startswith(SLOW)]
NAMES = [*QUICK, *slow(*(name for name in EXPRESSIONS if name not in QUICK))]


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_of_expressions(name):
    op, cases = EXPRESSIONS[name]
    found = {x: [result_dtype(run, op, x) for run in (compiled, interpreted)] for x in cases}
    assert not {x: dtypes for x, dtypes in found.items() if dtypes[0] != dtypes[1]}


def accepts(run, kernel, argument) -> bool:
    try:
        run(kernel, argument)
    except REJECTIONS:
        return False
    return True


def test_implicit_casts_of_stores():
    differences = []
    limits = {"stride_lower_bound_incl": 0, "alias_groups": (), "may_alias_internally": False}
    for x in DTYPES:

        @ct.kernel
        def kernel(Y):
            ct.store(Y, 0, ct.full((2,), 1, x))  # noqa: B023

        for y in DTYPES:
            array = ArrayConstraint(y, 1, index_dtype=ct.int32, **limits)
            tensor = torch.zeros(2, dtype=TORCH_DTYPE[y])
            if accepts(compiled, kernel, array) != accepts(interpreted, kernel, tensor):
                differences.append((x, y))
    assert not differences


def backwards():
    for _ in range(4, 0, -1):
        ct.print("never")


REJECTED = {
    "shape": lambda: ct.zeros((3,), ct.float32),
    "arange": lambda: ct.arange(6, dtype=ct.int32),
    "runtime shape": lambda: ct.zeros((ct.bid(0),), ct.float32),
    "reshape": lambda: ct.zeros((4,), ct.float32).reshape((2, 4)),
    "broadcast": lambda: ct.zeros((4,), ct.float32) + ct.zeros((2,), ct.float32),
    "cat": lambda: ct.cat((ct.zeros((4,), ct.float32), ct.zeros((2,), ct.float32)), 0),
    "truth of a tile": lambda: 1 if ct.zeros((2,), ct.bool_) else 2,
    "float of a runtime value": lambda: float(ct.bid(0)),
    "runtime item of a tuple": lambda: (1, 2)[ct.bid(0)],
    "subscript": lambda: ct.zeros((4,), ct.float32)[0],
    "bits of a float": lambda: ct.zeros((4,), ct.float32) & 1,
    "constant out of range": lambda: ct.zeros((4,), ct.int8) + 300,
    "axis": lambda: ct.sum(ct.zeros((4,), ct.float32), 1),
    "block axis": lambda: ct.bid(3),
    "step": backwards,
}


@pytest.mark.parametrize("name", REJECTED)
def test_compiler_and_interpreter_reject(name):
    expression = REJECTED[name]

    @ct.kernel
    def kernel():
        expression()

    for run in (compiled, interpreted):
        with pytest.raises(ct.TileError) as failure:
            run(kernel)
        # An AssertionError would be a failure inside the compiler, not its rejection of the kernel.
        assert not isinstance(failure.value.__cause__, AssertionError)


def test_what_is_rejected_is_otherwise_accepted():
    @ct.kernel
    def kernel():
        ct.zeros((4,), ct.float32).reshape((2, 2))

    for run in (compiled, interpreted):
        run(kernel)
