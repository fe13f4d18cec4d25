"""Runs compiled kernels on the CPU: NVIDIA's machine code (SASS), one block of threads at a time.

The interpreter (tests/interpreter) runs a kernel's source, and a tile operation is one operation
there. The compiler distributes a tile over threads, chooses the order in which a thread adds, and
fuses products with additions. This package shows what it chose, without a GPU.

code.py reads the output of nvdisasm, machine.py holds the state of a block, instructions.py has a
function for each instruction, and run.py calls a kernel with arrays. An instruction that is not
known raises NotImplementedError. MUFU's results differ from the GPU's in the last bits.
"""
