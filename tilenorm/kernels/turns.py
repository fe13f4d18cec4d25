"""How a kernel starts before the kernel before it has ended (programmatic dependent launch)."""

import cuda.tile as ct


def take_turn(OVERLAP):
    """Wait until the kernel before has ended, and let the kernel behind start.

    OVERLAP: this kernel may start before the kernel before it has ended. So that kernel may still
    be writing what this one reads, and reading what this one writes. A block calls this before it
    reads or writes an array. Its launch, and the numbers that it makes of its parameters, lie
    before the call and cost no time of their own.
    """
    if OVERLAP:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
