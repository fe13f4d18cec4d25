"""The interpreter gives expressions the dtypes that the compiler gives them, where it takes them.

The compiler's type checking needs no GPU.
"""

import operator
from contextlib import suppress
from itertools import product

import cuda.tile as ct
import pytest
from cuda.tile._compile import compile_tile
from cuda.tile.compilation import CallingConvention, KernelSignature

from tests import interpreter
from tests.support.calls import slow

DTYPES = [ct.bool_, ct.uint8, ct.int16, ct.int32, ct.int64]
DTYPES += [ct.float16, ct.bfloat16, ct.float32, ct.float64]
CONSTANTS = [1, 300, -1, 1 << 40, 1.5]
# Pairs of operands. An operand is a constant, or a dtype for a tile of that dtype.
OPERANDS = [*product(DTYPES, DTYPES), *product(DTYPES, CONSTANTS), *product(CONSTANTS, DTYPES)]


def choose(x, y):
    return ct.where(ct.full((2,), 1, ct.bool_), x, y)


def compiled(kernel):
    """Compile a kernel up to the compiler's type checking, without making a cubin."""
    signature = KernelSignature((), CallingConvention.cutile_python_v1())
    compile_tile(kernel._annotated_function, [signature], return_cubin=False)


def interpreted(kernel):
    interpreter.launch((1,), kernel, ())


def result_dtype(run, op, operands) -> str:
    """The dtype of an operation."""
    first_is_tile, second_is_tile = (isinstance(x, ct.DType) for x in operands)
    first, second = operands
    dtypes = []

    @ct.kernel
    def kernel():
        a = ct.full((2,), 1, first) if first_is_tile else first
        b = ct.full((2,), 1, second) if second_is_tile else second
        result = op(a, b)
        ct.static_eval(dtypes.append(result.dtype))

    run(kernel)
    return dtypes[0].name


# The last ones promote as the other operators do, and 170 pairs take the compiler some time.
OPERATIONS = [operator.add, choose]
OPERATIONS += slow(operator.and_, operator.truediv, operator.lshift)


@pytest.mark.parametrize("op", OPERATIONS)
def test_dtypes_of_expressions(op):
    expected = {}
    for operands in OPERANDS:
        with suppress(ct.TileTypeError, ct.TileValueError):  # which no kernel has
            expected[operands] = result_dtype(compiled, op, operands)
    assert len(expected) > 3
    assert {x: result_dtype(interpreted, op, x) for x in expected} == expected
