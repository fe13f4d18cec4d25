"""Memory behind the array arguments: who wrote and read each element, and what may overlap."""

from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from cuda.tile._ir.ops_utils import memory_order_has_acquire, memory_order_has_release

from .errors import AliasError, PollingError, RaceError

POLL_LIMIT = 10_000
# An atomic over more elements than this is a sum, not a flag: it synchronises nothing.
FLAG_ELEMENTS = 16
NOBODY, SEVERAL = -1, -2


@dataclass(frozen=True)
class Strided:
    """A strided window of a buffer, in elements from its base."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        return self._view(flat).clone()

    def write(self, flat: torch.Tensor, values) -> None:
        self._view(flat)[...] = values

    def repeats(self) -> bool:
        return any(n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class Scattered:
    """Elements of a buffer listed by their offsets from its base."""

    offsets: torch.Tensor

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offsets]

    def write(self, flat: torch.Tensor, values) -> None:
        flat[self.offsets] = values

    def repeats(self) -> bool:
        flat = self.offsets.flatten()
        return not bool((flat[1:] > flat[:-1]).all()) and flat.unique().numel() < flat.numel()


@dataclass
class Blocks:
    """The block that runs, and the blocks whose writes it has acquired."""

    count: int = 1
    current: int = 0
    acquired: dict[int, set[int]] = field(default_factory=dict)
    _last_poll: tuple = ()
    _polls: int = 0

    def seen(self) -> set[int]:
        return self.acquired.setdefault(self.current, set())

    def poll(self, *observed) -> None:
        """Count a synchronising read; the same value again and again is a wait."""
        key = (self.current, *observed)
        self._polls = self._polls + 1 if key == self._last_poll else 0
        self._last_poll = key
        if self._polls > POLL_LIMIT:
            raise PollingError(
                f"block {self.current} read the same flag {POLL_LIMIT} times: it waits for another"
                " block, and blocks run one after another here"
            )


class Buffer:
    """One array argument's memory, with the last block that touched each element."""

    def __init__(self, name: str, tensor: torch.Tensor, blocks: Blocks):
        self.name = name
        self.blocks = blocks
        self.base = tensor.storage_offset()
        self.span = _span(tensor)
        self.flat = tensor.as_strided((self.span,), (1,), self.base)
        self.aliases: list[str] = []
        self._owners: dict[str, torch.Tensor] = {}
        self._released: dict[int, set[int]] = {}

    def load(self, region, order=ct.MemoryOrder.WEAK) -> torch.Tensor:
        """Read a region; a read that is not weak may synchronise, and does not race."""
        weak = order is ct.MemoryOrder.WEAK
        if self.blocks.count > 1 and weak:
            self._check(region, "write", "reads")
            self._check(region, "atomic", "reads")
            self._claim(region, "read")
        values = region.read(self.flat)
        if not weak:
            self._synchronise(region, values, order)
        return values

    def store(self, region, values: torch.Tensor, order=ct.MemoryOrder.WEAK) -> None:
        weak = order is ct.MemoryOrder.WEAK
        self._check_written()
        if region.repeats():
            raise RaceError(f"one store writes an element of '{self.name}' twice")
        if self.blocks.count > 1 and weak:
            for access in ("write", "atomic", "read"):
                self._check(region, access, "writes")
            self._claim(region, "write")
        region.write(self.flat, values)
        if not weak:
            self._synchronise(region, values, order)

    def update(self, offsets: torch.Tensor, function, *operands, order) -> torch.Tensor:
        """Read-modify-write each element atomically, in the order of the offsets."""
        self._check_written()
        region = Scattered(offsets)
        if self.blocks.count > 1:
            self._check(region, "write", "updates")
            self._claim(region, "atomic")
        if region.repeats():
            old = torch.empty(offsets.shape, dtype=self.flat.dtype)
            for i, offset in enumerate(offsets.tolist()):
                old[i] = self.flat[offset]
                self.flat[offset] = function(old[i], *(x[i] for x in operands))
        else:
            old = region.read(self.flat)
            region.write(self.flat, function(old, *operands))
        self._synchronise(region, old, order)
        return old

    def _check_written(self) -> None:
        if self.aliases:
            raise AliasError(f"'{self.name}' is written and overlaps '{self.aliases[0]}'")

    def _claim(self, region, access: str) -> None:
        owners = self._owners.get(access)
        if owners is None:
            owners = torch.full((self.span,), NOBODY, dtype=torch.int32)
            self._owners[access] = owners
        me = self.blocks.current
        if access == "write":
            region.write(owners, me)
            return
        old = region.read(owners)
        shared = (old != NOBODY) & (old != me)
        region.write(
            owners, torch.where(shared, SEVERAL, me).to(torch.int32) if shared.any() else me
        )

    def _check(self, region, access: str, doing: str) -> None:
        if access not in self._owners:
            return
        owners = region.read(self._owners[access])
        foreign = owners[(owners != NOBODY) & (owners != self.blocks.current)]
        if not foreign.numel():
            return
        seen = self.blocks.seen()
        others = set(foreign.unique().tolist())
        # Which blocks SEVERAL stands for is not kept; having acquired from any must do.
        if not (others - {SEVERAL} <= seen and seen):
            done = {"write": "wrote", "read": "read", "atomic": "updated"}[access]
            other = next(iter(others - {SEVERAL}), "more than one")
            raise RaceError(
                f"block {self.blocks.current} {doing} an element of '{self.name}' that another"
                f" block ({other}) {done}"
            )

    def _synchronise(self, region, observed: torch.Tensor, order) -> None:
        """Pass on what this block has seen through a flag, and take what others passed."""
        if observed.numel() > FLAG_ELEMENTS:
            return
        if isinstance(region, Scattered):
            keys = region.offsets.flatten().tolist()
        else:
            keys = region.read(torch.arange(self.span)).flatten().tolist()
        seen = self.blocks.seen()
        for key in keys:
            released = self._released.setdefault(key, set())
            if memory_order_has_acquire(order):
                seen |= released
            if memory_order_has_release(order):
                released |= seen | {self.blocks.current}
        self.blocks.poll(id(self), tuple(keys), tuple(observed.flatten().tolist()))


def _span(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in strides)


def find_aliases(buffers: list[tuple[Buffer, torch.Tensor]]) -> None:
    """Note on each buffer the arguments that share an element with it."""
    for i, (a, x) in enumerate(buffers):
        for b, y in buffers[i + 1 :]:
            if _overlap(x, y):
                a.aliases.append(b.name)
                b.aliases.append(a.name)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + _span(t) * t.element_size()) for t in (x, y)]
    start, stop = min(e[0] for e in ends), max(e[1] for e in ends)
    if max(e[0] for e in ends) >= min(e[1] for e in ends):
        return False
    # Column slices of one tensor interleave without sharing a byte, so mark every byte.
    touched = torch.zeros(stop - start, dtype=torch.bool)
    views = []
    for t in (x, y):
        width = t.element_size()
        stride = (*(s * width for s in t.stride()), 1)
        views.append(touched.as_strided((*t.shape, width), stride, t.data_ptr() - start))
    views[0].fill_(True)
    return bool(views[1].any())
