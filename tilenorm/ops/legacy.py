"""The ops of version 0.2, which exported programs of that version call. Version 0.4 has none.

Each calls the op of the table that does the same, and returns what it returned then.
"""

from functools import partial

import torch
from torch import Tensor

from ..table import FACTORS, NORM, OPS
from .library import LIBRARY, TAGS
from .reference import statistics_dtype

LAST = ("addend", "skip", *FACTORS)
SCHEMAS = {
    "norm": (
        "(Tensor input, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias,"
        f" {NORM}, float eps, bool save, str? backend=None"
        f"{''.join(f', Tensor? {name}=None' for name in LAST)})"
        " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)"
    ),
    "norm_quantized": (
        "(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? addend,"
        " Tensor? given_scale, SymInt hidden, str norm, float offset, str rounding, float eps,"
        " str scaling, ScalarType dtype, bool power_of_2, str layout, bool return_output,"
        " bool return_amax, bool save, str? backend=None) -> (Tensor q, Tensor scale, Tensor amax,"
        " Tensor output, Tensor sum, Tensor mean, Tensor rstd)"
    ),
    "norm_add_norm": (
        "(Tensor input, Tensor residual, Tensor? weight, Tensor? next_weight,"
        " SymInt hidden, float offset, str rounding, float eps, float next_eps, bool save,"
        " str? backend=None) -> (Tensor output, Tensor sum, Tensor rstd, Tensor next_rstd)"
    ),
}


def run(name: str, *arguments) -> tuple[Tensor, ...]:
    """An op of then, with an empty tensor for a sum and a mean that the op of now does not make."""
    schema = getattr(torch.ops.tilenorm, name).default._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= zip(given, arguments, strict=False)
    there = [role for role in ("residual", "gate", "skip") if given.get(role) is not None]
    before = "add_" if "residual" in there else "gated_" if "gate" in there else ""
    after = "_quantized" if name == "norm_quantized" else "_add" if "skip" in there else ""
    if "skip" in there:
        given["residual"] = given["skip"]
    given["norm_before_gate"] = not given.get("gate_first")
    chain = name == "norm_add_norm"
    now = "rms_norm_add_rms_norm" if chain else f"{before}{given['norm']}_norm{after}"
    op, x = OPS[now], given["input"]
    made = getattr(torch.ops.tilenorm, now)(*[given[argument] for argument in op.arguments])
    dtype = statistics_dtype(x, given["residual"])
    found = {"residual_out": x.new_empty(0), "mean": x.new_empty(0, dtype=dtype)}
    found |= zip([port.name for port in op.makes], made, strict=True)
    returned = [result.name for result in schema.returns]
    return tuple([found["residual_out" if name == "sum" else name] for name in returned])


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(f"{_name}{_schema}", tags=TAGS)
    LIBRARY.impl(_name, partial(run, _name), "CompositeImplicitAutograd")
