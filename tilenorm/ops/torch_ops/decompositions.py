"""A decomposition table: the ops in PyTorch's own operators, for what knows those alone."""

from collections.abc import Callable
from functools import partial

import torch
from torch._ops import OpOverload

from . import internal_ops, library

KINDS: dict[str, Callable] = {**library.KINDS, **internal_ops.KINDS}  # of all ops


def decompositions() -> dict[OpOverload, Callable]:
    """A decomposition table of tilenorm's ops into ATen operators.

    torch.export, torch.compile and make_fx keep each op of tilenorm as one node, which a process
    without tilenorm cannot run. Whatever takes a decomposition table replaces the nodes:

        program = torch.export.export(model, arguments)
        table = torch.export.default_decompositions()  # of PyTorch's operators, to core ATen
        table.update(tilenorm.decompositions())
        program = program.run_decompositions(table)

    The program then runs where tilenorm is not installed, in AOTInductor's packages for one, and
    torch.onnx.export takes it. A model itself, and not a program, torch.onnx.export takes without
    this table.

    The decompositions compute what the reference computes, in float32, or in float64 where an input
    is float64. Their results differ from those of the kernels in the last places. They take tensors
    on any device, and disregard the argument `backend`.

    Returns:
        A new dict, from each op (an OpOverload) to a function of the op's arguments.
    """
    ops = torch.ops.tilenorm
    return {
        getattr(ops, name).default: partial(library.decomposed, kind)
        for name, kind in KINDS.items()
    }
