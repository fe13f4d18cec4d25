"""A matrix, or its normalised rows, transposed and quantised, by the reference.

It takes a spec of which `quantized` names the dtype of q. saved: x, of any shape whose
rows have spec.hidden elements, with weight, bias, mean and rstd. Without rstd it is x itself that
is transposed, else its normalised rows, rounded as the forward pass rounds them. eps: that of the
norm.

It returns q (N, P) and scale (N, P / 128), float32 with strides (1, N), for x of M rows of N; P is
M rounded up to a multiple of 128. The elements [n, 128 g : 128 (g + 1)] of q share scale[n, g]. q
has zeros where there is no row.
"""

from torch import Tensor

from ...launch.scales import padded
from ...spec import NormSpec, Quantization
from .. import reference as norms
from ..tensors import Saved, Tensors
from . import reference as quantized

BLOCKS = Quantization("block", layout="column")


def reference(spec: NormSpec, saved: Saved, eps: float) -> tuple[Tensor, Tensor]:
    x, gate, weight, bias, _, rstd = saved
    if rstd is not None:
        x = norms.forward(spec.unquantized, Tensors(x, None, gate, weight, bias), eps)[0]
    x = x.reshape(-1, spec.hidden)
    rows = x.new_zeros(spec.hidden, padded(x.shape[0]))
    rows[:, : x.shape[0]] = x.t()
    how = BLOCKS._replace(dtype=spec.quantized.dtype)
    q, scale, _ = quantized.quantize(
        NormSpec("rms", rows.shape[1], spec.dtype, quantized=how), rows
    )
    return q, scale
