"""Draws specs. Every function takes a random.Random, so that a seed decides."""

import math
from dataclasses import replace
from random import Random

from tilenorm.spec import DIGITS, NormSpec
from tilenorm.table import MODULATED_NORMS, OPS, OPTIONS

DTYPES = ("bfloat16", "float16", "float32")
HEADS = (2, 3, 4, 5, 8)
WIDEST_OF_HEADS = 4096  # wider rows have at most two heads


def spec(rng: Random, op: str, dtype: str, hidden: int) -> NormSpec:
    """A spec of an op, a dtype and a size. The other fields are drawn."""

    def some(*absent: None) -> str | None:
        """None, as often as it is given, the dtype of the input, or any other."""
        return rng.choice((*absent, dtype, dtype, *DTYPES))

    weight, bias = some(None), some(None, None, None, None)
    if op in MODULATED_NORMS:
        fields = {"mod_scale": some(), "mod_shift": some(None), "residual": some(None)}
        fields["mod_gate"] = fields["residual"] and some(None)
        return NormSpec.of(op, hidden, dtype, weight=weight, bias=bias, **fields)
    fields = {"weight": weight, "bias": bias, "offset": rng.choice((0.0, 0.0, 1.0))}
    if weight is None:
        del fields["offset"]  # is added to nothing
    if op.endswith("_add"):
        fields["skip"] = some()
    elif op.startswith("add_"):
        fields["residual"] = some()
        before = rng.randint(0, 7)
        if before < 2:
            fields["addend"] = rng.choice((dtype, fields["residual"]))
        elif before < 4 and not op.endswith("_quantized"):
            fields["layer_scale"] = some(None)
            if DIGITS[fields["residual"]] < DIGITS[dtype]:
                fields["layer_scale"] = None
            if before == 2 or fields["layer_scale"] is None:
                fields |= {"dropout_mask": "bool", "dropout_scale": rng.choice((1.0, 1 / 0.9, 2.0))}
    elif op.startswith("gated_"):
        fields["gate"] = some()
        fields["gate_first"] = rng.choice((False, True))
        fields["activation"] = rng.choice(OPTIONS["activation"].words)
    if (weight or bias) and rng.randint(0, 5) == 5:
        fields["heads"] = rng.choice(HEADS) if hidden <= WIDEST_OF_HEADS else 2
    fields["rounding"] = rng.choice((*["late"] * 4, "early"))
    spec = NormSpec.of(op, hidden, dtype, **fields)
    apart = Random(str(spec))  # so that what is drawn behind it stays what it was
    if "out_dtype" in OPS[op].options and apart.randint(0, 3) == 3:
        return replace(spec, out_dtype=apart.choice([other for other in DTYPES if other != dtype]))
    return spec


def size(rng: Random, most: int) -> int:
    """A size of at most `most`. Each power of two has somewhat fewer sizes than the one below."""
    exponent = math.log2(most) * rng.random() ** 1.3
    return max(1, min(most, round(2**exponent)))


def hidden(rng: Random, most: int) -> int:
    """A power of two, a multiple of eight, or an odd number."""
    near = size(rng, most)
    kind = rng.choice(("power", "eights", "eights", "odd"))
    if kind == "power":
        return 1 << (near.bit_length() - 1)
    return near - near % 8 or 8 if kind == "eights" else near - 1 + near % 2 or 1
