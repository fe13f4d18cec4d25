"""The interpreter computes what cuTile defines, and raises where results would be undefined."""

import cuda.tile as ct
import pytest
import torch

from tests import interpreter

FILLS = (float("nan"), 1e30, -1e30)
WRONG = interpreter.InterpreterError


def run(kernel, *args, grid=(1,), **kwargs):
    interpreter.launch(grid, kernel, args, **kwargs)


@ct.kernel
def multiply_add(X, Y):
    x = ct.load(X, 0, (4,))
    ct.store(Y, 0, x * x + x)


@ct.kernel
def copy(X, Y, T: ct.Constant[int]):
    ct.store(Y, ct.bid(0), ct.load(X, ct.bid(0), (T,)))


@ct.kernel
def ones_from_minus_one(Y):
    ct.scatter(Y, ct.arange(4, dtype=ct.int32) - 1, 1.0)


def test_each_operation_rounds():
    """A fused operation would give other numbers."""
    x = torch.tensor([1.0078125, 3.140625, 0.3, 77.0], dtype=torch.bfloat16)
    run(multiply_add, x, found := torch.zeros_like(x))
    assert torch.equal(found, x * x + x)


@ct.kernel
def add_products(X, Z, Y):
    x, z = ct.load(X, 0, (4,)), ct.load(Z, 0, (4,))
    ct.store(Y, 0, -(x * x).reshape((2, 2)).reshape((4,)) + z * z)


@ct.kernel
def sum_of_squares(X, Y):
    x = ct.load(X, 0, (4,))
    ct.store(Y, 0, ct.sum(x * x))


@pytest.mark.parametrize("fuse", ["", "first", "second"])
def test_products_are_fused_if_asked(fuse):
    x, z = torch.tensor([0.1, 0.3, 0.7, 1.9]), torch.tensor([1.1, 2.3, 3.7, 4.9])
    run(add_products, x, z, found := torch.zeros(4), fuse=fuse)
    first, second = (t if fuse != name else t.double() for t, name in ((x, "first"), (z, "second")))
    assert torch.equal(found, (second * second - first * first).float())
    run(sum_of_squares, x, total := torch.zeros(1), fuse=fuse)
    kept = [t if fuse != name else t.double() for t, name in ((x[:2], "first"), (x[2:], "second"))]
    halves = (kept[0] * kept[0] + kept[1] * kept[1]).float()
    assert total == halves.sum()


def test_a_scatter_before_the_start_is_dropped():
    y = torch.zeros(8)
    run(ones_from_minus_one, y[1:5])
    assert y.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("fill", FILLS)
def test_undefined_padding_reads_as_fill(fill):
    y = torch.zeros(4)
    run(copy, torch.ones(3), y, 4, fill=fill)
    assert torch.equal(y[3].nan_to_num(-1.0), torch.tensor(fill).nan_to_num(-1.0))


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
def one(x):
    pass


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


LAST = (torch.ones(16), torch.zeros(4), ints(1), torch.zeros(1))
X = torch.zeros(2)
# A part of the message, the kernel, the number of blocks, the arguments, and the order of blocks.
REFUSED = [
    ("outside 'X'", copy, 2, (torch.ones(4), torch.ones(8), 4), None),
    ("outside 'Y'", copy, 2, (torch.ones(8), torch.ones(4), 4), None),
    ("unchecked", unchecked, 1, (torch.ones(3),), None),
    ("wrote", block_numbers, 2, (ints(1),), None),
    ("an element of 'X'", read_another, 2, (X, torch.zeros(1)), None),
    ("an element of 'X'", read_another, 2, (X, torch.zeros(1)), "reverse"),
    ("twice", twice, 1, (FOUR,), None),
    ("PARTIALS", sum_by_last_block, 4, LAST, None),
    ("negated", one, 1, (torch._neg_view(FOUR),), None),
]


@pytest.mark.parametrize("message, kernel, blocks, args, order", REFUSED)
def test_what_is_undefined_is_refused(message, kernel, blocks, args, order):
    with pytest.raises(WRONG, match=message):
        run(kernel, *args, grid=(blocks,), order=order)


@ct.kernel
def copy_and_count(X, Y, COUNT, WHEN: ct.Constant[int]):
    """Waits at once (0), once it has read (1), written (2) or updated (3), or never (4)."""
    if WHEN == 0:
        ct.grid_dependency_control_wait()
    x = ct.load(X, 0, (4,))
    if WHEN == 1:
        ct.grid_dependency_control_wait()
    ct.store(Y, 0, x)
    if WHEN == 2:
        ct.grid_dependency_control_wait()
    ct.atomic_add(COUNT, (0,), 1)
    if WHEN == 3:
        ct.grid_dependency_control_wait()


@ct.kernel
def start_the_next(WAITS: ct.Constant[bool]):
    if WAITS:
        ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()


@pytest.mark.parametrize("early, first_refused", [("access", 1), ("update", 3), ("", 5)])
def test_a_kernel_that_starts_early_waits_before_it_accesses_arrays(early, first_refused):
    ones = torch.ones(4)
    for when in range(5):
        found, count = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
        if when < first_refused:
            run(copy_and_count, ones, found, count, when, early=early)
            assert torch.equal(found, ones)
        else:
            verb = "reads 'X'" if early == "access" else "updates 'COUNT'"
            with pytest.raises(WRONG, match=f"{verb} before it waits"):
                run(copy_and_count, ones, found, count, when, early=early)
        assert count.item() == (when < first_refused)


def test_the_next_kernel_starts_after_the_wait():
    run(start_the_next, True, early="access")
    with pytest.raises(WRONG, match="starts the next kernel before it waits"):
        run(start_the_next, False, early="access")


def test_written_argument_must_not_overlap_another():
    memory = torch.zeros(2, 8)
    with pytest.raises(WRONG, match="'Y' is written and overlaps 'X'"):
        run(copy, memory[0, :4], memory[0, 3:7], 4)
    run(copy, memory[0], memory[1], 8)
    # Even and odd columns have overlapping address ranges, but share no element.
    run(copy, memory[0, ::2], memory[0, 1::2], 4)
