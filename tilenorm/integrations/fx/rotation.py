"""The rotary embedding behind the norm of queries or keys, in graphs.

    q = norm(x), with heads before or behind tokens
    q · cos + rotate_half(q) · sin          rotate_half(q) = cat(−q[…, D/2:], q[…, :D/2])

cos and sin have a row for each token, with a size of 1 for the heads.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import Node

from .nodes import (
    DTYPES_16_BIT,
    Left,
    argument_of,
    bind,
    cast_input,
    constant_of,
    in_turn,
    item_of,
    name_of,
    only_user,
    operands_of,
    users_of,
    value_of,
)
from .norms import PARAMETER_DTYPES, Norm, Rotation, check_tensors, known, same_sizes

# Between a norm and its rotation: a dimension of heads, and heads in front of tokens.
SWAPS = ("transpose", "permute", "swapaxes", "swapdims")
VIEWS = ("view", "reshape", "_unsafe_view", *SWAPS)
SWAPPED = "its heads and tokens are neither in order nor swapped"


def rotated(norm: Norm) -> Norm:
    """RMSNorm with the rotary embedding behind it, or the same norm if there is none.

    The norm is that of each head, or of all heads of a token. Where no op of tilenorm's computes
    both, the norm tells the reason.
    """
    y = norm.outputs.get("output")
    plain = norm.kind == "rms_norm" and norm.dims == 1 and norm.bias is None
    if not plain or y is None or any(n.users for n in norm.outputs.values() if n is not y):
        return norm
    path = [y]
    while (user := only_user(path[-1])) is not None and name_of(user) in VIEWS:
        path.append(user)
    end = path[-1]
    try:
        embedding = _embedding(path[-1])
        if embedding is None:
            return norm
        end = embedding[0]
        return _with_rotation(norm, path, *embedding)
    except Left as reason:
        return replace(norm, apart=(end.name, f"it stays behind its norm: {reason}"))


def _embedding(q: Node) -> tuple[Node, Node, Node, tuple[Node, ...]] | None:
    """The last node of a rotation of q, cos and sin beside q, and the nodes; None if q has none."""
    for product in users_of(q):
        end = only_user(product)
        for a, b in in_turn(operands_of("add", end)):
            for one, cos in in_turn(operands_of("mul", a)):
                for half, sin in in_turn(operands_of("mul", b)):
                    nodes = _rotate_half(half, q)
                    tables = isinstance(cos, Node) and isinstance(sin, Node)
                    if one is q and nodes and tables and end is not None:
                        return end, cos, sin, (a, b, *nodes)
    return None


def _rotate_half(node: object, q: Node) -> tuple[Node, ...]:
    """The nodes that compute cat(−q[…, D/2:], q[…, :D/2]), or ()."""
    if not isinstance(node, Node) or name_of(node) not in ("cat", "concat", "concatenate"):
        return ()
    parts, size = argument_of(node), constant_of(known(q).shape[-1])
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(parts, tuple | list) or size is None or dim not in (-1, known(q).dim() - 1):
        return ()
    match parts:
        case [Node() as negative, Node() as first] if name_of(negative) == "neg":
            second, half = argument_of(negative), size // 2
            if _is_slice(second, q, half, size) and _is_slice(first, q, 0, half):
                return node, negative, second, first
    return ()


def _is_slice(node: object, q: Node, first: float, last: float) -> bool:
    """Whether a node is q[..., first:last]."""
    value, size = value_of(node), known(q).shape[-1]
    if not isinstance(node, Node) or value is None or argument_of(node) is not q:
        return False
    if name_of(node) == "slice":
        args = bind(node)
        before, index = [...], slice(args["start"], None, args["step"])
        is_last = args["dim"] in (-1, value.dim() - 1)
    else:
        parts = item_of(node)[1]
        *before, index = parts if isinstance(parts, tuple) and parts else (None,)
        is_last = ... in before or len(before) == value.dim() - 1
    whole = is_last and all(part in (..., slice(None)) for part in before)
    if not whole or not isinstance(index, slice) or constant_of(index.step or 1) != 1:
        return False
    start, width = constant_of(index.start or 0), constant_of(value.shape[-1])
    return start in (first, first - size) and width == last - first


def _with_rotation(norm: Norm, path: list[Node], end: Node, cos: Node, sin: Node, nodes) -> Norm:
    """The norm with its rotation. path: from its output to q. nodes: those up to `end`.

    Raises Left if no op of tilenorm's computes both.
    """
    x, q, rows = known(norm.x), path[-1], end
    check_tensors(norm.tensors, norm.dims, norm.options)
    if norm.weight is not None and known(norm.weight).dim() > 1:
        raise Left("its weight is by heads")
    if (cast := only_user(end)) is not None and cast_input(cast) is end:
        rows = cast if known(end).dtype != x.dtype else end
    swapped = _swapped(path)
    heads = _heads(known(q), known(cos), known(sin))
    if heads != 1 if swapped else heads == 1 and x.dim() == 3:
        raise Left(SWAPPED)
    inside = {*nodes, end, rows, *path[1:]}
    if any(user not in inside for node in (*path, *inside - {rows}) for user in users_of(node)):
        raise Left("other nodes use its intermediate results")
    for node in (cos, sin):
        table = known(node)
        if table.dtype not in PARAMETER_DTYPES or table.device != x.device or table.requires_grad:
            raise Left(f"{node.name} is a {table.dtype} on {table.device}, or needs a gradient")
    y = known(rows)
    before = y.transpose(1, 2) if heads == 1 else y
    if y.dtype != x.dtype or not (y.is_contiguous() or before.is_contiguous()):
        raise Left(f"its result is {y.dtype} with strides {y.stride()}")
    rotation = Rotation(
        _table(cos, heads), _table(sin, heads), heads, swapped, not before.is_contiguous()
    )
    parts = tuple(sorted({*norm.parts, norm.at, *inside}))
    rounding = _rounding(norm, (end, *nodes, path[0]))
    options = norm.options._replace(rounding=rounding)
    how = {"options": options, "outputs": {"output": rows}, "at": rows, "parts": parts}
    return replace(norm, rotation=rotation, **how)


def _swapped(path: list[Node]) -> bool:
    """Whether the views from a norm's output to q swap heads and tokens. They may also give heads
    a dimension.
    """
    swapped = False
    for source, node in pairwise(path):
        before, value = known(source), known(node)
        if value.dim() == 4 and before.dim() == 3 and same_sizes(value.shape[:2], before.shape[:2]):
            continue
        if swapped or name_of(node) not in SWAPS or before.dim() != 4:
            raise Left(SWAPPED)
        swap, swapped = before.transpose(1, 2), True
        if not same_sizes((*value.shape, *value.stride()), (*swap.shape, *swap.stride())):
            raise Left(SWAPPED)
    if known(path[-1]).dim() != 4:
        raise Left("it has no dimensions of samples, heads and tokens")
    return swapped


def _heads(q: Tensor, *tables: Tensor) -> int:
    """The dimension of q's heads: that along which the tables are repeated."""
    for heads in (1, 2):
        rest = *q.shape[1:heads], 1, *q.shape[heads + 1 :]
        fitting = [(batch, *rest) for batch in (1, q.shape[0])]
        if all(any(same_sizes(table.shape, shape) for shape in fitting) for table in tables):
            return heads
    shapes = [list(table.shape) for table in tables]
    raise Left(f"its cos and sin are {shapes}, its heads {list(q.shape)}")


def _table(node: Node, heads: int) -> Node:
    """cos or sin before it got a dimension of heads; the same node if it had it from the start."""
    source: Any = argument_of(node)
    if name_of(node) == "unsqueeze" and value_of(source) is not None:
        shape = [n for i, n in enumerate(known(node).shape) if i != heads]
        if same_sizes(value_of(source).shape, shape):
            return source
    return node


def _rounding(norm: Norm, nodes: tuple[Node, ...]) -> str:
    """The rounding of tilenorm's op: that of the nodes, if the op does not round once.

    nodes: of the norm's output and of the rotation. Raises Left if none is the same.
    """
    dtypes = {known(node).dtype for node in nodes}
    if not dtypes & set(DTYPES_16_BIT):
        return "late"
    weight = None if norm.weight is None else known(norm.weight).dtype
    early = norm.options.rounding == "early" and weight == known(norm.x).dtype
    if len(dtypes) == 1 and (weight is None or early):
        return "early"
    if norm.rounds_once:
        return "late"
    raise Left("it rounds to 16 bits where tilenorm's op does not")
