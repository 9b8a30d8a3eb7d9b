"""Whole numbers in proportion to shares: samples, elements, heads, columns or tokens.

The method of largest remainders: nobody is off by a whole unit. Every positive share gets at least a minimum, and
units that must not be split stay whole. Every rank computes the same numbers. parallel/ cuts params, heads and tokens
with it.
"""

import math
from collections.abc import Sequence


def apportion(total: int, shares: Sequence[float], *, minimum: int = 0, multiple: int = 1) -> list[int]:
    """How much of `total` each gets; the sum is `total`, and a share of 0 gets nothing.

    A positive share gets at least `minimum`. Amounts are multiples of `multiple`; the remainder of `total` goes to the
    largest. ValueError where `total` is too small.

    >>> apportion(10, (15, 6))
    [7, 3]
    >>> apportion(64, (5, 2, 0), multiple=8)
    [48, 16, 0]
    """
    check_shares(shares)
    if total < 0 or multiple < 1 or minimum < 0:
        raise ValueError(f"total {total}, minimum {minimum}, multiple {multiple}: none may be negative, nor multiple 0")
    units = total // multiple
    least = math.ceil(minimum / multiple)
    takers = [place for place, share in enumerate(shares) if share > 0]
    if least * len(takers) > units:
        raise ValueError(f"{total} is too little for {len(takers)} with at least {max(minimum, multiple)} each")
    counts = [0] * len(shares)
    for place, count in zip(takers, _by_remainder(units, [shares[place] for place in takers], least), strict=True):
        counts[place] = count * multiple
    counts[max(takers, key=lambda place: (counts[place], shares[place], -place))] += total - units * multiple
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


def _by_remainder(units: int, shares: Sequence[float], least: int) -> list[int]:
    """Shares below `least` are raised to it; the others divide the rest, largest remainders rounded up."""
    counts = [least] * len(shares)
    free = list(range(len(shares)))
    while True:
        rest = units - least * (len(shares) - len(free))
        whole = sum(shares[place] for place in free)
        ideal = {place: rest * shares[place] / whole for place in free}
        short = [place for place in free if ideal[place] < least]
        if not short:
            break
        free = [place for place in free if place not in short]
    for place in free:
        counts[place] = math.floor(ideal[place])
    rounded = sorted(free, key=lambda place: (math.floor(ideal[place]) - ideal[place], place))
    for place in rounded[: units - sum(counts)]:
        counts[place] += 1
    return counts
