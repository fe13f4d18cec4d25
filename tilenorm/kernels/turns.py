"""How a kernel starts before the kernel before it has ended (programmatic dependent launch).

A launch takes its time before the first block of the kernel runs. A kernel that may start early is
launched while the kernel before still runs, and itself waits for the end of that kernel. The kernel
before may still be writing what this one reads, and reading what this one writes. So a block waits
before it reads or writes any array. The numbers that it makes of its parameters may lie before.
"""

import cuda.tile as ct


def take_turn(OVERLAP):
    """Wait until the kernel before has ended. OVERLAP: this kernel may start before that."""
    if OVERLAP:
        ct.grid_dependency_control_wait()


def take_turn_of_few(how, blocks):
    """The same for a kernel with a block for each tile, which starts early where it has few blocks.

    Many blocks gain nothing, and each of them would take longer by the wait. Where the blocks leave
    room on the multiprocessors, those of the next kernel start beside them, and wait there. Without
    room they would go to the multiprocessors where blocks end first, and not evenly to all: they
    start when all blocks of this kernel have ended.
    """
    if how.EARLY > 0 and blocks <= how.EARLY:
        ct.grid_dependency_control_wait()
        if blocks <= how.BESIDE:
            ct.grid_dependency_control_launch_dependents()
