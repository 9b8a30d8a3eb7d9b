"""Whole numbers in proportion to shares: samples, elements, heads, columns or tokens.

The method of largest remainders: nobody is off by a whole unit. Every rank computes the same numbers. parallel/ cuts
params, heads and tokens with it.
"""

import math
from collections.abc import Sequence


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """How much of `total` each gets, by largest remainders; the sum is `total`, and a share of 0 gets nothing.

    >>> apportion(10, (15, 6))
    [7, 3]
    """
    check_shares(shares)
    if total < 0:
        raise ValueError(f"total {total} must not be negative")
    whole = sum(shares)
    ideal = [total * share / whole for share in shares]
    counts = [math.floor(amount) for amount in ideal]
    places = sorted(range(len(shares)), key=lambda place: (counts[place] - ideal[place], place))
    takers = [place for place in places if shares[place] > 0]
    for place in takers[: total - sum(counts)]:
        counts[place] += 1
    return counts


def cut_by(counts: Sequence[int]) -> list[int]:
    """The offsets of consecutive pieces of these sizes, with the end of the last one.

    >>> cut_by([7, 3])
    [0, 7, 10]
    """
    cut = [0]
    for count in counts:
        cut.append(cut[-1] + count)
    return cut


def check_shares(shares: Sequence[float]) -> None:
    """ValueError unless all shares are finite, none is negative and not all are zero."""
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise ValueError(f"shares {tuple(shares)} must be finite, none negative, and not all zero")
