"""The function that users call for queries and keys: RMSNorm and a rotation of each head."""

from collections.abc import Sequence

from torch import Tensor

from .arguments import check_option, heads_last
from .call import call


def rms_norm_rope(
    input: Tensor,
    normalized_shape: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    key: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    heads_first: bool = False,
    output_heads_first: bool | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of the heads of queries, and of keys, and rotary embedding of each head, in one pass.

        n = rms_norm(x, weight + offset)
        y1, y2 = n1 · cos − n2 · sin, n2 · cos' + n1 · sin'        for each pair of elements

    after Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), with
    the norm of queries and keys of Henry et al., "Query-Key Normalization for Transformers" (2020).
    Computed in float32 (float64 for a float64 input) and rounded once.

    Args:
        input: the queries, (...tokens, H, D), or (B, H, S, D) with heads_first; float16, bfloat16,
            float32 or float64. Views of a packed projection are read in place.
        normalized_shape: (D,) for a norm of each head, or (H, D) for one of all heads of a token.
        cos, sin: one row for each token: (...tokens, R), or what broadcasts to that, such as
            (S, R) and (1, S, R) for tokens (B, S). R is rotary_dim, or rotary_dim / 2 where both
            elements of a pair have one angle. In float32, the input's dtype or another
            floating-point dtype. With positions, (max_positions, R). They have no gradient.
        weight: of shape normalized_shape, in the input's dtype or another floating-point dtype.
        eps: as that of tilenorm.rms_norm.
        key: the keys of the same tokens, in the input's dtype, with as many heads as they have. For
            them the same is done, with key_weight, (D,) or (heads of the key, D).
        positions: int32 or int64, of the tokens' shape or what broadcasts to it: each token's row
            in cos and sin. The kernels read what is there for one that is out of range or negative;
            TILENORM_DEBUG=1 checks them in eager calls, and waits for the GPU to do so. On the CPU
            every call checks them.
        rotary_dim: how many elements of a head are rotated, the first ones; None for all. The
            others are normalised alone.
        interleaved: elements 2 i and 2 i + 1 are a pair, else i and i + rotary_dim / 2. Columns of
            tables of rotary_dim stand as the elements do.
        heads_first: input and key are (B, H, S, D).
        output_heads_first: the outputs are (B, H, S, D), of (B, S, H, D); None for what the input
            is.
        offset: as that of tilenorm.rms_norm.
        rounding: "late" rounds once. "early" gives the bits of Hugging Face's models, in which all
            tensors have one dtype: to the input's are rounded the norm, its product with a weight
            of that dtype, and each product and each sum of the rotation.
        backend: as that of tilenorm.rms_norm. The kernels take heads of up to 512 elements, and up
            to 8192 elements that are normalised together.

    Returns:
        The rotated queries, contiguous, in the input's dtype; with a key (queries, keys).
        Differentiable in input, key and their weights, to any order. The gradients of the weights
        are sums over tokens, and heads, in float32 in one order. torch.func's transforms and
        forward-mode derivatives run the reference. Under torch.autocast as tilenorm.rms_norm.

    Raises:
        RuntimeError: a shape that does not fit, a key of another dtype than the input's, cos or sin
            that requires a gradient.
        ValueError: an odd rotary_dim or one beyond D, tables of other columns, a key_weight without
            a key, one weight of two, heads first without four dimensions.
        NotImplementedError: nested tensors, DTensors that are cut in a normalised dimension, and
            positions that are no int32 or int64.
        IndexError: positions out of range, on the CPU or with TILENORM_DEBUG=1.
        The others are those of tilenorm.rms_norm.
    """
    first = heads_first if output_heads_first is None else output_heads_first
    if heads_first is not False:
        check_option("rms_norm_rope", "heads_first", heads_first)
        input, key = heads_last("input", input), heads_last("key", key)
    tensors = input, cos, sin, weight, key, key_weight, positions
    asked = rotary_dim, interleaved, first, offset, rounding
    results = call("rms_norm_rope", tensors, normalized_shape, eps, asked, backend)
    return results[0] if key is None else results[:2]
