"""The lines of a record: what each kind of measurement holds.

``COMPUTED`` names the properties of a line that are computed from its fields. A record has them
beside the fields, for its readers. Reading a record leaves them out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.op import HOST

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """The median of samples, and the ends of its interval, or None with too few samples."""

    median: float
    low: float | None = None
    high: float | None = None


def estimate(samples: Sequence[float]) -> Estimate | None:
    """The median of the samples with its interval, or None without samples.

    The interval contains the median of what the samples are drawn from, with CONFIDENCE. It is that
    of the sign test (W. R. Thompson, Annals of Mathematical Statistics 7, 1936):
    from the k-th smallest sample to the k-th largest. The median is below the k-th smallest of n
    independent samples if fewer than k samples are below it, with the probability
    Σ_{i < k} C(n, i) / 2^n for every continuous distribution; for others it is at most that. k is
    the largest number with which both sides together have at most the probability 1 - CONFIDENCE.
    Below 6 samples there is none.
    """
    n, k, below = len(samples), 0, 1
    while 2 * below <= (1 - CONFIDENCE) * 2**n:
        k += 1
        below += math.comb(n, k)
    found = sorted(samples)
    ends = (found[k - 1], found[n - k]) if k else ()
    return Estimate(statistics.median(samples), *ends) if samples else None


@dataclass(frozen=True)
class Copy:
    """The time of a device-to-device copy of an (M, N) tensor: the speed that memory allows.

    ``error`` says why it is not timed, or why no CUDA graph times it.
    """

    dtype: str
    m: int
    n: int
    bytes: int
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    timing: str = ""
    error: str = ""

    COMPUTED = ("gbps",)

    @property
    def gbps(self) -> float | None:
        return None if self.median_us is None else self.bytes / self.median_us / 1e3


@dataclass(frozen=True, kw_only=True)
class Cell(Copy):
    """The time of one provider on one shape in one direction, with the fields of a copy's.

    ``status`` is ok, wrong, refused, failed or skipped. A cell that is not ok has no numbers.
    """

    op: str
    direction: str
    provider: str
    status: str = "ok"
    groups: int = 1


@dataclass(frozen=True)
class Host:
    """Host microseconds of a call: a forward without grad, and a forward with its backward, by the
    clock and of all threads. Each is the least median of several rounds. ``way``: see bench.host.
    """

    op: str
    dtype: str
    m: int
    n: int
    provider: str
    forward_us: float | None = None
    forward_backward_us: float | None = None
    error: str = ""
    way: str = "call"
    forward_cpu_us: float | None = None
    forward_backward_cpu_us: float | None = None

    direction = HOST


@dataclass(frozen=True)
class FirstCall:
    """Seconds of the first call of a spec in a process, with the compilation in it.

    ``cold_s`` starts from empty caches. ``warm_s`` is of a second process, with the first's caches.
    """

    op: str
    dtype: str
    m: int
    n: int
    direction: str
    provider: str
    cold_s: float | None = None
    warm_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Precompile:
    """Seconds that ``python -m tilenorm precompile`` takes with an empty cache."""

    op: str
    arguments: str
    cores: int
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Accuracy:
    """The largest errors of one provider on one kind of inputs, by the result's name."""

    op: str
    dtype: str
    m: int
    n: int
    inputs: str
    provider: str
    ulps: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Pair:
    """Training steps of two variants of one model, in one process and over the same weights.

    ``label`` names the model, its sizes and how it is trained. ``pairs_us`` has the microseconds of
    the base's step and of the variant's step, for each pair of steps. ``asked`` is how many pairs
    the command asked for; a run that is out of time makes fewer. ``peak_bytes``, ``losses``,
    ``kernels`` and ``reports`` have an entry for each of the two. The losses are of the first
    forward, from the same weights. ``gradient_change`` is the norm of the difference of the two
    first gradients divided by the norm of the base's: the largest of all parameters, and
    ``gradient`` is the name of this parameter. ``kernels`` has the name, calls and milliseconds of
    each kernel of one step. ``reports`` say what tilenorm replaced.

    With several ``gpus``, ``ranks`` has the times and peaks of each process, and ``pairs_us`` and
    ``peak_bytes`` are the largest of any process.
    """

    label: str
    base: str
    variant: str
    tokens: int
    asked: int
    status: str = "ok"
    pairs_us: list[list[float]] = field(default_factory=list)
    peak_bytes: list[int | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_change: float | None = None
    gradient: str = ""
    kernels: list[list[dict]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    gpus: int = 1
    ranks: list[dict] = field(default_factory=list)
    error: str = ""

    COMPUTED = ("medians_us", "gpu_tokens", "difference_us", "more_tokens")

    @property
    def medians_us(self) -> list[float]:
        """The median step of the base and of the variant."""
        return [statistics.median(times) for times in zip(*self.pairs_us, strict=True)]

    @property
    def gpu_tokens(self) -> list[float]:
        """The tokens a second of one GPU, of the base and of the variant."""
        return [self.tokens / self.gpus / us * 1e6 for us in self.medians_us]

    @property
    def difference_us(self) -> Estimate | None:
        """How many microseconds longer the variant's step is than the base's."""
        return estimate([variant - base for base, variant in self.pairs_us])

    @property
    def more_tokens(self) -> Estimate | None:
        """How many more tokens the variant takes in a second, as a share of the base's."""
        return estimate([base / variant - 1 for base, variant in self.pairs_us])
