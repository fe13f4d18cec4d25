"""The interval of a median: counted over all signs, and by the tables of the sign test."""

from itertools import product

import pytest

from bench.record import CONFIDENCE, Estimate, estimate


@pytest.mark.parametrize("n", range(1, 13))
def test_share_of_all_signs_that_the_interval_misses(n):
    """Each sample is below or above the median with probability 1/2: all 2^n cases are as likely.

    The interval misses as few cases as it can: the next narrower one misses too many.
    """
    _, low, high = estimate(range(n))
    if low is None:
        assert 2 * 0.5**n > 1 - CONFIDENCE
        return
    assert low + high == n - 1

    def missed(k: int) -> float:
        """The share of the cases that have at most k samples on one side of the median."""
        cases = [sum(signs) for signs in product((0, 1), repeat=n)]
        return sum(below <= k or below >= n - k for below in cases) / len(cases)

    assert missed(low) <= 1 - CONFIDENCE < missed(low + 1)


def test_known_ranks():
    assert estimate(range(1, 41)) == Estimate(20.5, 14, 27)
    assert estimate(range(60, 0, -1)) == Estimate(30.5, 22, 39)
    assert estimate([3.0, 1.0, 2.0]) == Estimate(2.0, None, None)
    assert estimate([]) is None
    assert estimate([4.0, 1.0, 2.0, 3.0, 6.0, 5.0]) == Estimate(3.5, 1.0, 6.0)
