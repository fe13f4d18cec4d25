"""The instructions that quantise: maxima of packed numbers, 8-bit floats, the check of a division,
and the maximum in memory."""

import numpy as np
import torch

from .floats import bfloat16_bits, pack
from .instructions import instruction

FP8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def halves(m, operand: str, brain: bool) -> tuple[np.ndarray, np.ndarray]:
    """The two 16-bit floats of a register, or one of them twice, as float32."""
    name, _, part = operand.partition(".")
    bits = m.word(name.strip("-|"), False)
    pair = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    pair = {"H0_H0": pair[:1] * 2, "H1_H1": pair[1:] * 2}.get(part.strip("|"), pair)
    found = []
    for half in pair:
        if brain:
            value = (half << np.uint32(16)).view(np.float32)
        else:
            value = half.astype(np.uint16).view(np.float16).astype(np.float32)
        value = np.abs(value) if "|" in operand else value
        found.append(-value if operand.startswith("-") else value)
    return tuple(found)


@instruction("HMNMX2", "VHMNMX")
def packed_extremum(m, i, mask):
    """The largest or smallest of two or three pairs of numbers."""
    target, *sources, least = i.operands
    if "NAN" not in i.modifiers:
        raise NotImplementedError(i.text)
    brain, least = "BF16_V2" in i.modifiers, m.predicate(least)
    results = []
    for numbers in zip(*(halves(m, operand, brain) for operand in sources), strict=True):
        found = numbers[0]
        for other in numbers[1:]:
            found = np.where(least, np.minimum(found, other), np.maximum(found, other))
        if brain:
            results.append(bfloat16_bits(found))
        else:
            results.append(found.astype(np.float16).view(np.uint16).astype(np.uint32))
    m.set(target, results[1] << np.uint32(16) | results[0], mask)


@instruction("F2FP")
def pack_eights(m, i, mask):
    """Two float32 to 8 bits each, which saturate, above the lower half of the last operand."""
    name = next((word for word in i.modifiers if word in FP8), None)
    if name is None:
        return pack(m, i, mask)
    if not {"SATFINITE", "PACK_AB_MERGE_C"} <= set(i.modifiers):
        raise NotImplementedError(i.text)
    target, high, low, merged = i.operands
    most, bits = torch.finfo(FP8[name]).max, []
    for operand in (high, low):
        value = torch.from_numpy(m.real(operand).copy()).clamp(-most, most).to(FP8[name])
        bits.append(value.view(torch.uint8).numpy().astype(np.uint32))
    pair = bits[0] << np.uint32(8) | bits[1]
    # The pair comes into the lower half, and what was there moves up.
    m.set(target, m.word(merged, False) << np.uint32(16) | pair, mask)


@instruction("FCHK")
def needs_care(m, i, mask):
    """Whether a / b may leave the range in which the steps of a division are exact."""
    target, a, b = i.operands
    a, b = m.real(a), m.real(b)
    with np.errstate(all="ignore"):
        exponents = [np.log2(np.abs(x.astype(np.float64))) for x in (a, b)]
        quotient = exponents[0] - exponents[1]
        safe = (abs(exponents[1]) < 125) & (abs(quotient) < 125) & (exponents[0] > -100)
    m.set_predicate(target, ~(safe & np.isfinite(a) & np.isfinite(b)), mask)


@instruction("ATOMG", "REDG")
def maximum_in_memory(m, i, mask):
    """The threads take turns."""
    if not {"MAX", "S32"} <= set(i.modifiers):
        raise NotImplementedError(i.text)
    *_, place, source = i.operands if i.name == "REDG" else i.operands[1:]
    addresses, values = m.address(place), m.integer(source).view(np.int32)
    for thread in np.flatnonzero(mask):
        one = np.arange(m.threads) == thread
        old = m.read("global", addresses, 4, one)[thread].view(np.int32)[0]
        new = np.full(m.threads, max(old, values[thread]), np.int32)
        m.write("global", addresses, new.view(np.uint8).reshape(-1, 4), one)
