"""What each instruction does. A function takes the machine, the instruction and the threads' mask.

The names and the order of operands are those of NVIDIA's "CUDA Binary Utilities". Instructions that
begin with U work on uniform registers; the others of the same name on those of threads.
"""

import numpy as np

from .code import Instruction
from .machine import Machine

FUNCTIONS = {}


def instruction(*names: str):
    """Register a function for the instructions of these names."""

    def register(function):
        for name in names:
            FUNCTIONS[name] = function
        return function

    return register


def is_uniform(i: Instruction) -> bool:
    return i.name.startswith("U") or i.name in ("VOTEU", "R2UR", "S2UR")


def is_predicate(operand: str) -> bool:
    name = operand.lstrip("!").removeprefix("U")
    return name == "PT" or (name[0] == "P" and name[1:].isdigit())


def carries(i: Instruction) -> tuple[list[str], list[str]]:
    """The predicates behind the first operand, which take carries, and the operands after them."""
    rest = list(i.operands[1:])
    outputs = []
    while is_predicate(rest[0]):
        outputs.append(rest.pop(0))
    return outputs, rest


def signed(value: np.ndarray) -> np.ndarray:
    return value.view(np.int32).astype(np.int64)


@instruction("NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "DEPBAR", "ERRBAR", "YIELD", "CCTL")
def nothing(m, i, mask):
    """Threads are scheduled one by one, so that nothing needs to bring them together."""


@instruction("ACQBULK", "PREEXIT", "MEMBAR", "FENCE", "UCGABAR_ARV", "UCGABAR_WAIT")
def alone(m, i, mask):
    """What orders a block with others. One block runs at a time."""


# Integers


@instruction("MOV", "UMOV")
def move(m, i, mask):
    m.set(i.operands[0], _bits(m, i.operands[1], is_uniform(i)), mask)


def _bits(m: Machine, operand: str, uniform: bool = False) -> np.ndarray:
    """An operand that may be an integer or a float."""
    plain = operand.lstrip("-~|")
    if plain.startswith(("0x", "R", "UR", "c[", "SRZ")):
        return m.integer(operand, uniform)
    return m.real(operand).view(np.uint32)


@instruction("VIADD", "IADD3", "UIADD3", "IADD", "UIADD")
def add(m, i, mask):
    uniform = is_uniform(i)
    outputs, rest = carries(i)
    sources = [operand for operand in rest if not is_predicate(operand)]
    carried = [operand for operand in rest if is_predicate(operand)]
    total = np.zeros(m.warps if uniform else m.threads, np.int64)
    for operand in sources:
        value = m.integer(operand.lstrip("-"), uniform).astype(np.int64)
        total = total + ((1 << 32) - value if operand.startswith("-") else value)
    if "X" in i.modifiers:
        for operand in carried:
            total = total + m.predicate(operand, uniform)
    m.set(i.operands[0], total.astype(np.uint32), mask)
    for number, output in enumerate(outputs):
        m.set_predicate(output, total >> 32 > number, mask)


@instruction("IMAD", "UIMAD")
def multiply_add(m, i, mask):
    uniform = is_uniform(i)
    outputs, (a, b, c, *carried) = carries(i)
    wide = "WIDE" in i.modifiers
    if wide or "HI" in i.modifiers:
        convert = (lambda v: v.astype(np.uint64)) if "U32" in i.modifiers else signed
        product = convert(m.integer(a, uniform)).astype(np.uint64)
        product = product * convert(m.integer(b, uniform)).astype(np.uint64)
        if wide:
            total = product + m.pair(c, uniform)
            m.set_pair(i.operands[0], total, mask)
            for output in outputs:
                m.set_predicate(output, total < product, mask)
            return
        total = product + m.pair(c, uniform)
        m.set(i.operands[0], (total >> np.uint64(32)).astype(np.uint32), mask)
        return
    if outputs:
        raise NotImplementedError(i.text)
    total = m.integer(a, uniform) * m.integer(b, uniform) + m.integer(c, uniform)
    if "X" in i.modifiers:
        for operand in carried:
            total = total + m.predicate(operand, uniform).astype(np.uint32)
    m.set(i.operands[0], total, mask)


@instruction("IABS", "UIABS")
def absolute(m, i, mask):
    target, source = i.operands
    m.set(target, np.abs(signed(m.integer(source, is_uniform(i)))).astype(np.uint32), mask)


@instruction("LEA", "ULEA")
def shifted_add(m, i, mask):
    uniform = is_uniform(i)
    outputs, rest = carries(i)
    carried = [operand for operand in rest if is_predicate(operand)]
    *sources, shift = [operand for operand in rest if not is_predicate(operand)]
    shift = int(shift, 16)
    if "HI" in i.modifiers and "SX32" in i.modifiers:
        value = signed(m.integer(sources[0], uniform)) >> (32 - shift)
    elif "HI" in i.modifiers:
        low, high = m.integer(sources[0], uniform), m.integer(sources[2], uniform)
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        value = (both >> np.uint64(32 - shift)).astype(np.int64)
    else:
        value = m.integer(sources[0], uniform).astype(np.int64) << shift
    total = (value & 0xFFFFFFFF) + m.integer(sources[1], uniform).astype(np.int64)
    if "X" in i.modifiers:
        total = total + m.predicate(carried[0], uniform)
    m.set(i.operands[0], total.astype(np.uint32), mask)
    for output in outputs:
        m.set_predicate(output, total >> 32 > 0, mask)


def by_table(a, b, c, table: int):
    """Bit by bit: bit 4·a + 2·b + c of the table."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            part = a if index & 4 else ~a
            part = part & (b if index & 2 else ~b)
            result = result | (part & (c if index & 1 else ~c))
    return result


@instruction("LOP3", "ULOP3")
def logic(m, i, mask):
    uniform = is_uniform(i)
    operands = list(i.operands)
    output = operands.pop(0) if is_predicate(operands[0]) else None
    target, a, b, c, table, *_ = operands
    values = (m.integer(operand, uniform) for operand in (a, b, c))
    result = by_table(*values, int(table, 16))
    m.set(target, result, mask)
    if output:
        m.set_predicate(output, result != 0, mask)


@instruction("PLOP3", "UPLOP3")
def predicate_logic(m, i, mask):
    uniform = is_uniform(i)
    first, second, a, b, c, *tables = i.operands
    values = [m.predicate(operand, uniform) for operand in (a, b, c)]
    for output, table in zip((first, second), tables, strict=True):
        m.set_predicate(output, by_table(*values, int(table, 16)), mask)


@instruction("SHF", "USHF")
def shift(m, i, mask):
    uniform = is_uniform(i)
    target, low, amount, high = i.operands
    amount = m.integer(amount, uniform).astype(np.uint64)
    low, high = m.integer(low, uniform), m.integer(high, uniform)
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    upper = "HI" in i.modifiers
    if i.modifiers[0] == "L":
        result = both << np.minimum(amount, 63)
        result = np.where(amount > 63, 0, result)
    elif "S32" in i.modifiers or "S64" in i.modifiers:
        result = (both.view(np.int64) >> np.minimum(amount, 63).astype(np.int64)).view(np.uint64)
    else:
        result = np.where(amount > 63, 0, both >> np.minimum(amount, 63))
    result = result.astype(np.uint64)
    m.set(target, (result >> np.uint64(32) if upper else result).astype(np.uint32), mask)


@instruction("PRMT", "UPRMT")
def permute(m, i, mask):
    uniform = is_uniform(i)
    target, a, selector, b = i.operands
    a, b = (m.integer(operand, uniform).astype(np.uint64) for operand in (a, b))
    selector, both = m.integer(selector, uniform), a | b << np.uint64(32)
    result = np.zeros_like(both)
    for byte in range(4):
        nibble = (selector >> np.uint32(4 * byte) & np.uint32(15)).astype(np.uint64)
        part = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        sign = np.where(part & np.uint64(128), np.uint64(255), np.uint64(0))
        part = np.where(nibble & np.uint64(8), sign, part)
        result |= part << np.uint64(8 * byte)
    m.set(target, result.astype(np.uint32), mask)


@instruction("SEL", "USEL", "FSEL")
def select(m, i, mask):
    uniform = is_uniform(i)
    target, a, b, condition = i.operands
    read = (lambda o: m.real(o).view(np.uint32)) if i.name == "FSEL" else (
        lambda o: m.integer(o, uniform)
    )  # fmt: skip
    m.set(target, np.where(m.predicate(condition, uniform), read(a), read(b)), mask)


@instruction("VIMNMX", "IMNMX", "UVIMNMX")
def extremum(m, i, mask):
    uniform = is_uniform(i)
    target, a, b, least = i.operands
    convert = (lambda v: v.astype(np.int64)) if "U32" in i.modifiers else signed
    a, b = convert(m.integer(a, uniform)), convert(m.integer(b, uniform))
    chosen = np.where(m.predicate(least, uniform), np.minimum(a, b), np.maximum(a, b))
    m.set(target, chosen.astype(np.uint32), mask)


COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
COMBINE = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


@instruction("ISETP", "UISETP")
def compare(m, i, mask):
    uniform = is_uniform(i)
    first, second, a, b, *others = i.operands
    convert = (lambda v: v.astype(np.int64)) if "U32" in i.modifiers else signed
    a, b = convert(m.integer(a, uniform)), convert(m.integer(b, uniform))
    result = COMPARE[i.modifiers[0]](a, b)
    if "EX" in i.modifiers:  # the upper halves; where they are equal, the lower halves decide
        lower = m.predicate(others[1], uniform)
        result = np.where(a == b, lower, result)
    combine = COMBINE[next(word for word in i.modifiers if word in COMBINE)]
    condition = m.predicate(others[0], uniform)
    m.set_predicate(first, combine(result, condition), mask)
    m.set_predicate(second, combine(~result, condition), mask)
