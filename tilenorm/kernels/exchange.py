"""How blocks that share a row exchange their parts of its sums.

A row that is too wide for one block is cut into chunks, one block a chunk. Each block publishes the
numbers of its chunk in slots of the row, and reads the numbers of the other chunks. Every block
adds them up chunk by chunk, so that a sum has one order. A slot either is EMPTY or holds a number,
so that nothing but the slot itself has to be visible to other blocks. Relaxed atomics suffice for
that. Loads do not: each warp loads for itself, and one warp would leave a loop in which another
warp stays.

Every block ends, and its bits are the same, whichever blocks run beside it, before it or never:
1. It waits for the end of clear_slots, and a block of clear_slots for the end of the kernel before.
   A kernel starts early only when all blocks of the kernel before have started, so that none waits
   for a block that could not start.
2. A block publishes before it polls, and to publish it waits for no other block of its kernel.
3. It polls at most 1 + POLLS times for a row, and SUM_POLLS times more in collect_sums. It polls
   as often again for the maxima of a row that is quantised. No other loop depends on another block,
   and there is no lock.
4. Then it computes the missing numbers itself, from inputs that no block writes.
5. So the number of steps that a block takes has a bound that no other block can change.
6. A slot is EMPTY, or holds what its chunk's columns give in the order that statistics.Order
   prescribes. A block that computes a missing number adds the same columns in this order.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .statistics import add_both, two_sums
from .turns import take_turn

EMPTY = -1  # the bits of a NaN. The GPU's arithmetic never makes it: it makes 0x7fffffff
SUM_POLLS = 8  # a sum that is NaN after so many polls is taken for one that has a NaN in it


@ct.kernel
def clear_slots(
    SLOTS, TILE_ROWS: ct.Constant[int], TILE: ct.Constant[int], OVERLAP: ct.Constant[bool]
):
    """Empty the slots (rows, n) of every row.

    OVERLAP: see take_turn. The kernel that uses the slots starts when the kernel before this one
    has ended, so that it reads its inputs while this kernel still runs.
    """
    take_turn(OVERLAP)
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    rows = ct.bid(0) * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    slots = ct.arange(TILE, dtype=ct.int32)[None, :]
    ct.scatter(SLOTS, (rows, slots), ct.full((TILE_ROWS, TILE), EMPTY, dtype=ct.int32))


@dataclass(frozen=True)
class Slots:
    """The slots of a row: PARTS float32 numbers for each of its CHUNKS."""

    SLOTS: Any
    row: Any
    PARTS: int  # 1 or 2
    CHUNKS: int
    PADDED_CHUNKS: int  # these two as in constants.How
    POLLS: int
    FIRST: int = 0  # the slot of the first number

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
        slots = self.poll()
        totals = self.added(slots)
        polls = 0
        while is_nan(totals) & (polls < SUM_POLLS):
            slots = self.poll()
            totals = self.added(slots)
            polls = polls + 1
        if is_nan(totals):
            slots = self.settled(slots, numbers_of)
            totals = self.added(slots)
        return totals

    def collect_peak(self, chunk, mine, numbers_of):
        """The largest of the numbers that the chunks have, one each; NaN if one of them is NaN.

        mine: the number of this block's chunk. Past the last chunk `poll` repeats a number, which
        does not change the largest.
        """
        self.publish(chunk, (mine.item(),))
        return ct.max(self.collect(numbers_of), propagate_nan=True)

    def poll(self):
        """What the slots hold, chunk by chunk. Past the last chunk it is what any slot holds."""
        slot = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        slot = ct.minimum(slot, self.PARTS * self.CHUNKS - 1) + self.FIRST
        return ct.atomic_or(
            self.SLOTS,
            (self.row, slot),
            0,
            check_bounds=False,
            memory_order=ct.MemoryOrder.RELAXED,
        )

    def settled(self, slots, numbers_of):
        """The slots with a number in each, from what a poll has found in them."""
        j = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        polls = 0
        while any_empty(slots) & (polls < self.POLLS):
            slots = self.poll()
            polls = polls + 1
        if any_empty(slots):
            # A for loop takes the compiler five seconds more: it tries to unroll it.
            chunk = 0
            while chunk < self.CHUNKS:
                numbers = numbers_of(chunk)
                for part, number in ct.static_iter(enumerate(numbers)):
                    mine = j == chunk * self.PARTS + part
                    slots = ct.where(mine, ct.bitcast(number, ct.int32), slots)
                chunk = chunk + 1
        return slots

    def added(self, slots):
        """The sum of each part over the chunks."""
        j = ct.arange(self.PARTS * self.PADDED_CHUNKS, dtype=ct.int32)
        numbers = ct.where(j < self.PARTS * self.CHUNKS, ct.bitcast(slots, ct.float32), 0.0)
        if self.PARTS == 1:
            return (ct.sum(numbers),)
        first = ct.where(j % 2 == 0, numbers, 0.0)
        second = ct.where(j % 2 == 0, 0.0, numbers)
        totals = two_sums(first[None, :], second[None, :], add_both)
        return totals[0].item(), totals[1].item()

    def combine(self, numbers, cut):
        """(mean, correction, variance) of a row, from the mean and Σ (x − mean)² of each chunk.

        `mean` is the mean of the first chunk. The mean of the row is mean + correction. The
        differences of close means are exact, while a sum of large means would lose digits. After
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances" (1979).
        """
        j = ct.arange(2 * self.PADDED_CHUNKS, dtype=ct.int32)
        chunk = j // 2
        is_mean = j % 2 == 0
        # `count` is 0 past the last chunk, whatever a poll has found there.
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
    has_nan = False
    for number in ct.static_iter(numbers):
        has_nan = has_nan | (number != number)
    return has_nan


def any_empty(slots):
    return ct.sum(ct.where(slots == EMPTY, 1, 0)) > 0
