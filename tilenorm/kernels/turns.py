"""How a kernel starts before the kernel before it has ended (programmatic dependent launch).

A launch takes its time before the first block of the kernel runs. With OVERLAP the GPU makes a
launch while the kernel before still runs, and the kernel itself waits for the end of that kernel.
"""

import cuda.tile as ct


def take_turn(OVERLAP):
    """Wait until the kernel before has ended.

    OVERLAP: this kernel may start before that. So the kernel before may still be writing what this
    one reads, and reading what this one writes. A block calls this before it reads or writes any
    array. The numbers that it makes of its parameters may lie before the call.
    """
    if OVERLAP:
        ct.grid_dependency_control_wait()


def offer_turn(FEW, blocks):
    """Let the blocks of the next kernel start beside the `blocks` of this one, if these are FEW.

    FEW: the most blocks that count as few; 0: none do. Blocks that fill the GPU leave no room: the
    next ones would go to the multiprocessors where blocks end first, and not evenly to all. So they
    start when all blocks of this kernel have ended.
    """
    if FEW > 0 and blocks <= FEW:
        ct.grid_dependency_control_launch_dependents()
