"""The interpreter types and refuses expressions as the compiler does, which needs no GPU for it."""

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
    """Compile a kernel as far as the compiler types it."""
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


def typed(run, kernel, noted, *args):
    """The dtype that a kernel noted under an executor, or None where it was refused."""
    noted.clear()
    try:
        run(kernel, *args)
    except (ct.TileTypeError, ct.TileValueError):
        return None
    return noted[0].name


def disagreements(cases):
    """Kernels whose dtype differs between compiler and interpreter."""
    found = {}
    for name, kernel, noted in cases:
        expected, actual = typed(compiled, kernel, noted), typed(interpreted, kernel, noted)
        if expected != actual:
            found[name] = f"compiler {expected}, interpreter {actual}"
    return found


def probe(expression):
    """A kernel that notes the dtype of an expression, evaluated when it is compiled or run."""
    noted = []

    @ct.kernel
    def kernel():
        result = expression()
        ct.static_eval(noted.append(result.dtype))

    return kernel, noted


def tile(dtype):
    return ct.full((2,), 1, dtype)


def binary_probe(op, x, y):
    """Probe op(x, y), each a dtype, for a tile of it, or a constant."""
    x_is_tile, y_is_tile = isinstance(x, ct.DType), isinstance(y, ct.DType)

    def expression():
        a = tile(x) if x_is_tile else x
        b = tile(y) if y_is_tile else y
        return op(a, b)

    return probe(expression)


def unary_probe(op, x):
    def expression():
        return op(tile(x))

    return probe(expression)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_tiles(op):
    pairs = itertools.product(DTYPES, DTYPES)
    assert disagreements(((x.name, y.name), *binary_probe(op, x, y)) for x, y in pairs) == {}


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_tile_and_constant(op):
    pairs = [*itertools.product(DTYPES, CONSTANTS), *itertools.product(CONSTANTS, DTYPES)]
    assert disagreements(((x, y), *binary_probe(op, x, y)) for x, y in pairs) == {}


def test_power_of_floats():
    # Integer powers are typed, and fail later: the compiler has no code for them.
    pairs = itertools.product(DTYPES[-4:], CONSTANTS)
    assert disagreements(((x, y), *binary_probe(operator.pow, x, y)) for x, y in pairs) == {}


def test_where():
    pairs = itertools.product(DTYPES, DTYPES)
    assert disagreements(((x.name, y.name), *binary_probe(choose, x, y)) for x, y in pairs) == {}


def choose(x, y):
    return ct.where(ct.full((2,), 1, ct.bool_), x, y)


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_one_tile(op):
    assert disagreements((x.name, *unary_probe(op, x)) for x in DTYPES) == {}


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.__name__)
def test_reductions(op):
    assert disagreements((x.name, *binary_probe(op, x, 0)) for x in DTYPES) == {}


def test_implicit_casts_of_stores():
    found = {}
    for x in DTYPES:

        @ct.kernel
        def kernel(Y):
            ct.store(Y, 0, ct.full((2,), 1, x))  # noqa: B023

        for y in DTYPES:
            outcomes = []
            for run, arg in (
                (compiled, array_constraint(y)),
                (interpreted, torch.zeros(2, dtype=TORCH_DTYPE[y])),
            ):
                try:
                    run(kernel, arg)
                    outcomes.append(True)
                except (ct.TileTypeError, ct.TileValueError):
                    outcomes.append(False)
            if outcomes[0] != outcomes[1]:
                found[x.name, y.name] = outcomes
    assert found == {}


def refused_shape():
    ct.zeros((3,), ct.float32)


def refused_arange():
    ct.arange(6, dtype=ct.int32)


def refused_runtime_shape():
    ct.zeros((ct.bid(0),), ct.float32)


def refused_reshape():
    ct.zeros((4,), ct.float32).reshape((2, 4))


def refused_broadcast():
    ct.zeros((4,), ct.float32) + ct.zeros((2,), ct.float32)


def refused_broadcast_to():
    ct.broadcast_to(ct.zeros((4,), ct.float32), (4, 2))


def refused_cat():
    ct.cat((ct.zeros(4, ct.float32), ct.zeros(2, ct.float32)), 0)


def refused_truth_of_a_tile():
    if ct.zeros((2,), ct.bool_):
        ct.print("true")


def refused_float_of_a_runtime_value():
    float(ct.bid(0))


def refused_runtime_item_of_a_tuple():
    (1, 2)[ct.bid(0)]


def refused_subscript():
    ct.zeros((4,), ct.float32)[0]


def refused_bits_of_a_float():
    ct.zeros((4,), ct.float32) & 1


def refused_constant_out_of_range():
    ct.zeros((4,), ct.int8) + 300


def refused_rounding_of_an_integer():
    ct.add(ct.zeros((4,), ct.int32), 1, rounding_mode=ct.RoundingMode.RZ)


def refused_axis():
    ct.sum(ct.zeros((4,), ct.float32), 1)


def refused_block_axis():
    ct.bid(3)


def refused_step():
    for _ in range(4, 0, -1):
        ct.print("never")


REFUSED = {name: f for name, f in globals().items() if name.startswith("refused_")}


@pytest.mark.parametrize("expression", REFUSED.values(), ids=REFUSED.keys())
def test_both_refuse(expression):
    @ct.kernel
    def kernel():
        expression()

    for run in (compiled, interpreted):
        with pytest.raises(ct.TileError) as failure:
            run(kernel)
        # A failed assertion would mean that the compiler met something else than the fault.
        assert not isinstance(failure.value.__cause__, AssertionError)
