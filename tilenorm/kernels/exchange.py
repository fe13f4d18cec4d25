"""How blocks that share a row tell each other what they have of its sums.

A row too wide for one block is cut into chunks, one block a chunk. Each block publishes its numbers
in slots of the row, chunk by chunk, and reads those of the others, so that a sum has one order. A
slot holds a number or is EMPTY, so that nothing but the slot itself has to be visible: relaxed
atomics suffice. Loads would not: each warp does those for itself, and one warp would leave a loop
that another stays in.

Every block ends, and its bits are the same, whichever blocks run beside it, before it or never:
1. It waits for the end of clear_slots, whose blocks have all started before it, and never wait.
2. A block publishes before it polls, and to publish it waits for no other block of its kernel.
3. It polls at most 1 + POLLS times for a row, and SUM_POLLS more in collect_sums; once more as
   often for the maxima of a row that is quantised. No loop but these depends on another block, and
   there is no lock.
4. Then it computes the missing numbers itself, from inputs that no block writes.
5. So the number of steps that a block takes has a bound that no other block can change.
6. A slot is EMPTY, or holds what its chunk's columns give in the order that statistics.Order
   prescribes. A block that computes a missing number adds the same columns in this order.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .statistics import add_both, two_sums

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


@dataclass(frozen=True)
class Slots:
    """The slots of a row: PARTS float32 numbers, one or two, for each of its CHUNKS.

    FIRST: the slot of the first number.
    """

    SLOTS: Any
    row: Any
    PARTS: int
    CHUNKS: int
    PADDED_CHUNKS: int
    POLLS: int
    FIRST: int = 0

    def publish(self, chunk, numbers):
        """Put the numbers of a chunk where the other blocks find them."""
        part = ct.arange(self.PARTS, dtype=ct.int32)
        mine = numbers[0] if self.PARTS == 1 else ct.where(part == 0, numbers[0], numbers[1])
        ct.atomic_xchg(
            self.SLOTS,
            (self.row, chunk * self.PARTS + part + self.FIRST),
            ct.bitcast(mine, ct.int32),
            check_bounds=False,
            memory_order=ct.MemoryOrder.RELAXED,
        )

    def collect(self, numbers_of):
        """The numbers of every chunk, chunk by chunk, as a float32 tile.

        numbers_of(chunk) computes the numbers of a chunk that has not published in time.
        """
        return ct.bitcast(self.settled(self.poll(), numbers_of), ct.float32)

    def collect_sums(self, numbers_of):
        """The sum over the chunks of each of their numbers.

        EMPTY is a NaN, so a NaN sum means: poll again.
        """
        found = self.poll()
        totals = self.added(found)
        polls = 0
        while is_nan(totals) & (polls < SUM_POLLS):
            found = self.poll()
            totals = self.added(found)
            polls = polls + 1
        if is_nan(totals):
            found = self.settled(found, numbers_of)
            totals = self.added(found)
        return totals

    def collect_peak(self, chunk, mine, numbers_of):
        """The largest of a number of each chunk, of which this one has `mine`; NaN if one is NaN.

        Past the last chunk `poll` repeats a number, which does not change the largest.
        """
        self.publish(chunk, (mine.item(),))
        return ct.max(self.collect(numbers_of), propagate_nan=True)

    def poll(self):
        """What the slots hold, chunk by chunk; past the last chunk any of them."""
        slot = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        slot = ct.minimum(slot, self.PARTS * self.CHUNKS - 1) + self.FIRST
        return ct.atomic_or(
            self.SLOTS,
            (self.row, slot),
            0,
            check_bounds=False,
            memory_order=ct.MemoryOrder.RELAXED,
        )

    def settled(self, found, numbers_of):
        """The slots without an EMPTY one, from what was found in them."""
        j = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        polls = 0
        while any_empty(found) & (polls < self.POLLS):
            found = self.poll()
            polls = polls + 1
        if any_empty(found):
            # A for loop takes the compiler five seconds more: it tries to unroll it.
            chunk = 0
            while chunk < self.CHUNKS:
                own = numbers_of(chunk)
                for part, number in ct.static_iter(enumerate(own)):
                    mine = j == chunk * self.PARTS + part
                    found = ct.where(mine, ct.bitcast(number, ct.int32), found)
                chunk = chunk + 1
        return found

    def added(self, found):
        """The sum of each part over the chunks."""
        j = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        numbers = ct.where(j < self.PARTS * self.CHUNKS, ct.bitcast(found, ct.float32), 0.0)
        if self.PARTS == 1:
            return (ct.sum(numbers),)
        first = ct.where(j % 2 == 0, numbers, 0.0)
        second = ct.where(j % 2 == 0, 0.0, numbers)
        totals = two_sums(first[None, :], second[None, :], add_both)
        return totals[0].item(), totals[1].item()

    def combine(self, numbers, cut):
        """(mean, correction, variance) of a row, from the mean and Σ (x − mean)² of each chunk.

        mean is the first chunk's, and the row's is mean + correction. Differences from it are exact
        where means are close; a sum of means would lose what a large mean has too many digits for.
        After Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
        Sample Variances" (1979).
        """
        j = ct.arange(2 * self.PADDED_CHUNKS, dtype=ct.int32)
        chunk = j // 2
        is_mean = j % 2 == 0
        # 0 past the last chunk, whatever was found there.
        TILE = cut.chunk_width()
        count = ct.minimum(ct.maximum(cut.N - chunk * TILE, 0), TILE).astype(ct.float32)
        mean = ct.sum(ct.where(j == 0, numbers, 0.0))
        apart = ct.where(is_mean & (chunk < self.CHUNKS), numbers - mean, 0.0)
        correction = ct.sum(count * apart) * (1.0 / cut.N)
        apart = apart - correction
        squares = ct.where(
            is_mean, count * apart * apart, ct.where(chunk < self.CHUNKS, numbers, 0.0)
        )
        return mean, correction, ct.sum(squares) * (1.0 / cut.N)


def is_nan(numbers):
    found = False
    for number in ct.static_iter(numbers):
        found = found | (number != number)
    return found


def any_empty(found):
    return ct.sum(ct.where(found == EMPTY, 1, 0)) > 0
