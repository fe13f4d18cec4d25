"""The median of samples with an interval that holds for every distribution."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """The median of samples, and the ends of its interval, or None with too few samples."""

    median: float
    low: float | None
    high: float | None


def estimate(samples: Sequence[float]) -> Estimate | None:
    """The median of the samples with its interval, or None without samples."""
    if not samples:
        return None
    return Estimate(statistics.median(samples), *(interval(samples) or (None, None)))


def interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """An interval that contains the median of what the samples are drawn from, with CONFIDENCE.

    It is the interval of the sign test (W. R. Thompson, Annals of Mathematical Statistics 7, 1936):
    from the k-th smallest sample to the k-th largest. The median is below the k-th smallest of n
    independent samples if fewer than k samples are below it, with the probability
    Σ_{i < k} C(n, i) / 2^n for every continuous distribution; for others it is at most that. k is
    the largest number with which both sides together have at most the probability 1 - CONFIDENCE.
    Below 6 samples there is none, and the result is None.
    """
    n, k, below = len(samples), 0, 1
    while 2 * below <= (1 - CONFIDENCE) * 2**n:
        k += 1
        below += math.comb(n, k)
    found = sorted(samples)
    return (found[k - 1], found[n - k]) if k else None
