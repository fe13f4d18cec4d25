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
)
from tests.test_interpreter import copy, run


def test_tile_outside_its_array_raises():
    with pytest.raises(OutOfBoundsError, match="'X'"):
        run(copy, torch.ones(4), torch.ones(8), 4, grid=(2,))
    with pytest.raises(OutOfBoundsError, match="'Y'"):
        run(copy, torch.ones(8), torch.ones(4), 4, grid=(2,))


def test_unchecked_access_out_of_bounds_raises():
    @ct.kernel
    def gather(X):
        ct.gather(X, ct.arange(4, dtype=ct.int32), check_bounds=False)

    @ct.kernel
    def load(X):
        ct.load(X, 0, (4,), check_bounds=False)

    @ct.kernel
    def offset(X):
        X.get_raw_memory().load_offset(ct.arange(4, dtype=ct.int32))

    for kernel in (gather, load, offset):
        run(kernel, torch.ones(4))
        with pytest.raises(OutOfBoundsError):
            run(kernel, torch.ones(3))


def test_write_by_two_blocks_is_a_race():
    @ct.kernel
    def kernel(Y):
        ct.store(Y, 0, ct.bid(0))

    with pytest.raises(RaceError, match="wrote"):
        run(kernel, torch.zeros(1, dtype=torch.int32), grid=(2,))
    run(kernel, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("order", [None, "reverse"])
def test_read_of_another_blocks_write_is_a_race(order):
    @ct.kernel
    def kernel(X, Y):
        if ct.bid(0) == 0:
            ct.store(Y, 0, ct.load(X, 1, (1,)))
        else:
            ct.store(X, 1, 1.0)

    with pytest.raises(RaceError, match="'X'"):
        run(kernel, torch.zeros(2), torch.zeros(1), grid=(2,), order=order)


def test_one_store_with_duplicate_elements_is_a_race():
    @ct.kernel
    def kernel(Y):
        ct.scatter(Y, ct.arange(4, dtype=ct.int32) // 2, 1.0)

    with pytest.raises(RaceError, match="twice"):
        run(kernel, torch.zeros(4))
    with pytest.raises(RaceError, match="twice"):
        run(copy, torch.zeros(4), torch.zeros(1).expand(4), 4)


@pytest.mark.parametrize("order", ["ACQ_REL", "ACQUIRE", "RELEASE", "RELAXED"])
def test_only_acquire_release_synchronises_blocks(order):
    memory_order = ct.MemoryOrder[order]

    @ct.kernel
    def sum_by_last_block(X, PARTIALS, COUNT, Y):
        ct.store(PARTIALS, ct.bid(0), ct.sum(ct.load(X, ct.bid(0), (4,))))
        done = ct.atomic_add(COUNT, 0, 1, memory_order=memory_order)
        if done == ct.num_blocks(0) - 1:
            ct.store(Y, 0, ct.sum(ct.load(PARTIALS, 0, (4,))))

    x, y = torch.arange(16.0), torch.zeros(1)
    args = (x, torch.zeros(4), torch.zeros(1, dtype=torch.int32), y)
    if order == "ACQ_REL":
        run(sum_by_last_block, *args, grid=(4,), order=3)
        assert y.item() == 120
    else:
        with pytest.raises(RaceError):
            run(sum_by_last_block, *args, grid=(4,))


def test_polling_of_a_later_block_raises():
    @ct.kernel
    def kernel(FLAG):
        if ct.bid(0) == 0:
            while ct.atomic_add(FLAG, 0, 0) == 0:
                pass
        else:
            ct.atomic_add(FLAG, 0, 1)

    with pytest.raises(PollingError):
        run(kernel, torch.zeros(1, dtype=torch.int32), grid=(2,))
    run(kernel, torch.zeros(1, dtype=torch.int32), grid=(2,), order="reverse")


def test_written_argument_must_not_overlap_another():
    memory = torch.zeros(2, 8)
    with pytest.raises(AliasError, match="'Y' is written and overlaps 'X'"):
        run(copy, memory[0, :4], memory[0, 3:7], 4)
    run(copy, memory[0], memory[1], 8)
    # Even and odd columns have overlapping address ranges, but share no element.
    run(copy, memory[0, ::2], memory[0, 1::2], 4)


def test_store_of_another_rank_is_rejected():
    @ct.kernel
    def kernel(Y):
        ct.store(Y, (0, 0), ct.zeros((4,), ct.float32))

    with pytest.raises(ct.TileTypeError):
        run(kernel, torch.zeros(4, 4))


def test_integer_division_by_zero_raises():
    @ct.kernel
    def kernel(n):
        ct.cdiv(4, n)

    with pytest.raises(InterpreterError, match="by zero"):
        run(kernel, 0)


@ct.kernel
def one(x):
    pass


@ct.kernel
def one_constant(x: ct.Constant):
    pass


@ct.kernel
def one_int64(x: ct.ScalarInt64):
    pass


@pytest.mark.parametrize(
    "kernel, args, error",
    [
        (one, (None,), TypeError),
        (one, ("text",), TypeError),
        (one, (1 << 31,), OverflowError),
        (one, ((1, None),), TypeError),
        (one, (1, 2), TypeError),
        (one, (torch.zeros(1, dtype=torch.complex64),), TypeError),
        (one_constant, (None,), TypeError),
        (one_constant, (ct.float32,), TypeError),
        (one_constant, (torch.zeros(1),), TypeError),
        (one_int64, (1 << 63,), OverflowError),
        (one_int64, (1.5,), TypeError),
    ],
)
def test_rejected_arguments(kernel, args, error):
    with pytest.raises(error):
        run(kernel, *args)


@pytest.mark.parametrize(
    "grid, error",
    [
        ((0,), RuntimeError),
        ((1, 0), RuntimeError),
        (1, TypeError),
        ((1, 1, 1, 1), ValueError),
        ((-1,), OverflowError),
        ((1 << 24,), ValueError),
    ],
)
def test_rejected_grids(grid, error):
    with pytest.raises(error):
        run(one, 1, grid=grid)


def test_extent_beyond_int32_is_rejected():
    with pytest.raises(OverflowError, match="IndexedWithInt64"):
        run(one, torch.zeros(1).expand(1 << 31))


def test_slice_offset_that_overflows_is_rejected():
    @ct.kernel
    def narrow(X, start):
        X.slice(0, start, start + 1)

    @ct.kernel
    def wide(X: ct.IndexedWithInt64, start):
        X.slice(0, start, start + 1)

    x = torch.empty(
        3, 1 << 30, dtype=torch.int8
    )  # the pages are never touched, so they take no memory
    run(wide, x, 2)
    with pytest.raises(OverflowError, match="int32"):
        run(narrow, x, 2)
