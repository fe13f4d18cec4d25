"""The parts of a plan: kernel calls and the requested gradients.

ABSENT stands for an array that a flag turns off. The kernel does not touch it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from ..spec import TENSORS, NormSpec
from ..table import LAYER_SCALE, MODULATION, OF_KEY
from .config import cdiv

if TYPE_CHECKING:  # what the reference serves needs no cuda.tile
    import cuda.tile as ct

ABSENT = ()  # an empty tuple adds no parameter to the compiled kernel
MAX_GRID = (1 << 24) - 1  # blocks in the first dimension of a cuTile grid
MAX_SIDE = (1 << 16) - 1  # blocks in the second and in the third dimension


class Call(NamedTuple):
    """One kernel launch with its arguments.

    overlap: the kernel may start before the kernel before it in the stream has ended. The kernel
    itself waits for that end (kernels/turns.py).
    """

    kernel: "ct.kernel"
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    overlap: bool = False


class Launch(NamedTuple):
    """A launch template. `take` selects the arrays; they go between `before` and `after`.

    The arrays are one tuple argument, and each group of constants is one tuple argument. On an
    H200 the host takes 5.7 µs to launch a kernel with 8 arguments, some of them tuples, and 6.1 µs
    with the same values as 40 arguments (bench/results/h200-launch-arguments.md).
    """

    kernel: "ct.kernel"
    grid: tuple[int, ...]
    before: tuple[Any, ...]
    take: Callable[[tuple], Any]
    after: tuple[Any, ...]
    overlap: bool = False


class Needs(NamedTuple):
    """What a backward pass takes and makes."""

    # Which gradients are requested. Of a rotated norm, dx and dw are those of the queries.
    dx: bool
    dw: bool = False
    db: bool = False
    dresidual: bool = False
    dgate: bool = False
    dsum: bool = False  # the gradient of the sum x + residual, or of the rotated key, comes in
    terms: int = 1  # how many tensors make up dy
    output: bool = False  # y is requested once more
    modulation: tuple[bool, ...] = ()  # of a modulated norm, for each tensor of MODULATION
    of_key: tuple[bool, ...] = ()  # of a rotated norm, for each tensor of OF_KEY

    @property
    def gradients(self) -> tuple[bool, ...]:
        """Which gradients are requested, in the order of the tensors that they are of."""
        first = self.dx, self.dresidual, self.dgate, self.dw, self.db
        return (*first, *self.modulation, *self.of_key)

    @property
    def reads(self) -> tuple[bool, bool]:
        """Whether dy and dsum are read: of rotated heads, the gradients of queries and of keys."""
        if self.of_key:
            return self.dx or self.dw, self.dkey or self.dkey_weight
        return True, self.dsum

    @property
    def dkey(self) -> bool:
        """Whether the gradient of a key is requested."""
        return any(self.of_key[:1])

    @property
    def dkey_weight(self) -> bool:
        """Whether the gradient of a key's weight is requested."""
        return any(self.of_key[1:])

    @property
    def dmod_gate(self) -> bool:
        """Whether the gradient of a gate by group is requested."""
        return any(self.modulation[2:])

    @property
    def of_sum(self) -> bool:
        """Whether a gradient is requested that is made of that of what is normalised."""
        return self.dx or self.dresidual or self.dmod_gate

    @property
    def label(self) -> str:
        """The names of what is requested, and of what comes in."""
        asked = {name: getattr(self, name) for name in self._fields}
        names = [name for name, requested in asked.items() if requested is True]
        by_group = zip(MODULATION, self.modulation, strict=False)
        names += [f"d{role}" for role, requested in by_group if requested]
        of_key = zip(OF_KEY, self.of_key, strict=False)
        names += [f"d{role}" for role, requested in of_key if requested]
        return "+".join(names + [f"terms:{self.terms}"] * (self.terms > 1))

    @property
    def sums(self) -> int:
        """The number of requested gradients that are sums over rows: dw and db."""
        return self.dw + self.db


def needs_of(spec: NormSpec, asked: Iterable[str | None], dsum: bool) -> Needs:
    """Which gradients a backward pass computes, of one term of dy.

    asked: the roles of the tensors whose gradients are asked for. dsum: whether the sum's gradient
    comes in; only the gradients of x and residual need it. An input and a residual of one dtype
    have the same gradient, which is computed once, unless the input is masked or scaled. Where
    heads are rotated, dsum is the key's.
    """
    roles = set(asked)
    if LAYER_SCALE.role in roles:  # its gradient is made of the residual's
        roles.add("residual")
    if "addend" in roles:
        roles.add(addend_as(spec))
    dx, dresidual = "x" in roles, "residual" in roles and spec.residual is not None
    if spec.residual is None or spec.shares_dx:
        dx, dresidual = dx or dresidual, False
    roles_of_options = ("gate", "weight", "bias", *MODULATION)
    dgate, dw, db, *groups = [r in roles and bool(getattr(spec, r)) for r in roles_of_options]
    by_group = tuple(groups) if spec.modulated else ()
    of_key = tuple([role in roles and bool(getattr(spec, role)) for role in OF_KEY])
    of_key = of_key if spec.rotation else ()
    needs = Needs(dx, dw, db, dresidual, dgate, modulation=by_group, of_key=of_key)
    return needs._replace(dsum=dsum and (any(of_key) if spec.rotation else needs.of_sum))


def addend_as(spec: NormSpec) -> str:
    """Whose gradient an addend gets in its own dtype. One of a third dtype has fewer bits than the
    residual.
    """
    return "x" if spec.addend == spec.dtype else "residual"


def every_gradient(spec: NormSpec) -> Needs:
    """The gradients of a training step."""
    of_sum = spec.residual is not None or spec.key is not None
    return needs_of(spec, ("x", *TENSORS), of_sum)


class Sizes(NamedTuple):
    """The sizes of a call of a norm that is rotated: `batch` sequences of `tokens` tokens, with so
    many heads of the input and of the key.
    """

    batch: int
    tokens: int
    heads: int
    key_heads: int = 0


def constants(group: Any) -> tuple:
    """The tuple that a kernel takes for a group of constants (kernels/constants.py)."""
    return tuple(vars(group).values())


def groups(kernel: "ct.kernel") -> dict[str, Any]:
    """The dataclass of each kernel parameter that is a group of constants, by parameter name."""
    hints = get_type_hints(kernel._pyfunc, include_extras=True).items()
    metadata = {name: getattr(hint, "__metadata__", ())[-1:] for name, hint in hints}
    return {
        name: kind
        for name, annotation in metadata.items()
        for kind in annotation
        if is_dataclass(kind)
    }


def constants_of(kernel: "ct.kernel", arguments: tuple) -> dict[str, Any]:
    """The compile-time constants of a call, by their names in the kernel."""
    annotated, values = kernel._annotated_function, {}
    kinds = groups(kernel)
    nodes = annotated.parameter_annotations
    for name, node, value in zip(annotated.pysig.parameters, nodes, arguments, strict=True):
        if name in kinds:
            values |= vars(kinds[name](*value))
        elif node.constant:
            values[name] = value
    return values


def bound(launches: Sequence[Launch], arrays: tuple) -> list[Call]:
    """The launches with these arrays filled in."""
    return [
        Call(kernel, grid, (*before, take(arrays), *after), overlap)
        for kernel, grid, before, take, after, overlap in launches
    ]


def parts(count: int, most: int) -> list[tuple[int, int]]:
    """Split `count` items over launches of at most `most` items: (first, count) of each launch."""
    if count <= most:
        return [(0, count)]
    return [(first, min(most, count - first)) for first in range(0, count, most)]


def rectangles(count: int) -> list[tuple[int, int, int]]:
    """Split `count` blocks over grids of shape (1, y, z): (first, y, z) of each grid."""
    grids, first = [], 0
    while first < count:
        z = cdiv(count - first, MAX_SIDE)
        y = (count - first) // z
        grids.append((first, y, z))
        first += y * z
    return grids
