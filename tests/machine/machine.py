"""The state of a block: registers, predicates and memory, and what an operand stands for."""

import re
import struct

import numpy as np

WARP = 32
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_TERM = re.compile(r"([+-]?)\s*(UR\w+|R\w+|0x[0-9a-f]+)(\.64|\.U32|\.X\d+)?")
LOCAL = 1 << 14  # bytes of each thread's own memory, which holds spilled registers
SHARED = 1 << 18
TRUE = 7  # PT and UPT


class Machine:
    """A block of `threads` threads. Registers are rows of arrays with a column for each thread.

    Uniform registers (UR) have a column for each warp. constants: the bytes of constant bank 0.
    memory: bytes that addresses index. disturbs: see floats.disturbed.
    """

    def __init__(self, threads: int, constants, memory, block, disturbs: bool = False) -> None:
        self.threads, self.warps = threads, threads // WARP
        self.registers = np.zeros((256, threads), np.uint32)
        self.uniform = np.zeros((256, self.warps), np.uint32)
        self.predicates = np.zeros((8, threads), bool)
        self.uniform_predicates = np.zeros((8, self.warps), bool)
        self.predicates[TRUE] = self.uniform_predicates[TRUE] = True
        self.constants, self.memory, self.block = constants, memory, block
        self.disturbs = disturbs
        self.shared = np.zeros(SHARED, np.uint8)
        self.local = np.zeros((threads, LOCAL), np.uint8)

    # Values of operands, one for each warp if `uniform`, else one for each thread.

    def spread(self, values: np.ndarray, uniform: bool) -> np.ndarray:
        """Values of warps, as an instruction of threads reads them."""
        return values if uniform else np.repeat(values, WARP, axis=-1)

    def word(self, operand: str, uniform: bool, offset: int = 0) -> np.ndarray:
        """32 bits, without the operand's sign. offset: 1 for the upper half of a pair."""
        count = self.warps if uniform else self.threads
        name = operand.split(".")[0]
        if name in ("RZ", "URZ", "SRZ"):
            return np.zeros(count, np.uint32)
        if name.startswith("UR"):
            return self.spread(self.uniform[int(name[2:]) + offset], uniform)
        if name.startswith("R"):
            return self.registers[int(name[1:]) + offset]
        if constant := _CONSTANT.match(operand):
            start = int(constant[1], 16) + 4 * offset
            return np.full(count, self.constants[start : start + 4].view(np.uint32)[0])
        raise NotImplementedError(f"operand {operand}")

    def integer(self, operand: str, uniform: bool = False) -> np.ndarray:
        """An integer operand as uint32; "-" is the two's complement, "~" the ones' complement."""
        sign, operand = (operand[0], operand[1:]) if operand[0] in "-~" else ("", operand)
        if operand.startswith("0x"):
            count = self.warps if uniform else self.threads
            value = np.full(count, int(operand, 16), np.uint32)
        else:
            value = self.word(operand, uniform)
        if sign == "-":
            return (0 - value.astype(np.int64)).astype(np.uint32)
        return ~value if sign == "~" else value

    def pair(self, operand: str, uniform: bool = False) -> np.ndarray:
        """A 64-bit integer operand, from two registers."""
        if operand.startswith(("0x", "-0x")):
            count = self.warps if uniform else self.threads
            return np.full(count, int(operand, 16) & (1 << 64) - 1, np.uint64)
        negative, operand = operand.startswith("-"), operand.lstrip("-")
        low = self.word(operand, uniform).astype(np.uint64)
        upper = 0 if operand in ("RZ", "URZ") else 1
        high = self.word(operand, uniform, upper).astype(np.uint64)
        value = low | high << np.uint64(32)
        return np.uint64(0) - value if negative else value

    def real(self, operand: str) -> np.ndarray:
        """A float32 operand."""
        negative = operand.startswith("-")
        operand = operand.lstrip("-")
        absolute = operand.startswith("|")
        operand = operand.strip("|")
        if re.match(r"^[+]?(\d|\.\d|INF|QNAN)", operand) and not operand.startswith("0x"):
            number = {"INF": np.inf, "QNAN": np.nan}.get(operand.lstrip("+")) or float(operand)
            value = np.full(self.threads, number, np.float32)
        else:
            value = self.word(operand, False).view(np.float32)
        value = np.abs(value) if absolute else value
        return -value if negative else value

    def predicate(self, operand: str, uniform: bool = False) -> np.ndarray:
        negative, name = operand.startswith("!"), operand.lstrip("!")
        if name.startswith("UP"):
            index = TRUE if name == "UPT" else int(name[2:])
            value = self.spread(self.uniform_predicates[index], uniform)
        elif uniform and name == "PT":
            value = self.uniform_predicates[TRUE]
        else:
            value = self.predicates[TRUE if name == "PT" else int(name[1:])]
        return ~value if negative else value

    # Results

    def set(self, operand: str, value: np.ndarray, mask: np.ndarray, offset: int = 0) -> None:
        """Put 32-bit values into a register, where the mask is true."""
        if operand in ("RZ", "URZ"):
            return
        uniform = operand.startswith("UR")
        file = self.uniform if uniform else self.registers
        row = int(operand[2 if uniform else 1 :]) + offset
        np.copyto(file[row], value.view(np.uint32), where=mask)

    def set_pair(self, operand: str, value: np.ndarray, mask: np.ndarray) -> None:
        low, high = value.astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)
        self.set(operand, low, mask)
        self.set(operand, high, mask, 1)

    def set_predicate(self, operand: str, value: np.ndarray, mask: np.ndarray) -> None:
        if operand in ("PT", "UPT"):
            return
        uniform = operand.startswith("U")
        file = self.uniform_predicates if uniform else self.predicates
        np.copyto(file[int(operand.lstrip("UP"))], value, where=mask)

    # Memory

    def address(self, operand: str) -> np.ndarray:
        """The sum in brackets, such as desc[UR6][R2.64+0x800] or [R40+UR4+0x20]."""
        inside = operand[operand.rindex("[") + 1 : operand.rindex("]")]
        total = np.zeros(self.threads, np.int64)
        for sign, name, size in _TERM.findall(inside):
            if name.startswith("0x"):
                value = np.int64(int(name, 16))
            elif size == ".64":
                value = self.pair(name).astype(np.int64)
            else:
                value = self.word(name, False).view(np.int32).astype(np.int64)
                value = value * int(size[2:]) if size.startswith(".X") else value
            total += -value if sign == "-" else value
        return total

    def read(self, space: str, address: np.ndarray, count: int, mask: np.ndarray) -> np.ndarray:
        """`count` bytes of each thread in the mask; zeros of the others."""
        found = np.zeros((self.threads, count), np.uint8)
        index = address[mask, None] + np.arange(count)
        if space == "local":
            found[mask] = self.local[np.flatnonzero(mask)[:, None], index]
        else:
            found[mask] = self._bytes(space)[index]
        return found

    def write(self, space: str, address: np.ndarray, data: np.ndarray, mask: np.ndarray) -> None:
        index = address[mask, None] + np.arange(data.shape[1])
        if space == "local":
            self.local[np.flatnonzero(mask)[:, None], index] = data[mask]
        else:
            self._bytes(space)[index] = data[mask]

    def _bytes(self, space: str) -> np.ndarray:
        return self.shared if space == "shared" else self.memory


def float_bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]
