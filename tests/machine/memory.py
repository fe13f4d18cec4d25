"""The instructions that read and write memory, or pass values between the lanes of a warp."""

import numpy as np

from .instructions import instruction, is_uniform
from .machine import WARP

SPACES = {"G": "global", "S": "shared", "L": "local"}


def size_of(i) -> int:
    """How many bytes an instruction moves for each thread."""
    for name, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("16", 2)):
        if name in i.modifiers:
            return size
    return 4


@instruction("LDC", "ULDC", "LDCU")
def load_constant(m, i, mask):
    target, source = i.operands
    uniform = is_uniform(i)
    for offset in range(max(1, size_of(i) // 4)):
        m.set(target, m.word(source, uniform, offset), mask, offset)


@instruction("LDG", "LDS", "LDL")
def load(m, i, mask):
    target, source = i.operands[0], i.operands[-1]
    size = size_of(i)
    found = m.read(SPACES[i.name[2]], m.address(source), size, mask)
    if size < 4:
        padded = np.zeros((m.threads, 4), np.uint8)
        padded[:, :size] = found
        found = padded
    words = np.ascontiguousarray(found).view(np.uint32)
    for offset in range(words.shape[1]):
        m.set(target, np.ascontiguousarray(words[:, offset]), mask, offset)


@instruction("STG", "STS", "STL")
def store(m, i, mask):
    target, source = i.operands
    size = size_of(i)
    words = [
        m.word(source, False, 0 if source == "RZ" else offset)
        for offset in range(max(1, size // 4))
    ]
    data = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)[:, :size]
    m.write(SPACES[i.name[2]], m.address(target), data, mask)


def _matrix(m, i, operand: str):
    """(addresses of the rows, the first register) of STSM and LDSM: 8 rows of 16 bytes a matrix."""
    if "16" not in i.modifiers or "M88" not in i.modifiers:
        raise NotImplementedError(i.text)
    addresses = m.address(operand).reshape(m.warps, WARP)
    count = next((int(word) for word in i.modifiers if word in ("2", "4")), 1)
    return addresses, count


@instruction("STSM")
def store_matrix(m, i, mask):
    """Lane 4 · r + c holds bytes 4 · c to 4 · c + 3 of row r; lane 8 · k + r has row r's address
    in matrix k."""
    addresses, count = _matrix(m, i, i.operands[0])
    lanes = np.arange(WARP)
    for k in range(count):
        to = addresses[:, 8 * k + lanes // 4] + lanes % 4 * 4
        data = m.word(i.operands[1], False, k)[:, None].copy().view(np.uint8)
        m.write("shared", to.reshape(-1), data, mask)


@instruction("LDSM")
def load_matrix(m, i, mask):
    addresses, count = _matrix(m, i, i.operands[1])
    lanes = np.arange(WARP)
    for k in range(count):
        source = addresses[:, 8 * k + lanes // 4] + lanes % 4 * 4
        found = m.read("shared", source.reshape(-1), 4, mask)
        m.set(i.operands[0], np.ascontiguousarray(found).view(np.uint32)[:, 0], mask, k)


@instruction("SHFL")
def shuffle(m, i, mask):
    output, target, source, lane, _ = i.operands
    values = m.word(source, False).reshape(m.warps, WARP)
    lanes = np.arange(WARP)
    amount = int(lane, 16) if lane.startswith("0x") else None
    if amount is None and i.modifiers[0] != "IDX":
        raise NotImplementedError(i.text)
    match i.modifiers[0]:
        case "BFLY":
            index = lanes ^ amount
        case "DOWN":
            index = np.where(lanes + amount < WARP, lanes + amount, lanes)
        case "UP":
            index = np.where(lanes >= amount, lanes - amount, lanes)
        case _:
            index = m.integer(lane).reshape(m.warps, WARP) % WARP
            values = np.take_along_axis(values, index.astype(np.int64), 1)
            index = lanes
    m.set(target, np.ascontiguousarray(values[:, index]).reshape(-1), mask)
    m.set_predicate(output, np.ones(m.threads, bool), mask)
