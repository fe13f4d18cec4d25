"""A matrix, or its normalised rows, transposed and quantised: by the kernel, and by the reference.

Both functions take a spec of which `quantized` names the dtype of q. saved: x, of any shape whose
rows have spec.hidden elements, with weight, bias, mean and rstd. Without rstd it is x itself that
is transposed, else its normalised rows, rounded as the forward pass rounds them. eps: that of the
norm, which the kernel does not need.

They return q (N, P) and scale (N, P / 128), float32 with strides (1, N), for x of M rows of N; P is
M rounded up to a multiple of 128. The elements [n, 128 g : 128 (g + 1)] of q share scale[n, g]. q
has zeros where there is no row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...launch.calls import ABSENT
from ...launch.scales import Scales
from ...launch.target import Target
from ...launch.transposed import TransposedArrays, padded, transposed_launches
from ...spec import NormSpec, Quantization
from .. import reference as norms
from ..cutile import Run, fresh, on_device
from ..layout import parameter_of, rows_of
from ..tensors import Saved, Tensors
from . import reference as quantized
from .tensors import q_dtype, scale_of

BLOCKS = Quantization("block", layout="column")


def cutile(
    spec: NormSpec, target: Target, saved: Saved, eps: float, run: Run = on_device
) -> tuple[Tensor, Tensor]:
    x, _, weight, bias, mean, rstd = saved
    rows = x.numel() // spec.hidden
    scales = Scales.of(BLOCKS, padded(rows), spec.hidden)
    q = fresh(x, (spec.hidden, padded(rows)), q_dtype(spec))
    array = fresh(x, (scales.count,), torch.float32)
    if rows:
        normalized = rstd is not None
        arrays = TransposedArrays(
            x=rows_of(x, spec),
            weight=ABSENT if weight is None else parameter_of(weight, spec),
            bias=ABSENT if bias is None else parameter_of(bias, spec),
            mean=ABSENT if mean is None else mean.reshape(-1),
            rstd=rstd.reshape(-1) if normalized else ABSENT,
            q=q,
            scale=array,
        )
        run(transposed_launches(spec, target, rows, normalized), arrays, x.get_device())
    return q, scale_of(array, scales)


def reference(spec: NormSpec, saved: Saved, eps: float) -> tuple[Tensor, Tensor]:
    x, gate, weight, bias, _, rstd = saved
    if rstd is not None:
        x = norms.forward(spec.unquantized, Tensors(x, None, gate, weight, bias), eps)[0]
    x = x.reshape(-1, spec.hidden)
    rows = pad(x.t(), (0, padded(x.shape[0]) - x.shape[0])).contiguous()
    how = BLOCKS._replace(dtype=spec.quantized.dtype)
    q, scale, _ = quantized.quantize(
        NormSpec("rms", rows.shape[1], spec.dtype, quantized=how), rows
    )
    return q, scale
