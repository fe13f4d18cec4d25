"""How blocks that share a row tell each other what they have of its sums.

A row too wide for one block is cut into chunks, a block a chunk. Each block publishes its numbers
in slots of the row and reads those of the others, in chunk order, so that a sum has one order. A
slot holds a number or is EMPTY, so that nothing but the slot itself has to be visible: relaxed
atomics do. Nothing depends on the blocks of a row running side by side: a block that has polled
POLLS times computes what is missing itself, from the same columns in the same order: what a thread
adds up is prescribed by formula.folded.
"""

import cuda.tile as ct

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


def poll(SLOTS, row, PARTS, CHUNKS, PADDED):
    """For each of PARTS numbers, a tile of what the slots of a row hold."""
    j = ct.arange(PADDED, dtype=ct.int32)
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


def collect(SLOTS, row, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """What all chunks of a row have published, a float32 tile for each of PARTS, 0 past the last.

    numbers_of(chunk) computes the numbers of a chunk that has not published in time.
    """
    found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
    return floats(settled(SLOTS, row, found, CHUNKS, PADDED, POLLS, numbers_of), CHUNKS, PADDED)


def collect_sums(SLOTS, row, PARTS, CHUNKS, PADDED, POLLS, numbers_of):
    """The sums over the chunks, of the same.

    A sum is NaN while a slot is EMPTY: as long as it tells, no other reduction has to.
    """
    found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
    sums = added(found, CHUNKS, PADDED)
    polls = 0
    while is_nan(sums) & (polls < SUM_POLLS):
        found = poll(SLOTS, row, PARTS, CHUNKS, PADDED)
        sums = added(found, CHUNKS, PADDED)
        polls = polls + 1
    if is_nan(sums):
        found = settled(SLOTS, row, found, CHUNKS, PADDED, POLLS, numbers_of)
        sums = added(found, CHUNKS, PADDED)
    return sums


def settled(SLOTS, row, found, CHUNKS, PADDED, POLLS, numbers_of):
    """The slots of a row without an EMPTY one, from what was found in them."""
    j = ct.arange(PADDED, dtype=ct.int32)
    polls = 0
    while any_empty(found) & (polls < POLLS):
        found = poll(SLOTS, row, len(found), CHUNKS, PADDED)
        polls = polls + 1
    if any_empty(found):
        # A for loop takes the compiler five seconds more: it tries to unroll it.
        chunk = 0
        while chunk < CHUNKS:
            own = numbers_of(chunk)
            updated = ()
            for part, number in ct.static_iter(enumerate(own)):
                updated += (ct.where(j == chunk, ct.bitcast(number, ct.int32), found[part]),)
            found = updated
            chunk = chunk + 1
    return found


def floats(found, CHUNKS, PADDED):
    j = ct.arange(PADDED, dtype=ct.int32)
    numbers = ()
    for tile in ct.static_iter(found):
        numbers += (ct.where(j < CHUNKS, ct.bitcast(tile, ct.float32), 0.0),)
    return numbers


def added(found, CHUNKS, PADDED):
    sums = ()
    numbers = floats(found, CHUNKS, PADDED)
    for tile in ct.static_iter(numbers):
        sums += (ct.sum(tile),)
    return sums


def is_nan(numbers):
    found = False
    for number in ct.static_iter(numbers):
        found = found | (number != number)
    return found


def any_empty(found):
    empty = 0
    for tile in ct.static_iter(found):
        empty = empty + ct.sum(ct.where(tile == EMPTY, 1, 0))
    return empty > 0


def combine(means, squares, N, TILE, PADDED):
    """(near, offset, variance) of a row, whose mean is near + offset, from those of its chunks.

    near is the first chunk's mean. Differences from it are exact where means are close, and a sum
    of means would lose what a large mean has too many digits for. After Chan, Golub and LeVeque
    (1979).
    """
    j = ct.arange(PADDED, dtype=ct.int32)
    count = ct.minimum(ct.maximum(N - j * TILE, 0), TILE).astype(ct.float32)
    near = ct.sum(ct.where(j == 0, means, 0.0))
    apart = means - near
    offset = ct.sum(count * apart) * (1.0 / N)
    apart = apart - offset
    return near, offset, (ct.sum(squares) + ct.sum(count * apart * apart)) * (1.0 / N)
