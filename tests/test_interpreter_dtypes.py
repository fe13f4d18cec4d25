"""The interpreter gives expressions the compiler's dtypes, and rejects what the compiler rejects.

The compiler's type checking needs no GPU.
"""

import itertools
import operator

import cuda.tile as ct
import pytest
import torch
from cuda.tile._compile import compile_tile
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature

from tests import interpreter
from tests.interpreter.dtypes import TORCH_DTYPE

_NAMES = ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NAMES += ("float16", "bfloat16", "float32", "float64")
DTYPES = [getattr(ct, name) for name in _NAMES]
CONSTANTS = [True, 1, 300, -1, 1 << 40, 1.5]
BINARY = [
    operator.add,
    operator.truediv,
    operator.mod,
    operator.lt,
    operator.and_,
    operator.lshift,
    ct.maximum,
]
UNARY = [ct.exp, ct.sqrt, ct.floor, ct.abs, operator.neg, operator.invert, operator.pos]
REDUCTIONS = [ct.sum, ct.max, ct.prod, ct.argmax, ct.cumsum]


def compiled(kernel, *constraints):
    """Compile a kernel up to the compiler's type checking, without making a cubin."""
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v1())
    compile_tile(kernel._annotated_function, [signature], return_cubin=False)


def array_constraint(dtype):
    return ArrayConstraint(
        dtype,
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
    )


def interpreted(kernel, *args):
    interpreter.launch((1,), kernel, args)


def result_dtype(run, kernel, dtypes, *args):
    """The dtype that a probe kernel appends to `dtypes`, or None if `run` rejects the kernel."""
    dtypes.clear()
    try:
        run(kernel, *args)
    except (ct.TileTypeError, ct.TileValueError):
        return None
    return dtypes[0].name


def disagreements(cases):
    """Kernels whose dtype differs between compiler and interpreter."""
    differences = {}
    for name, kernel, dtypes in cases:
        expected, actual = (result_dtype(run, kernel, dtypes) for run in (compiled, interpreted))
        if expected != actual:
            differences[name] = f"compiler {expected}, interpreter {actual}"
    return differences


def probe(expression):
    """A kernel that evaluates an expression, and the list to which it appends the result's dtype.

    The kernel appends the dtype when it is compiled and when it is interpreted.
    """
    dtypes = []

    @ct.kernel
    def kernel():
        result = expression()
        ct.static_eval(dtypes.append(result.dtype))

    return kernel, dtypes


def tile(dtype):
    return ct.full((2,), 1, dtype)


def binary_probe(op, x, y):
    """A probe of op(x, y). An operand is a constant, or a dtype for a tile of that dtype."""
    x_is_tile, y_is_tile = isinstance(x, ct.DType), isinstance(y, ct.DType)

    def expression():
        a = tile(x) if x_is_tile else x
        b = tile(y) if y_is_tile else y
        return op(a, b)

    return probe(expression)


def unary_probe(op, x):
    """A probe of op(tile of dtype x)."""

    def expression():
        return op(tile(x))

    return probe(expression)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_of_two_tiles(op):
    pairs = itertools.product(DTYPES, DTYPES)
    assert disagreements(((x.name, y.name), *binary_probe(op, x, y)) for x, y in pairs) == {}


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_of_tile_and_constant(op):
    pairs = [*itertools.product(DTYPES, CONSTANTS), *itertools.product(CONSTANTS, DTYPES)]
    assert disagreements(((x, y), *binary_probe(op, x, y)) for x, y in pairs) == {}


def test_power_of_floats():
    # Integer powers pass the type checking and fail later: the compiler has no code for them.
    pairs = itertools.product(DTYPES[-4:], CONSTANTS)
    assert disagreements(((x, y), *binary_probe(operator.pow, x, y)) for x, y in pairs) == {}


def test_where():
    pairs = itertools.product(DTYPES, DTYPES)
    assert disagreements(((x.name, y.name), *binary_probe(choose, x, y)) for x, y in pairs) == {}


def choose(x, y):
    return ct.where(ct.full((2,), 1, ct.bool_), x, y)


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_unary(op):
    assert disagreements((x.name, *unary_probe(op, x)) for x in DTYPES) == {}


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.__name__)
def test_reductions(op):
    assert disagreements((x.name, *binary_probe(op, x, 0)) for x in DTYPES) == {}


def test_implicit_casts_of_stores():
    differences = {}
    for x in DTYPES:

        @ct.kernel
        def kernel(Y):
            ct.store(Y, 0, ct.full((2,), 1, x))  # noqa: B023

        for y in DTYPES:
            accepted = []
            for run, arg in (
                (compiled, array_constraint(y)),
                (interpreted, torch.zeros(2, dtype=TORCH_DTYPE[y])),
            ):
                try:
                    run(kernel, arg)
                    accepted.append(True)
                except (ct.TileTypeError, ct.TileValueError):
                    accepted.append(False)
            if accepted[0] != accepted[1]:
                differences[x.name, y.name] = accepted
    assert differences == {}


def rejected_shape():
    ct.zeros((3,), ct.float32)


def rejected_arange():
    ct.arange(6, dtype=ct.int32)


def rejected_runtime_shape():
    ct.zeros((ct.bid(0),), ct.float32)


def rejected_reshape():
    ct.zeros((4,), ct.float32).reshape((2, 4))


def rejected_broadcast():
    ct.zeros((4,), ct.float32) + ct.zeros((2,), ct.float32)


def rejected_broadcast_to():
    ct.broadcast_to(ct.zeros((4,), ct.float32), (4, 2))


def rejected_cat():
    ct.cat((ct.zeros(4, ct.float32), ct.zeros(2, ct.float32)), 0)


def rejected_truth_of_a_tile():
    if ct.zeros((2,), ct.bool_):
        ct.print("true")


def rejected_float_of_a_runtime_value():
    float(ct.bid(0))


def rejected_runtime_item_of_a_tuple():
    (1, 2)[ct.bid(0)]


def rejected_subscript():
    ct.zeros((4,), ct.float32)[0]


def rejected_bits_of_a_float():
    ct.zeros((4,), ct.float32) & 1


def rejected_constant_out_of_range():
    ct.zeros((4,), ct.int8) + 300


def rejected_rounding_of_an_integer():
    ct.add(ct.zeros((4,), ct.int32), 1, rounding_mode=ct.RoundingMode.RZ)


def rejected_axis():
    ct.sum(ct.zeros((4,), ct.float32), 1)


def rejected_block_axis():
    ct.bid(3)


def rejected_step():
    for _ in range(4, 0, -1):
        ct.print("never")


REJECTED = {name: f for name, f in globals().items() if name.startswith("rejected_")}


@pytest.mark.parametrize("expression", REJECTED.values(), ids=REJECTED.keys())
def test_compiler_and_interpreter_reject(expression):
    @ct.kernel
    def kernel():
        expression()

    for run in (compiled, interpreted):
        with pytest.raises(ct.TileError) as failure:
            run(kernel)
        # An AssertionError would be a failure inside the compiler, not its rejection of the kernel.
        assert not isinstance(failure.value.__cause__, AssertionError)
