"""Runs a compiled kernel: its arguments in memory, and its blocks one after another."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from tilenorm.launch.calls import Call
from tilenorm.tools.cubin import resources
from tilenorm.tools.precompile import cubin_of

from ..executors import described
from . import control, eights, floats, memory  # noqa: F401  (they register their instructions)
from .code import instructions
from .instructions import FUNCTIONS, is_uniform
from .machine import Machine, float_bits

PARAMETERS = {80: 0x160, 90: 0x210}  # where a kernel's parameters begin in constant bank 0
GRID, STACK, LIMIT = 0xC, 0x28, 1 << 13  # where the grid's size and the stack's end stand there
CLUSTER = {0x144: 1, 0x154: float_bits(1.0), 0x158: float_bits(1.0)}  # a cluster's size, sm_90
MOST_STEPS = 200_000
INSTRUCTION_BYTES = 16
GUARD = 256  # bytes between arrays; cuTile may assume that an array starts at a multiple of 16


class Hang(Exception):
    """A block has executed more instructions than any kernel of ours needs."""


class Program:
    """A compiled kernel."""

    def __init__(self, cubin: bytes) -> None:
        self.code, self.labels = instructions(cubin)
        self.threads = resources(cubin).threads

    def run(self, constants, data, block: tuple[int, int, int], disturbs: bool) -> None:
        """Run one block. constants: bank 0. data: every array, at the address it was given."""
        machine = Machine(self.threads, constants, data, block, disturbs)
        at = np.zeros(machine.threads, np.int64)  # the instruction that each thread is at
        waiting = np.zeros(machine.threads, bool)
        for _ in range(MOST_STEPS):
            if not (at >= 0).any():
                return
            ready = (at >= 0) & ~waiting
            if not ready.any():
                waiting[:] = False  # all have reached the barrier
                continue
            here = at[ready].min()
            active = ready & (at == here)
            at[active] += 1
            self._step(machine, self.code[here], active, at, waiting)
        raise Hang(f"more than {MOST_STEPS} instructions")

    def _step(self, machine, i, active, at, waiting) -> None:
        """Execute an instruction for the active threads."""
        if is_uniform(i) and i.name != "R2UR" and i.name != "VOTEU":
            active = active.reshape(machine.warps, -1).any(1)
            mask = active if i.guard is None else active & machine.predicate(i.guard, True)
        else:
            mask = active if i.guard is None else active & machine.predicate(i.guard)
        match i.name:
            case "EXIT":
                at[mask] = -1
            case "CALL":  # the return address is in a register
                at[mask] = self.labels[i.operands[-1].strip("`()")]
            case "RET":
                returning = machine.word(i.operands[0].split()[0], False)[mask]
                at[mask] = returning // INSTRUCTION_BYTES
            case "BRA":
                for condition in i.operands[:-1]:
                    mask = mask & machine.predicate(condition)
                at[mask] = self.labels[i.operands[-1].strip("`()")]
            case "BAR":
                waiting[mask] = True
            case name if name in FUNCTIONS:
                FUNCTIONS[name](machine, i, mask)
            case _:
                raise NotImplementedError(i.text)


@cache
def _program(cubin: bytes) -> Program:
    return Program(cubin)


def launch(call: Call, arch: str, disturbs: bool = False) -> None:
    """Run every block of a call whose arrays are CPU tensors, and write its outputs in place."""
    bank, tensors = _Bank(arch, (*call.grid, 1, 1)[:3]), []
    for argument, annotation in zip(
        call.arguments, call.kernel._annotated_function.parameter_annotations, strict=True
    ):
        if not annotation.constant:
            bank.add(argument, tensors)
    described_call = call._replace(arguments=described(call.arguments))
    program = _program(cubin_of(described_call, arch))
    data = np.concatenate([bank.guard, *bank.parts])
    for block in np.ndindex(*reversed((*call.grid, 1, 1)[:3])):
        program.run(bank.constants, data, block[::-1], disturbs)
    for start, tensor in tensors:
        found = data[start : start + _bytes(tensor).size]
        _bytes(tensor)[:] = found


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes from a tensor's first element to its last, without those before it."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,))
    return flat.view(torch.uint8).numpy()


class _Bank:
    """Constant bank 0, and the memory behind the pointers in it.

    An array is a pointer, its extents and its strides; the pointer stands at a multiple of 8.
    """

    def __init__(self, arch: str, grid: tuple[int, int, int]) -> None:
        self.constants = np.zeros(4096, np.uint8)
        self.guard = np.zeros(GUARD, np.uint8)  # no array has address 0
        self.parts, self.end = [], GUARD
        self.at = PARAMETERS[int(arch.removeprefix("sm_"))]
        sizes = {GRID + 4 * axis: count for axis, count in enumerate(grid)}
        for offset, value in (sizes | CLUSTER | {STACK: LIMIT}).items():
            self._put(offset, np.uint32(value))

    def _put(self, offset: int, value) -> None:
        data = np.frombuffer(value.tobytes(), np.uint8)
        self.constants[offset : offset + data.size] = data

    def _next(self, value) -> None:
        size = value.itemsize
        self.at = -(-self.at // size) * size
        self._put(self.at, value)
        self.at += size

    def add(self, argument, tensors: list) -> None:
        """Put an argument into the bank. tensors: grows by the address of each array."""
        if isinstance(argument, tuple):
            for item in argument:
                self.add(item, tensors)
        elif isinstance(argument, Tensor):
            data = _bytes(argument)
            tensors.append((self.end, argument))
            self._next(np.uint64(self.end))
            for number in (*argument.shape, *argument.stride()):
                self._next(np.int32(number))
            padding = np.zeros(-data.size % GUARD + GUARD, np.uint8)
            self.parts += [data, padding]
            self.end += data.size + padding.size
        else:
            self._next((np.float32 if isinstance(argument, float) else np.int32)(argument))
