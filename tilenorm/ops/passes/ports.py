"""The tensors of the passes of a spec: the port of each, with its dtype."""

from collections.abc import Sequence

from ...launch.calls import Needs
from ...row import Port
from ...spec import NormSpec
from ...table import AMAX, TERMS

Tensors = list[tuple[Port, str | None]]
Results = list[tuple[Port, str] | None]
BITS = "int32"  # the kernels compare the bits of the largest magnitude


def taken(spec: NormSpec) -> Tensors:
    """What a forward pass takes; a dtype of None stands for an absent tensor."""
    return [(port, spec.dtype_of(port.role)) for port in spec.row.takes]


def results(spec: NormSpec, save: bool) -> Results:
    """What the kernels of a forward pass write for each result of the op; None for an absent one.
    save: the statistics are among them.
    """
    dtypes = {port.name: dtype for port, dtype in taken(spec)} | {"out_dtype": spec.out_dtype}
    how = spec.quantized
    asked = {"": True, "save": save}
    if how is not None:
        asked |= {"return_output": how.output, "return_amax": how.amax}
        dtypes |= {"dtype": how.dtype, "scale": how.scale_dtype, AMAX.like: BITS}
    written: Results = []
    for port in spec.row.makes:
        absent = not asked[port.when] or dtypes.get(port.unless) is not None
        absent = absent or (port.given != "" and dtypes[port.given] is None)
        dtype = "float32" if port.number else dtypes[port.like]
        written.append(None if absent else (port, dtype or spec.dtype))
    return written


def read(spec: NormSpec, needs: Needs, kernel_reads: Sequence[str] = ()) -> Tensors:
    """What a backward pass takes: dy, dsum, the tensors of `kernel_reads`, and the terms of dy
    behind the first. A dtype of None stands for what is not read.

    kernel_reads: the roles of the tensors that were saved, by default NormSpec.kernel_reads.
    """
    ports = {port.role: port for port in spec.backward.tensors}
    dy, total = spec.y_dtype, spec.residual or spec.dtype
    dtypes = {"x": total, "input": spec.dtype}
    reads_dy, reads_dsum = needs.reads
    tensors: Tensors = [(ports["dy"], dy if reads_dy else None)]
    tensors.append((ports["dsum"], total if reads_dsum else None))
    for role in kernel_reads or spec.kernel_reads:
        port = ports[role]
        dtype = dtypes.get(role) or spec.dtype_of(role)
        if role == "input" and not needs.dmod_gate:  # that gradient alone is made of it
            dtype = None
        tensors.append((port, "float32" if port.number else dtype))
    return tensors + [(port, dy) for port in TERMS[: needs.terms - 1]]


def gradients(spec: NormSpec, needs: Needs) -> Results:
    """What a backward pass writes, in the order of Needs.gradients, and y behind that where it is
    asked for; None for a gradient that is not needed.
    """
    ports = {port.role: port for port in spec.backward.makes}
    roles = (*spec.derived, *["y"] * needs.output)
    written: Results = []
    for role, need in zip(roles, (*needs.gradients, *[True] * needs.output), strict=True):
        dtype = spec.dtype if role in ("x", "y") else getattr(spec, role)
        written.append((ports[role], dtype) if need else None)
    return written
