"""Zeros that the compiler cannot see through. They keep it from moving or merging operations."""

import cuda.tile as ct


def opaque_zero(count):
    """0.0, made from the sign of a count. The compiler does not know that no count is negative."""
    return ct.astype(count >> 31, ct.float32)


def dependent_zero(number, dtype):
    """An integer 0 that the compiler cannot have before it has `number`.

    1 / √number² is never negative, which the compiler does not know.
    """
    return (ct.rsqrt(number * number) < 0.0).astype(dtype)


def rematerialize(tile, number):
    """A 16-bit tile with the same values, which the compiler converts anew after `number`.

    Without this the compiler would convert the tile once, and keep it as float32, in twice the
    registers, over the sum that makes the number.
    """
    return ct.bitcast(ct.bitcast(tile, ct.int16) ^ dependent_zero(number, ct.int16), tile.dtype)


def depend_on(tile, w, number):
    """A tile with the same values, which the compiler can use only after it has read w.

    Without this the compiler would read a weight where the tile is normalised, and the block would
    wait for memory a second time, after the sum.
    """
    bits = ct.int32 if w.dtype == ct.float32 else ct.int16
    zero = ct.bitcast(w, bits) & dependent_zero(number, bits)
    bits = ct.int32 if tile.dtype == ct.float32 else ct.int16
    return ct.bitcast(ct.bitcast(tile, bits) | zero.astype(bits), tile.dtype)
