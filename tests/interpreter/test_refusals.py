"""The interpreter raises for undefined behaviour, and for arguments that ct.launch rejects."""

import cuda.tile as ct
import pytest
import torch

from tests.interpreter import (
    AliasError,
    InterpreterError,
    OutOfBoundsError,
    PollingError,
    RaceError,
    StateError,
)

from .test_results import copy, run

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
def wait(FLAG):
    if ct.bid(0) == 0:
        while ct.atomic_add(FLAG, 0, 0) == 0:
            pass
    else:
        ct.atomic_add(FLAG, 0, 1)


@ct.kernel
def sum_by_last_block(X, PARTIALS, COUNT, Y):
    ct.store(PARTIALS, ct.bid(0), ct.sum(ct.load(X, ct.bid(0), (4,))))
    if ct.atomic_add(COUNT, 0, 1) == ct.num_blocks(0) - 1:
        ct.store(Y, 0, ct.sum(ct.load(PARTIALS, 0, (4,))))


@ct.kernel
def other_rank(Y):
    ct.store(Y, (0, 0), ct.zeros((4,), ct.float32))


@ct.kernel
def divide(n):
    ct.cdiv(4, n)


@ct.kernel
def scan(X):
    ct.cumsum(ct.load(X, 0, (4,)))


@ct.kernel
def one(x):
    pass


@ct.kernel
def one_constant(x: ct.Constant):
    pass


@ct.kernel
def one_int64(x: ct.ScalarInt64):
    pass


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


LAST = (torch.ones(16), torch.zeros(4), ints(1), torch.zeros(1))
# The error, a part of its message, the kernel, the grid, the arguments, and the order of blocks.
REFUSED = [
    (OutOfBoundsError, "'X'", copy, (2,), (torch.ones(4), torch.ones(8), 4), None),
    (OutOfBoundsError, "'Y'", copy, (2,), (torch.ones(8), torch.ones(4), 4), None),
    (OutOfBoundsError, "unchecked", unchecked, (1,), (torch.ones(3),), None),
    (RaceError, "wrote", block_numbers, (2,), (ints(1),), None),
    (RaceError, "'X'", read_another, (2,), (torch.zeros(2), torch.zeros(1)), None),
    (RaceError, "'X'", read_another, (2,), (torch.zeros(2), torch.zeros(1)), "reverse"),
    (RaceError, "twice", twice, (1,), (FOUR,), None),
    (RaceError, "twice", copy, (1,), (FOUR, torch.zeros(1).expand(4), 4), None),
    (RaceError, "PARTIALS", sum_by_last_block, (4,), LAST, None),
    (PollingError, None, wait, (2,), (ints(1),), None),
    (StateError, "negated", one, (1,), (torch._neg_view(FOUR),), None),
    (InterpreterError, "by zero", divide, (1,), (0,), None),
    (ct.TileTypeError, None, other_rank, (1,), (torch.zeros(4, 4),), None),
    (NotImplementedError, "ct.cumsum", scan, (1,), (FOUR,), None),
    (NotImplementedError, "annotation of x", one_int64, (1,), (1,), None),
    (TypeError, None, one, (1,), (None,), None),
    (TypeError, None, one, (1,), ("text",), None),
    (TypeError, None, one, (1,), ((1, None),), None),
    (TypeError, None, one, (1,), (1, 2), None),
    (TypeError, None, one, (1,), (torch.zeros(1, dtype=torch.complex64),), None),
    (TypeError, None, one_constant, (1,), (None,), None),
    (TypeError, None, one_constant, (1,), (ct.float32,), None),
    (TypeError, None, one_constant, (1,), (torch.zeros(1),), None),
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


def test_the_same_is_accepted_where_it_is_defined():
    run(copy, torch.ones(8), torch.ones(8), 4, grid=(2,))
    run(unchecked, torch.ones(4))
    run(block_numbers, ints(1))
    run(wait, ints(1), grid=(2,), order="reverse")


def test_written_argument_must_not_overlap_another():
    memory = torch.zeros(2, 8)
    with pytest.raises(AliasError, match="'Y' is written and overlaps 'X'"):
        run(copy, memory[0, :4], memory[0, 3:7], 4)
    run(copy, memory[0], memory[1], 8)
    # Even and odd columns have overlapping address ranges, but share no element.
    run(copy, memory[0, ::2], memory[0, 1::2], 4)
