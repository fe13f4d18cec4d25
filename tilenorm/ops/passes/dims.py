"""What the dimensions of a port mean: whether a tensor fits, shapes, views, shards and bytes.

A port's dimensions are words. A word names some sizes of a call:

    ...       the leading sizes of the rows         n        normalized_shape
    [h]       sizes before n, or nothing            g        leading sizes; the last may divide
    t         the leading sizes of heads            t?       what broadcasts to them
    k, d, r   a key's heads; elements of a head,    p        the rows of a table with positions
              columns of a table
    (...)     how many rows                         n/group  the scales of a row

"+" before the first word: the tensor adds up over the dimensions of the input that it lacks. The
rows of a port with `of` are those of that tensor.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ...row import Port
from ...table import BACKWARD, OPS
from ..pytorch.sizes import divides, holds, known, same

Shape = tuple[int, ...]
# The words of each port. A table, because Dynamo, which traces checks, warns of memoised functions.
_ROWS = (*OPS.values(), *BACKWARD.values())
_PORTS = [port for row in _ROWS for port in (*row.tensors, *row.makes)]
WORDS = {
    dims: tuple(dims.lstrip("+").split())
    for dims in {dims for port in _PORTS for dims in (port.dims, port.indexed)}
}
ANY = ("k", "r")  # words of any size
EXACT = ("... n", "n", "[h] n")  # what most tensors are; so checks compare these first
COLUMNS = "rotary_dim or rotary_dim / 2 columns, {} or {}"
TAKES = {
    "... n": "the input's shape {x}",
    "n": "the shape of normalized_shape {n}",
    "n of key": "the shape {n}",
    "[h] n": "the shape of normalized_shape {n}{or_heads}",
    "g n": "leading sizes of the input's {lead}, of which the last may be a divisor, and then"
    " normalized_shape {n}",
    "t k d": "the input's shape {x} but for the heads",
    "t? r": "rows that broadcast to the tokens {t}",
    "p r": "two dimensions with positions",
    "t?": "what broadcasts to the tokens {t}",
}


class Shaped(NamedTuple):
    """What is known of a tensor that there is not."""

    shape: Shape
    strides: Shape = ()


class Misfit(NamedTuple):
    """What an argument takes that it is not, and the exception to raise."""

    takes: str
    kind: type[Exception] = RuntimeError


class Sizes(NamedTuple):
    """The sizes of a call."""

    words: dict[str, Shape]  # the sizes of each word
    lead: int  # how many dimensions of the input come before a row
    key: "Sizes | None" = None  # the same where the rows are a key's
    columns: tuple[int, ...] = ()  # that tables may have
    indexed: bool = False  # there are positions
    swapped: bool = False  # ports with `swapped` have heads before tokens

    def of(self, port: Port) -> "Sizes":
        return (self.key or self) if port.of == "key" else self

    def dims(self, port: Port) -> str:
        return port.indexed if self.indexed and port.indexed else port.dims


def sizes_of(tensors: Mapping[str, Any], dims: int, columns: tuple[int, ...] = ()) -> Sizes:
    """The sizes of a call.

    tensors: those of the call by name, of which `shape` is read. dims: how many dimensions are
    normalised. columns: how many columns tables may have.
    """
    x = tuple(tensors["input"].shape)
    lead = len(x) - dims
    words = _rows(x, dims)
    scale = tensors.get("scale")
    if scale is not None:
        words["g"] = tuple(scale.shape[: max(0, len(scale.shape) - dims)])
    cos = tensors.get("cos")
    if cos is None:
        return Sizes(words, lead)
    words |= {"t": x[:-2], "d": x[-1:], "r": tuple(cos.shape[-1:])}
    words["p"] = words["t?"] = tuple(cos.shape[:-1])
    positions = tensors.get("positions")
    if positions is not None:
        words["t?"] = tuple(positions.shape)
    of_key = None
    key = tensors.get("key")
    if key is not None:
        words["k"] = tuple(key.shape[-2:-1])
        rows = words | _rows(tuple(key.shape), dims)
        of_key = Sizes(rows, lead, None, (), positions is not None)
    return Sizes(words, lead, of_key, columns, positions is not None)


def _rows(shape: Shape, dims: int) -> dict[str, Shape]:
    """The sizes of rows, also by what most tensors are."""
    lead = len(shape) - dims
    n = shape[lead:]
    return {"...": shape[:lead], "n": n, "... n": shape, "[h] n": n}


def rows_shape(shape: Sequence[int], hidden: int) -> Shape:
    """The leading sizes of a tensor whose rows have `hidden` elements: the shape of the statistics.

    The rows take the fewest trailing dimensions that hold `hidden` elements. A shard of a tensor
    whose leading dimensions are cut has as many of them as the whole tensor. Rows of no elements
    have no statistics, and the shape is (0,).

    Raises RuntimeError if no trailing dimensions hold `hidden` elements.
    """
    if not hidden:
        return (0,)
    elements = 1
    for end in reversed(range(len(shape))):
        elements *= shape[end]
        if elements == hidden:
            return tuple(shape[:end])
    raise RuntimeError(
        "tilenorm::norm: argument 'hidden' takes the number of elements of the input's last"
        f" dimensions, got {hidden} for an input of shape {list(shape)}"
    )


def sizes_by_hidden(tensors: Mapping[str, Any], hidden: int) -> Sizes:
    """The sizes of a call whose rows have `hidden` elements. tensors: see sizes_of."""
    shape = tensors["input"].shape
    lead = len(rows_shape(shape, hidden)) if hidden else max(0, len(shape) - 1)
    return sizes_of(tensors, len(shape) - lead)


def sizes_of_spec(spec: Any, tensors: Mapping[str, Any]) -> Sizes:
    """The sizes of a call of a spec, which knows the heads that have weights of their own.

    tensors: see sizes_of.
    """
    if spec.rotation:
        sizes = sizes_of(tensors, 2 if spec.by_token else 1)
        return sizes._replace(swapped=spec.rotation.heads_first)
    sizes = sizes_by_hidden(tensors, spec.hidden)
    sizes.words["h"] = (spec.heads,) if spec.heads else ()
    sizes.words["n/group"] = (spec.quantized.groups(spec.hidden),) if spec.quantized else ()
    return sizes


def planned(spec: Any, rows: int, groups: int = 1, heads: Any = None) -> Sizes:
    """The sizes of a call of a spec with so many rows and groups.

    heads: of rotated heads, the Sizes of launch/calls.py; tables have a row for each token of a
    sequence.
    """
    how = spec.rotation
    if how:
        batch, tokens, count, keys = heads
        columns = how.dim if how.full else how.dim // 2
        shapes = {"input": (batch, tokens, count, how.head), "cos": (tokens, columns)}
        if keys:
            shapes["key"] = batch, tokens, keys, how.head
        if how.positions:
            shapes["positions"] = batch, tokens
    else:
        lead = (rows // spec.heads, spec.heads) if spec.heads else (rows,)
        shapes = {"input": (*lead, spec.hidden), "scale": (groups, spec.hidden)}
    return sizes_of_spec(spec, {name: Shaped(shape) for name, shape in shapes.items()})


def leading_groups(shape: Sequence[int], dims: int) -> Shape:
    """The leading sizes of what lies by group, without sizes of 1 at their end. dims: how many
    dimensions are normalised.
    """
    groups = list(shape[: max(0, len(shape) - dims)])
    while len(groups) > 0 and known(groups[-1] == 1):
        groups.pop()
    return tuple(groups)


def fits(port: Port, tensor: Any, sizes: Sizes) -> Misfit | None:
    """What a port takes that the shape of a tensor is not, or None."""
    words = sizes.of(port).words
    rest = tuple(tensor.shape)
    if port.dims in EXACT and same(rest, words[port.dims]):
        return None
    first, *others = WORDS[sizes.dims(port)]
    for word in reversed(others):
        start = len(rest) - len(words[word])
        rest, tail = rest[: max(0, start)], rest[max(0, start) :]
        if word == "r" and not (len(tail) > 0 and tail[0] in sizes.columns):
            return Misfit(COLUMNS.format(*sizes.columns), ValueError)
        if start < 0 or (word not in ANY and not same(tail, words[word])):
            return _misfit(port, sizes)
    return None if _starts(first, rest, words) else _misfit(port, sizes)


def _starts(word: str, sizes: Shape, words: dict[str, Shape]) -> bool:
    """Whether the leading sizes of a tensor are those of its first word."""
    lead = words["..."]
    if word == "[h]":
        return len(sizes) == 0 or same(sizes, lead[-1:])  # Dynamo knows no `not` of a tuple
    if word == "p":
        return len(sizes) == 1
    if word == "t?":
        tokens = words["t"][max(0, len(words["t"]) - len(sizes)) :]
        if len(sizes) != len(tokens):
            return False
        return all(known(a == 1) or holds(a == b) for a, b in zip(sizes, tokens, strict=True))
    if word != "g":
        return same(sizes, words[word])
    groups = leading_groups(sizes, 0)
    if len(groups) == 0 or len(groups) > len(lead):
        return len(groups) == 0
    *before, many = lead[: len(groups)]
    return same(groups[:-1], tuple(before)) and divides(groups[-1], many)


def _misfit(port: Port, sizes: Sizes) -> Misfit:
    words = {word: list(size) for word, size in sizes.of(port).words.items()}
    dims, lead, n = sizes.dims(port), words["..."], words["n"]
    named = {"x": list(sizes.words["..."] + sizes.words["n"]), "lead": lead, "n": n}
    named["or_heads"] = f" or, by heads, {[*lead[-1:], *n]}" if lead else ""
    named["t"] = words.get("t")
    return Misfit(TAKES.get(f"{dims} of {port.of}", TAKES[dims]).format(**named))


def shape(port: Port, sizes: Sizes) -> Shape:
    """The shape of a tensor of a call: of one that is made, or that nobody gave. Rows of no
    elements have no statistics.
    """
    words = sizes.of(port).words
    if port.number and 0 in words["n"]:
        return (0,)
    extents: list[int] = []
    for word in WORDS[sizes.dims(port)]:
        if word == "1":
            extents.append(1)
        elif word == "(...)":
            extents.append(prod(words["..."]))
        else:
            extents += words.get(word.strip("[]"), ())
    return _swapped(extents) if sizes.swapped and port.swapped else tuple(extents)


def _swapped(dims: Sequence) -> tuple:
    """The same with heads before tokens."""
    batch, tokens, heads, *others = dims
    return batch, heads, tokens, *others


def view(port: Port, sizes: Sizes, written: bool = False) -> Shape:
    """The shape in which the kernels take a tensor. A sum over rows lies flat, and what they write
    is rows one after the other, also where heads have weights of their own.
    """
    words, dims = sizes.of(port).words, sizes.dims(port)
    if "t" in words:
        return _view_of_heads(words, dims)
    hidden, heads = prod(words["n"]), words.get("h", ())
    rows = prod(words["..."])
    if dims == "...":
        return (rows,)
    if dims == "... n":
        return (rows, hidden) if written or not heads else (rows // heads[0], *heads, hidden)
    if dims == "+[h] n":
        return (prod(heads) * hidden,)
    if "g" in dims:
        return prod(words["g"]), hidden
    return (*heads, hidden) if "[h]" in dims else (hidden,)


def _view_of_heads(words: dict[str, Shape], dims: str) -> Shape:
    """The same of heads that are rotated."""
    extents: Shape = ()
    for word in WORDS[dims]:
        if word == "...":
            extents += sequences(words["t"]) + words["..."][len(words["t"]) :]
        else:
            extents += sequences(words["t"]) if word in ("t", "t?") else words[word]
    return (prod(extents),) if dims == "+n" else extents


def sequences(tokens: Shape) -> tuple[int, int]:
    """How many sequences there are, and the tokens of each. A block has tokens of one sequence: so
    tokens that are their sequences' only ones, as where a model decodes, count as one sequence.
    """
    batch, count = prod(tokens[:-1]), tokens[-1]
    return (1, batch) if count == 1 else (batch, count)


def axes(port: Port, tensor: Any, sizes: Sizes) -> Sequence[int | None]:
    """Of each dimension of a tensor, which dimension of the input it is: None for another one, and
    ~d where a cut in the input's dimension d leaves the tensor in no parts that fit.
    """
    words, lead = sizes.of(port).words, sizes.lead
    whole = lead + len(words["n"])
    rows = {"...": range(lead), "n": range(lead, whole), "t": range(whole - 2)}
    rows |= {"k": range(whole - 2, whole - 1), "d": range(whole - 1, whole)}
    dims: list[int | None] = []
    first, *others = WORDS[sizes.dims(port)]
    if first == "[h]":
        return _axes_of_heads(tensor.shape, sizes)
    if first == "t?":
        count = len(tensor.shape) - len(others)
        tokens = zip(range(whole - 2 - count, whole - 2), tensor.shape, strict=False)
        dims += [None if known(size == 1) else d for d, size in tokens]
    elif first == "g":
        groups = leading_groups(words["g"], 0)
        pairs = enumerate(zip(groups, words["..."], strict=False))
        dims += [d if known(few == many) else ~d for d, (few, many) in pairs]
        dims += [None] * (len(words["g"]) - len(groups))
    else:
        dims += rows.get(first, [None])
    for word in others:
        dims += rows.get(word, [None])
    return _swapped(dims) if sizes.swapped and port.swapped else dims


def _axes_of_heads(parameter: Sequence[int], sizes: Sizes) -> list[int | None]:
    """As axes, of a parameter, whose sizes are aligned on the right with the input's.

    One that rows share, or that has heads, has its sizes there. The sizes of 1 before a row are no
    heads. Any other shape tells nothing of which dimension the heads are, and no dimension is cut.
    """
    x, lead = sizes.words["... n"], sizes.lead
    aligned = range(len(x) - len(parameter), len(x))
    if known(prod(parameter) == prod(sizes.words["n"])):
        return [d if d >= lead else None for d in aligned]
    if aligned.start < 0 or not all(
        known(x[d] == n) for d, n in zip(aligned, parameter, strict=True)
    ):
        return [~d for d in range(lead)]
    return [
        None if d < lead and known(n == 1) else d for d, n in zip(aligned, parameter, strict=True)
    ]


def nbytes(port: Port, sizes: Sizes, item: int) -> int:
    """The bytes of a tensor. item: of an element."""
    return prod(shape(port, sizes)) * item
