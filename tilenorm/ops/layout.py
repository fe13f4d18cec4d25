"""Tensors as the kernels take them: rows in place where that keeps a row's bits, else one copy."""

from torch import Tensor

VECTOR_BYTES = 16
MAX_STRIDE = 2**31  # kernels hold extents and strides in 32 bits


def rows_of(x: Tensor, hidden: int, aligned: bool, leading: int) -> Tensor:
    """x as (..., hidden) with at most `leading` leading dimensions and a last stride of 1.

    In place if the normalised dimensions are contiguous, the leading ones collapse to so few, and,
    when `aligned`, every row starts on 16 bytes. A row that does not would be read in narrower
    pieces and summed in another order, so it is copied: the same bits come first.
    """
    if x.is_contiguous():
        view = matrix_of(x, hidden)
        return view.clone() if aligned and x.data_ptr() % VECTOR_BYTES else view
    strided = _collapse(x, hidden)
    if strided is None or len(strided[0]) > leading:
        return x.reshape(-1, hidden).contiguous()
    shape, strides = strided
    unit = VECTOR_BYTES // x.element_size()
    if aligned and (x.data_ptr() % VECTOR_BYTES or any(s % unit for s in strides)):
        return x.reshape(-1, hidden).contiguous()
    return x.as_strided((*shape, hidden), (*strides, 1))


def vector_of(w: Tensor, aligned: bool) -> Tensor:
    """A weight or bias as a contiguous vector; copied if, when `aligned`, not on 16 bytes."""
    vector = flat(w)
    return vector.clone() if aligned and vector.data_ptr() % VECTOR_BYTES else vector


def matrix_of(x: Tensor, hidden: int) -> Tensor:
    """A contiguous x as (rows, hidden)."""
    # A single row may have any stride, and the compiler reads by what the stride is.
    if x.dim() == 2 and x.shape[1] == hidden == x.stride(0):
        return x
    return x.as_strided((x.numel() // hidden, hidden), (hidden, 1))


def flat(w: Tensor) -> Tensor:
    """w as a contiguous vector, copied only if it is not one."""
    return w if w.dim() == 1 and w.is_contiguous() else w.reshape(-1).contiguous()


def _collapse(x: Tensor, hidden: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of the leading dimensions, merged; None if the kernels cannot read x."""
    dims = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]
    inner = 1
    while inner < hidden:
        extent, stride = dims.pop()
        if stride != inner:
            return None
        inner *= extent
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if merged and merged[-1][1] == extent * stride:
            extent *= merged.pop()[0]
        merged.append((extent, stride))
    if not merged:
        return [1], [hidden]
    shape, strides = map(list, zip(*merged, strict=True))
    if not 0 < min(strides) <= max(strides) < MAX_STRIDE:
        return None
    return shape, strides
