"""The interpreter computes what cuTile defines, and raises where results would be undefined."""

import cuda.tile as ct
import pytest
import torch

from tests import interpreter
from tilenorm.kernels import exchange

NAN = float("nan")
FILLS = (NAN, 1e30, -1e30)
WRONG = interpreter.InterpreterError


def run(kernel, *args, grid=(1,), **kwargs):
    interpreter.launch(grid, kernel, args, **kwargs)


@ct.kernel
def multiply_add(X, Y):
    x = ct.load(X, 0, (4,))
    ct.store(Y, 0, x * x + x)


@ct.kernel
def maxima(X, Y):
    x = ct.load(X, 0, (2,))
    ct.store(Y, 0, ct.max(x))
    ct.store(Y, 1, ct.max(x, propagate_nan=True))


@ct.kernel
def ceiling_of_quarters(X, Y):
    ct.store(Y, 0, ct.cdiv(ct.load(X, 0, (2,)), ct.full((2,), 4, ct.uint8)))


@ct.kernel
def sum_of_indices(Y):
    total = 0
    for i in range(Y.shape[0] * 2):
        total = total + min(i, Y.shape[0])
    ct.store(Y, 0, total)


@ct.kernel
def custom_reduction(X, Y):
    ct.store(Y, 0, ct.reduce(ct.load(X, 0, (8,)), 0, lambda a, b: max(a, b) + 1, -1))


@ct.kernel
def pairs(X, Y):
    ct.atomic_add(Y, ct.arange(4, dtype=ct.int32) // 2, ct.load(X, ct.bid(0), (4,)))


@ct.kernel
def copy(X, Y, T: ct.Constant[int]):
    ct.store(Y, ct.bid(0), ct.load(X, ct.bid(0), (T,)))


@ct.kernel
def ones_from_minus_one(Y):
    ct.scatter(Y, ct.arange(4, dtype=ct.int32) - 1, 1.0)


@ct.kernel
def doubled(X, Z, Y):
    ct.store(Y, 0, ct.load(X, 0, (4,)) + ct.load(Z, 0, (4,)))


ONES, ZEROS = torch.ones(12), torch.zeros(8)
SHORT = torch.tensor([1.0078125, 3.140625, 0.3, 77.0], dtype=torch.bfloat16)
WRAPPED = torch.tensor([1 << 16] * 4, dtype=torch.int32)
EIGHT = torch.tensor([8, 9], dtype=torch.uint8)
# A kernel, its blocks, its inputs, the memory and the extent of its output, constants, the result.
RESULTS = {
    # A fused operation would give other numbers.
    "each operation rounds": (multiply_add, 1, (SHORT,), SHORT, 4, (), (SHORT * SHORT + SHORT)),
    "integers wrap": (multiply_add, 1, (WRAPPED,), WRAPPED, 4, (), WRAPPED),
    "NaN in a maximum": (maxima, 1, (torch.tensor([NAN, 2.0]),), ZEROS, 2, (), [2, NAN, *[0] * 6]),
    "unsigned": (ceiling_of_quarters, 1, (EIGHT,), EIGHT, 2, (), [2, 3]),
    "builtins": (sum_of_indices, 1, (), torch.arange(4), 4, (), [6 + 4 * 4, 1, 2, 3]),
    "a reduction": (custom_reduction, 1, (torch.arange(8),), torch.arange(1), 1, (), [7 + 3]),
    "atomics do not race": (pairs, 3, (ONES,), ZEROS, 2, (), [6, 6, *[0] * 6]),
    "a store past the edge": (copy, 1, (ONES,), ZEROS, 3, (4,), [1, 1, 1, *[0] * 5]),
    "a scatter past the edge": (ones_from_minus_one, 1, (), ZEROS, 2, (), [1, 1, *[0] * 6]),
    "inputs overlap": (doubled, 1, (ONES, ONES), ZEROS, 4, (), [2] * 4 + [0] * 4),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name):
    kernel, blocks, inputs, memory, extent, constants, expected = RESULTS[name]
    found = memory.clone()
    run(kernel, *inputs, found[:extent], *constants, grid=(blocks,))
    expected = torch.as_tensor(expected, dtype=found.dtype)
    assert torch.equal(found.double().nan_to_num(-1.0), expected.double().nan_to_num(-1.0))
    # The names that a launch replaces have their values again.
    assert not {"range", "min"} & {*globals(), *vars(exchange)} and ct.static_iter([1]) == [1]


def test_a_scatter_before_the_start_is_dropped():
    y = torch.zeros(8)
    run(ones_from_minus_one, y[1:5])
    assert y.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("fill", FILLS)
def test_undefined_padding_reads_as_fill(fill):
    y = torch.zeros(4)
    run(copy, torch.ones(3), y, 4, fill=fill)
    assert torch.equal(y[3].nan_to_num(-1.0), torch.tensor(fill).nan_to_num(-1.0))
    y = torch.zeros(4, dtype=torch.int32)
    run(copy, torch.ones(3, dtype=torch.int32), y, 4, fill=fill)
    limits = torch.iinfo(torch.int32)
    assert y[3].item() == (limits.max if fill > 0 else limits.min)


FOUR = torch.zeros(4)


@ct.kernel
def unchecked(X):
    ct.gather(X, ct.arange(4, dtype=ct.int32), check_bounds=False)


@ct.kernel
def block_numbers(Y):
    ct.store(Y, 0, ct.bid(0))


@ct.kernel
def read_another(X, Y):
    if ct.bid(0) == 0:
        ct.store(Y, 0, ct.load(X, 1, (1,)))
    else:
        ct.store(X, 1, 1.0)


@ct.kernel
def twice(Y):
    ct.scatter(Y, ct.arange(4, dtype=ct.int32) // 2, 1.0)


@ct.kernel
def sum_by_last_block(X, PARTIALS, COUNT, Y):
    ct.store(PARTIALS, ct.bid(0), ct.sum(ct.load(X, ct.bid(0), (4,))))
    if ct.atomic_add(COUNT, 0, 1) == ct.num_blocks(0) - 1:
        ct.store(Y, 0, ct.sum(ct.load(PARTIALS, 0, (4,))))


@ct.kernel
def divide(n):
    ct.cdiv(4, n)


@ct.kernel
def scan(X):
    ct.cumsum(ct.load(X, 0, (4,)))


@ct.kernel
def one(x):
    pass


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


LAST = (torch.ones(16), torch.zeros(4), ints(1), torch.zeros(1))
# The error, a part of its message, the kernel, the grid, the arguments, and the order of blocks.
REFUSED = [
    (WRONG, "outside 'X'", copy, (2,), (torch.ones(4), torch.ones(8), 4), None),
    (WRONG, "outside 'Y'", copy, (2,), (torch.ones(8), torch.ones(4), 4), None),
    (WRONG, "unchecked", unchecked, (1,), (torch.ones(3),), None),
    (WRONG, "wrote", block_numbers, (2,), (ints(1),), None),
    (WRONG, "an element of 'X'", read_another, (2,), (torch.zeros(2), torch.zeros(1)), None),
    (WRONG, "an element of 'X'", read_another, (2,), (torch.zeros(2), torch.zeros(1)), "reverse"),
    (WRONG, "twice", twice, (1,), (FOUR,), None),
    (WRONG, "twice", copy, (1,), (FOUR, torch.zeros(1).expand(4), 4), None),
    (WRONG, "PARTIALS", sum_by_last_block, (4,), LAST, None),
    (WRONG, "negated", one, (1,), (torch._neg_view(FOUR),), None),
    (WRONG, "by zero", divide, (1,), (0,), None),
    (NotImplementedError, "ct.cumsum", scan, (1,), (FOUR,), None),
    (TypeError, "subclass of tuple", one, (1,), (FOUR.shape,), None),
    (OverflowError, None, one, (1,), (1 << 31,), None),
    (OverflowError, "exceed int32", one, (1,), (torch.zeros(1).expand(1 << 31),), None),
    *[
        (ValueError, "numbers of blocks", one, grid, (1,), None)
        for grid in ((0,), (1, 0), 1, (1, 1, 1, 1), (-1,), (1 << 24,))
    ],
]


@pytest.mark.parametrize("error, message, kernel, grid, args, order", REFUSED)
def test_refused(error, message, kernel, grid, args, order):
    with pytest.raises(error, match=message):
        run(kernel, *args, grid=grid, order=order)


def test_written_argument_must_not_overlap_another():
    memory = torch.zeros(2, 8)
    with pytest.raises(WRONG, match="'Y' is written and overlaps 'X'"):
        run(copy, memory[0, :4], memory[0, 3:7], 4)
    run(copy, memory[0], memory[1], 8)
    # Even and odd columns have overlapping address ranges, but share no element.
    run(copy, memory[0, ::2], memory[0, 1::2], 4)
