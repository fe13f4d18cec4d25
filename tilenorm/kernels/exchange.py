"""How blocks that share a row tell each other what they have of its sums.

A row too wide for one block is cut into chunks, a block a chunk. Each block publishes its numbers
in slots of the row and reads those of the others, in chunk order, so that a sum has one order. A
slot holds a number or is EMPTY, so that nothing but the slot itself has to be visible: relaxed
atomics do. Nothing depends on the blocks of a row running side by side: a block that has polled
POLLS times computes what is missing itself, from the same columns in the same way.
"""

import cuda.tile as ct

EMPTY = -1  # a NaN that no arithmetic of the GPU makes: its own is 0x7fffffff


@ct.kernel
def clear(SLOTS, TILE_ROWS: ct.Constant[int], TILE: ct.Constant[int], OVERLAP: ct.Constant[bool]):
    """Empties the slots (rows, n) of every row. OVERLAP: the kernel that uses them may start."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    rows = ct.bid(0) * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    slots = ct.arange(TILE, dtype=ct.int32)[None, :]
    ct.scatter(SLOTS, (rows, slots), ct.full((TILE_ROWS, TILE), EMPTY, dtype=ct.int32))


def publish(SLOTS, row, chunk, CHUNKS, numbers):
    """Put the float32 numbers of a chunk where the other blocks of the row find them."""
    for part, number in ct.static_iter(enumerate(numbers)):
        ct.atomic_xchg(
            SLOTS,
            (row, part * CHUNKS + chunk),
            ct.bitcast(number, ct.int32),
            check_bounds=False,
            memory_order=ct.MemoryOrder.RELAXED,
        )


def collect(SLOTS, row, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """For each of PARTS numbers, a tile of what all chunks of a row have; 0 past the last.

    numbers_of(row, chunk) computes the numbers of a chunk, which are used if one of them has not
    been published in time.
    """
    j = ct.arange(PADDED, dtype=ct.int32)
    found = poll(SLOTS, row, j, PARTS, CHUNKS)
    polls = 0
    while any_empty(found) & (polls < POLLS):
        found = poll(SLOTS, row, j, PARTS, CHUNKS)
        polls = polls + 1
    if any_empty(found):
        for chunk in range(CHUNKS):
            own = numbers_of(row, chunk)
            updated = ()
            for part, number in ct.static_iter(enumerate(own)):
                updated += (ct.where(j == chunk, ct.bitcast(number, ct.int32), found[part]),)
            found = updated
    numbers = ()
    for tile in ct.static_iter(found):
        numbers += (ct.where(j < CHUNKS, ct.bitcast(tile, ct.float32), 0.0),)
    return numbers


def poll(SLOTS, row, j, PARTS, CHUNKS):
    found = ()
    for part in ct.static_iter(range(PARTS)):
        slot = part * CHUNKS + ct.minimum(j, CHUNKS - 1)
        found += (
            ct.atomic_or(
                SLOTS,
                (row, slot),
                0,
                check_bounds=False,
                memory_order=ct.MemoryOrder.RELAXED,
            ),
        )
    return found


def any_empty(found):
    empty = 0
    for tile in ct.static_iter(found):
        empty = empty + ct.sum(ct.where(tile == EMPTY, 1, 0))
    return empty > 0


def combine(means, squares, N, TILE, PADDED):
    """(near, offset, variance) of a row, whose mean is near + offset, from those of its chunks.

    near is the first chunk's mean. Differences from it are exact, where a sum of means would lose
    what a large mean has too many digits for. After Chan, Golub and LeVeque (1979).
    """
    j = ct.arange(PADDED, dtype=ct.int32)
    count = ct.minimum(ct.maximum(N - j * TILE, 0), TILE).astype(ct.float32)
    near = ct.sum(ct.where(j == 0, means, 0.0))
    apart = means - near
    offset = ct.sum(count * apart) * (1.0 / N)
    apart = apart - offset
    return near, offset, (ct.sum(squares) + ct.sum(count * apart * apart)) * (1.0 / N)
