"""The ops of version 0.2, which exported programs of that version call. Version 0.4 has none.

Each calls the op of the table that does the same, and returns what it returned then.
"""

import torch
from torch import Tensor

from ..table import FACTORS, OPS
from .library import LIBRARY, TAGS
from .norm_backward import OPTIONS
from .reference import statistics_dtype

LAST = ("addend", "skip", *FACTORS)
LIBRARY.define(
    "norm(Tensor input, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias,"
    f" {OPTIONS}, float eps, bool save, str? backend=None"
    f"{''.join(f', Tensor? {name}=None' for name in LAST)})"
    " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=TAGS,
)
LIBRARY.define(
    "norm_quantized(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? addend,"
    " Tensor? given_scale, SymInt hidden, str norm, float offset, str rounding, float eps,"
    " str scaling, ScalarType dtype, bool power_of_2, str layout, bool return_output,"
    " bool return_amax, bool save, str? backend=None) -> (Tensor q, Tensor scale, Tensor amax,"
    " Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=TAGS,
)
LIBRARY.define(
    "norm_add_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? next_weight,"
    " SymInt hidden, float offset, str rounding, float eps, float next_eps, bool save,"
    " str? backend=None) -> (Tensor output, Tensor sum, Tensor rstd, Tensor next_rstd)",
    tags=TAGS,
)


def _called(name: str, given: dict, options: dict, eps: tuple, save: bool, backend) -> dict:
    """What the op of that name makes, by the names of its results, with an empty tensor for a sum
    and a mean that it does not have.
    """
    op, x, hidden = OPS[name], given["input"], options["hidden"]
    tensors = [given[port.name] for port in op.takes]
    asked = [options[option] for option in op.options]
    made = getattr(torch.ops.tilenorm, name)(*tensors, hidden, *asked, *eps, save, backend)
    found = dict(zip([port.name for port in op.makes], made, strict=True))
    dtype = statistics_dtype(x, given.get("residual"))
    absent = {"residual_out": x.new_empty(0), "mean": x.new_empty(0, dtype=dtype)}
    return absent | found


def norm(
    input, residual, gate, weight, bias, hidden, norm, offset, gate_first, rounding, activation,
    dropout_scale, eps, save, backend=None, *others,
) -> tuple[Tensor, ...]:  # fmt: skip
    last = dict(zip(LAST, (*others, *[None] * len(LAST)), strict=False))
    skip = last.pop("skip")
    before = "add_" if residual is not None else "gated_" if gate is not None else ""
    name = f"{before}{norm}_norm{'_add' if skip is not None else ''}"
    given = {"input": input, "gate": gate, "weight": weight, "bias": bias, **last}
    given["residual"] = residual if skip is None else skip
    options = {"hidden": hidden, "offset": offset, "rounding": rounding, "activation": activation}
    options |= {"norm_before_gate": not gate_first, "dropout_scale": dropout_scale}
    found = _called(name, given, options, (eps,), save, backend)
    return tuple(found[port] for port in ("output", "residual_out", "mean", "rstd"))


def norm_quantized(
    input, residual, weight, bias, addend, given_scale, hidden, norm, offset, rounding, eps,
    scaling, dtype, power_of_2, layout, return_output, return_amax, save, backend=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    name = f"{'' if residual is None else 'add_'}{norm}_norm_quantized"
    given = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    given |= {"addend": addend, "given_scale": given_scale}
    options = {"hidden": hidden, "offset": offset, "rounding": rounding, "scaling": scaling}
    options |= {"dtype": dtype, "power_of_2": power_of_2, "layout": layout}
    options |= {"return_output": return_output, "return_amax": return_amax}
    found = _called(name, given, options, (eps,), save, backend)
    names = ("q", "scale", "amax", "output", "residual_out", "mean", "rstd")
    return tuple(found[port] for port in names)


def norm_add_norm(
    input, residual, weight, next_weight, hidden, offset, rounding, eps, next_eps, save,
    backend=None,
) -> tuple[Tensor, ...]:  # fmt: skip
    last = hidden, offset, rounding, eps, next_eps, save, backend
    op = torch.ops.tilenorm.rms_norm_add_rms_norm
    return op(input, residual, weight, next_weight, *last)


for _function in (norm, norm_quantized, norm_add_norm):
    LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")
