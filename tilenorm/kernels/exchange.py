"""How blocks that share a row tell each other what they have of its sums.

A row too wide for one block is cut into chunks, a block a chunk. Each block publishes its numbers
in slots of the row, chunk by chunk, and reads those of the others, so that a sum has one order. A
slot holds a number or is EMPTY, so that nothing but the slot itself has to be visible: relaxed
atomics do. Loads would not: each warp does those for itself, and one would leave a loop that
another stays in. Nothing depends on the blocks of a row running side by side: a block that has
polled POLLS times computes what is missing itself, from the same columns in the same order: what a
thread adds up is prescribed by formula.folded.
"""

import cuda.tile as ct

from .formula import sums

EMPTY = -1  # a NaN that no arithmetic of the GPU makes: its own is 0x7fffffff
SUM_POLLS = 8  # after which a sum that is still NaN is taken for one that has NaN in it


@ct.kernel
def clear_slots(
    SLOTS, TILE_ROWS: ct.Constant[int], TILE: ct.Constant[int], OVERLAP: ct.Constant[bool]
):
    """Empties the slots (rows, n) of every row. OVERLAP: the kernel that uses them may start."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    rows = ct.bid(0) * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    slots = ct.arange(TILE, dtype=ct.int32)[None, :]
    ct.scatter(SLOTS, (rows, slots), ct.full((TILE_ROWS, TILE), EMPTY, dtype=ct.int32))


def publish(SLOTS, row, chunk, numbers):
    """Put the float32 numbers of a chunk, one or two, where the other blocks find them."""
    PARTS = len(numbers)
    part = ct.arange(PARTS, dtype=ct.int32)
    mine = numbers[0] if PARTS == 1 else ct.where(part == 0, numbers[0], numbers[1])
    ct.atomic_xchg(
        SLOTS,
        (row, chunk * PARTS + part),
        ct.bitcast(mine, ct.int32),
        check_bounds=False,
        memory_order=ct.MemoryOrder.RELAXED,
    )


def poll(SLOTS, row, PARTS, CHUNKS, PADDED):
    """What the slots of a row hold, chunk by chunk; past the last chunk anything it has."""
    slot = ct.minimum(ct.arange(PARTS * PADDED, dtype=ct.int32), PARTS * CHUNKS - 1)
    return ct.atomic_or(
        SLOTS,
        (row, slot),
        0,
        check_bounds=False,
        memory_order=ct.MemoryOrder.RELAXED,
    )


def collect(SLOTS, row, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """What all chunks of a row have published, chunk by chunk, as a float32 tile.

    numbers_of(chunk) computes the numbers of a chunk that has not published in time.
    """
    found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
    found = settled(SLOTS, row, found, PARTS, CHUNKS, PADDED, POLLS, numbers_of)
    return ct.bitcast(found, ct.float32)


def collect_sums(SLOTS, row, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """The sums over the chunks, of the same.

    A sum is NaN while a slot is EMPTY: as long as it tells, no other reduction has to.
    """
    found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
    totals = added(found, PARTS, CHUNKS, PADDED)
    polls = 0
    while is_nan(totals) & (polls < SUM_POLLS):
        found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
        totals = added(found, PARTS, CHUNKS, PADDED)
        polls = polls + 1
    if is_nan(totals):
        found = settled(SLOTS, row, found, PARTS, CHUNKS, PADDED, POLLS, numbers_of)
        totals = added(found, PARTS, CHUNKS, PADDED)
    return totals


def settled(SLOTS, row, found, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """The slots of a row without an EMPTY one, from what was found in them."""
    j = ct.arange(PARTS * PADDED, dtype=ct.int32)
    polls = 0
    while any_empty(found) & (polls < POLLS):
        found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
        polls = polls + 1
    if any_empty(found):
        # A for loop takes the compiler five seconds more: it tries to unroll it.
        chunk = 0
        while chunk < CHUNKS:
            own = numbers_of(chunk)
            for part, number in ct.static_iter(enumerate(own)):
                mine = j == chunk * PARTS + part
                found = ct.where(mine, ct.bitcast(number, ct.int32), found)
            chunk = chunk + 1
    return found


def added(found, PARTS, CHUNKS, PADDED):
    """The sum of each part over the chunks."""
    j = ct.arange(PARTS * PADDED, dtype=ct.int32)
    numbers = ct.where(j < PARTS * CHUNKS, ct.bitcast(found, ct.float32), 0.0)
    if PARTS == 1:
        return (ct.sum(numbers),)
    first = ct.where(j % 2 == 0, numbers, 0.0)
    second = ct.where(j % 2 == 0, 0.0, numbers)
    totals = sums(first[None, :], second[None, :])
    return totals[0].item(), totals[1].item()


def is_nan(numbers):
    found = False
    for number in ct.static_iter(numbers):
        found = found | (number != number)
    return found


def any_empty(found):
    return ct.sum(ct.where(found == EMPTY, 1, 0)) > 0


def combine(numbers, N, CHUNKS, TILE, PADDED):
    """(near, offset, variance) of a row, whose mean is near + offset, from what its chunks have:
    a mean and Σ (x − mean)² each.

    near is the first chunk's mean. Differences from it are exact where means are close, and a sum
    of means would lose what a large mean has too many digits for. After Chan, Golub and LeVeque
    (1979).
    """
    j = ct.arange(2 * PADDED, dtype=ct.int32)
    chunk = j // 2
    is_mean = j % 2 == 0
    # 0 past the last chunk, whatever was found there.
    count = ct.minimum(ct.maximum(N - chunk * TILE, 0), TILE).astype(ct.float32)
    near = ct.sum(ct.where(j == 0, numbers, 0.0))
    apart = ct.where(is_mean & (chunk < CHUNKS), numbers - near, 0.0)
    offset = ct.sum(count * apart) * (1.0 / N)
    apart = apart - offset
    squares = ct.where(is_mean, count * apart * apart, ct.where(chunk < CHUNKS, numbers, 0.0))
    return near, offset, ct.sum(squares) * (1.0 / N)
