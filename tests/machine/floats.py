"""The instructions that compute with floating-point numbers."""

import numpy as np

from .instructions import COMBINE, COMPARE, instruction


def rounded(exact: np.ndarray, modifiers: tuple[str, ...] = ()) -> np.ndarray:
    """A float64 result as float32, to the nearest or as the instruction says."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = exact.astype(np.float32)
    back = found.astype(np.float64)
    if "RM" in modifiers:
        found = np.where(back > exact, np.nextafter(found, np.float32(-np.inf)), found)
    elif "RP" in modifiers:
        found = np.where(back < exact, np.nextafter(found, np.float32(np.inf)), found)
    elif "RZ" in modifiers:
        found = np.where(abs(back) > abs(exact), np.nextafter(found, np.float32(0)), found)
    if "SAT" in modifiers:
        found = np.clip(np.nan_to_num(found, nan=0.0), 0.0, 1.0)
    return found.astype(np.float32)


def disturbed(result: np.ndarray, *parts: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The result, changed by up to a part in 32 that is a hash of the magnitudes of `parts`.

    Rounding hides most differences in the order of additions, above all in 16-bit outputs. After
    this a value that was computed in any other way differs by far more than rounding.
    """
    mixed = np.zeros(result.shape, np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts:
            mixed = (mixed ^ np.abs(part).astype(np.float32).view(np.uint32)) * np.uint32(
                0x9E3779B1
            )
            mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0x2C1B3C6D)
    change = (mixed >> np.uint32(8)).astype(np.float64) / 2**28 - 1 / 32
    return np.where(where, result * (1 + change), result)


def sum_of(m, a: np.ndarray, b: np.ndarray, i) -> np.ndarray:
    """a + b; both float64, of which a may be a product that is not rounded."""
    total = a + b
    if m.disturbs and not i.modifiers:
        total = disturbed(total, total, a - b, where=(a != 0) & (b != 0))
    return rounded(total, i.modifiers)


def wide(m, operand: str) -> np.ndarray:
    return m.real(operand).astype(np.float64)


@instruction("FADD")
def add(m, i, mask):
    target, a, b = i.operands
    m.set(target, sum_of(m, wide(m, a), wide(m, b), i), mask)


def product_of(m, a: np.ndarray, b: np.ndarray, i) -> np.ndarray:
    product = a * b
    if m.disturbs and not i.modifiers:
        product = disturbed(product, product, where=(abs(a) != 1) & (abs(b) != 1))
    return rounded(product, i.modifiers)


@instruction("FMUL")
def multiply(m, i, mask):
    target, a, b = i.operands
    m.set(target, product_of(m, wide(m, a), wide(m, b), i), mask)


@instruction("FFMA")
def fused(m, i, mask):
    """The sum is rounded to float64 first, which can differ from the GPU's in the last bit."""
    target, a, b, c = i.operands
    a, b, c = (wide(m, operand) for operand in (a, b, c))
    total = sum_of(m, a * b, c, i)
    m.set(target, np.where(c == 0, product_of(m, a, b, i), total), mask)


@instruction("FMNMX")
def extremum(m, i, mask):
    target, a, b, least = i.operands
    a, b = m.real(a), m.real(b)
    smaller, larger = (np.minimum, np.maximum) if "NAN" in i.modifiers else (np.fmin, np.fmax)
    m.set(target, np.where(m.predicate(least), smaller(a, b), larger(a, b)), mask)


@instruction("FSETP")
def compare(m, i, mask):
    first, second, a, b, condition = i.operands
    a, b = m.real(a), m.real(b)
    name = i.modifiers[0]
    unordered = np.isnan(a) | np.isnan(b)
    result = unordered if name == "NAN" else COMPARE[name[:2]](a, b)
    if name.endswith("U") and len(name) == 3:
        result = result | unordered
    elif name == "NE":
        result = result & ~unordered
    combine = COMBINE[next(word for word in i.modifiers if word in COMBINE)]
    condition = m.predicate(condition)
    m.set_predicate(first, combine(result, condition), mask)
    m.set_predicate(second, combine(~result, condition), mask)


MUFU = {
    "RSQ": lambda x: 1.0 / np.sqrt(x), "RCP": lambda x: 1.0 / x, "EX2": np.exp2,
    "LG2": np.log2, "SQRT": np.sqrt, "TANH": np.tanh,
}  # fmt: skip


@instruction("MUFU")
def special(m, i, mask):
    target, source = i.operands
    with np.errstate(all="ignore"):
        m.set(target, rounded(MUFU[i.modifiers[0]](wide(m, source))), mask)


@instruction("I2FP", "I2F")
def from_integer(m, i, mask):
    target, source = i.operands
    value = m.integer(source)
    exact = (value.view(np.int32) if "S32" in i.modifiers else value).astype(np.float64)
    m.set(target, rounded(exact, i.modifiers), mask)


@instruction("F2I")
def to_integer(m, i, mask):
    target, source = i.operands
    value = np.trunc(wide(m, source)) if "TRUNC" in i.modifiers else None
    if value is None:
        raise NotImplementedError(i.text)
    m.set(target, value.astype(np.int64).astype(np.uint32), mask)


def bfloat16_bits(value: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to the nearest, ties to even."""
    bits = value.view(np.uint32).astype(np.uint64)
    near = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(value), 0x7FFF, near).astype(np.uint32)


@instruction("F2FP")
def pack(m, i, mask):
    target, high, low = i.operands
    if "BF16" in i.modifiers:
        high, low = (bfloat16_bits(m.real(operand)) for operand in (high, low))
    else:
        with np.errstate(over="ignore"):
            high, low = (
                m.real(operand).astype(np.float16).view(np.uint16).astype(np.uint32)
                for operand in (high, low)
            )
    m.set(target, high << np.uint32(16) | low, mask)


def half(m, operand: str) -> np.ndarray:
    """One float16 of a register, as float32; .H1_H1 is the upper one."""
    negative, operand = operand.startswith("-"), operand.lstrip("-")
    name, _, part = operand.partition(".")
    bits = m.word(name, False)
    bits = bits >> np.uint32(16) if part.startswith("H1") else bits & np.uint32(0xFFFF)
    value = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return -value if negative else value


@instruction("HADD2")
def half_to_float(m, i, mask):
    target, zero, source = i.operands
    if "F32" not in i.modifiers or zero != "-RZ":
        raise NotImplementedError(i.text)
    m.set(target, half(m, source), mask)


@instruction("HFMA2")
def constant(m, i, mask):
    """The compiler uses it to make constants: −0 · 0 + (high, low)."""
    target, a, b, high, low = i.operands
    if (a, b) != ("-RZ", "RZ"):
        raise NotImplementedError(i.text)
    bits = [int(np.float16(float(number)).view(np.uint16)) for number in (high, low)]
    m.set(target, np.full(m.threads, bits[0] << 16 | bits[1], np.uint32), mask)
