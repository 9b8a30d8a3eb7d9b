"""Equal finish: how many samples each rank takes so that all finish at the same moment.

A rank's time for b samples is a + c * b (fixed + per sample), and 0 for none. With divisible samples all ranks that
take any finish at T = (B + sum(a/c)) / sum(1/c), and no split into whole samples finishes sooner. So each rank gets
what it finishes before T, and the few samples left go one by one to the rank that would finish its next one first.
That is the best whole split; rounding the divisible one is not, since it ignores the cost of a whole sample on a slow
rank (tests/policy/test_finish.py compares with all splits).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Cost:
    """The compute time of a rank's step: `fixed_ms`, and `sample_ms` per sample.

    `cap` is how many samples its memory holds at once, where that is known.
    """

    fixed_ms: float
    sample_ms: float
    cap: float = float("inf")

    def time_ms(self, samples: int) -> float:
        return self.fixed_ms + self.sample_ms * samples if samples else 0.0

    def scaled(self, factor: float) -> "Cost":
        return Cost(self.fixed_ms * factor, self.sample_ms * factor, self.cap)


def fitted(times: Sequence[tuple[int, float]]) -> Cost:
    """The cost that explains measured (samples, ms): a line through the typical times of the smallest and largest size.

    Noise can tilt the line, so the part per sample stays between a twentieth and the whole of the larger time.
    """
    by_size: dict[int, list[float]] = {}
    for samples, ms in times:
        by_size.setdefault(samples, []).append(ms)
    if not by_size:
        return Cost(0.0, 1.0)
    typical = {samples: sorted(found)[len(found) // 2] for samples, found in by_size.items()}
    small, large = min(typical), max(typical)
    average_ms = typical[large] / large
    if small == large:
        return Cost(0.0, average_ms)
    slope_ms = (typical[large] - typical[small]) / (large - small)
    sample_ms = min(max(slope_ms, 0.05 * average_ms), average_ms)
    return Cost(max(0.0, typical[large] - sample_ms * large), sample_ms)


def finish_ms(costs: Sequence[Cost], shares: Sequence[int]) -> float:
    """The time at which the last rank finishes."""
    return max(cost.time_ms(samples) for cost, samples in zip(costs, shares, strict=True))


def equal_finish(
    costs: Sequence[Cost], samples: int, caps: Sequence[int] | None = None, least: int = 1, grid: int = 1
) -> tuple[int, ...]:
    """Whole samples per rank with the least possible finish; a share is 0 or between `least` and its cap.

    When the caps hold less than `samples`, they bound nothing (a rank then runs its share as several micro-batches).
    With a `grid` shares are multiples of it, except one that takes the remainder.
    """
    if grid > 1:
        return _on_grid(costs, samples, caps, least, grid)
    limits = [samples] * len(costs) if caps is None or sum(caps) < samples else list(caps)
    shares = _done_by(earliest_ms(costs, samples), costs, limits)
    _share_rest(shares, costs, limits, samples - sum(shares))
    for _ in range(sum(shares) - samples):
        shares[max(range(len(shares)), key=lambda rank: costs[rank].time_ms(shares[rank]))] -= 1
    if least > 1:
        _fix_small_shares(shares, costs, limits, least)
    return tuple(shares)


def _share_rest(shares: list[int], costs: Sequence[Cost], limits: Sequence[int], samples: int) -> None:
    """One by one to the rank that would finish its next one first. In place."""
    if samples <= 0:
        return
    # A heap: to look through a thousand ranks for each sample took 140 ms a step (tests/policy/test_many_ranks.py).
    takers = [
        (cost.fixed_ms + cost.sample_ms * (share + 1), rank)
        for rank, (cost, share, limit) in enumerate(zip(costs, shares, limits, strict=True))
        if share < limit
    ]
    heapq.heapify(takers)
    for _ in range(samples):
        rank = takers[0][1]
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heapreplace(takers, (costs[rank].time_ms(shares[rank] + 1), rank))
        else:
            heapq.heappop(takers)


def by_ratio(
    ratio: Sequence[float], samples: int, least: int = 1, caps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Whole samples in the proportions of `ratio`; a part of 0 gets none."""
    costs = [Cost(0.0, 1.0 / part) if part > 0 else Cost(0.0, 1.0) for part in ratio]
    helping = [samples if part > 0 else 0 for part in ratio]
    limits = helping if caps is None else [min(pair) for pair in zip(helping, caps, strict=True)]
    return equal_finish(costs, samples, limits if sum(limits) >= samples else helping, least)


def _on_grid(costs: Sequence[Cost], samples: int, caps: Sequence[int] | None, least: int, grid: int) -> tuple[int, ...]:
    """The best split in multiples of the grid; the remainder goes to the rank that finishes it first.

    It finishes at most one grid step after the best whole split: rounding that split up, where it is not 0, leaves
    room for all samples.
    """
    steps, rest = divmod(samples, grid)
    held = [samples] * len(costs) if caps is None else list(caps)
    limits = [steps if cap >= samples else cap // grid for cap in held]
    coarse = [replace(cost, sample_ms=cost.sample_ms * grid) for cost in costs]
    shares = [grid * count for count in equal_finish(coarse, steps, limits, -(-least // grid))]
    free = [rank for rank, share in enumerate(shares) if share + rest <= held[rank]]
    if not free:  # the caps hold too little, on this grid
        return _on_grid(costs, samples, None, least, grid)
    takers = [rank for rank in free if shares[rank] + rest >= least] or free
    shares[min(takers, key=lambda rank: costs[rank].time_ms(shares[rank] + rest))] += rest
    return tuple(shares)


def earliest_ms(costs: Sequence[Cost], samples: int) -> float:
    """The finish time if samples were divisible and no rank had a cap: no split finishes sooner."""
    helping = sorted(costs, key=attrgetter("fixed_ms"))
    work, speed = float(samples), 0.0
    at_ms = float("inf")
    for cost in helping:
        if cost.fixed_ms >= at_ms:
            break  # its fixed part alone takes longer than the others need for everything
        work += cost.fixed_ms / cost.sample_ms
        speed += 1.0 / cost.sample_ms
        at_ms = work / speed
    return at_ms


def _done_by(at_ms: float, costs: Sequence[Cost], limits: Sequence[int]) -> list[int]:
    """How many samples each rank can finish by that time."""
    # 1e-9 keeps a sample that ends exactly at `at_ms` from being lost to rounding.
    return [
        min(limit, max(0, int((at_ms - cost.fixed_ms) / cost.sample_ms + 1e-9)))
        for cost, limit in zip(costs, limits, strict=True)
    ]


def _fix_small_shares(shares: list[int], costs: Sequence[Cost], limits: Sequence[int], least: int) -> None:
    """No share between 0 and `least`: BatchNorm cannot train on one sample. In place; the sum stays.

    Each small share is rounded to 0 or to `least`, whichever lets the others finish sooner. Where samples are
    too few for either, the remainder goes to the rank that finishes it first.
    """
    for rank, share in enumerate(shares):
        if not 0 < share < least:
            continue
        dropped, raised = list(shares), list(shares)
        dropped[rank] = 0
        _give(dropped, costs, limits, share, least, without=rank)
        raised[rank] = least
        _take(raised, costs, least - share, least, without=rank)
        fit = [split for split in (dropped, raised) if sum(split) == sum(shares)]
        fit.sort(key=lambda split: finish_ms(costs, tuple(split)))
        if fit:
            shares[:] = fit[0]


def _give(
    shares: list[int], costs: Sequence[Cost], limits: Sequence[int], samples: int, least: int, without: int
) -> None:
    for _ in range(samples):
        takers = [r for r, s in enumerate(shares) if r != without and least <= s < limits[r]]
        if not takers:
            return
        shares[min(takers, key=lambda r: costs[r].time_ms(shares[r] + 1))] += 1


def _take(shares: list[int], costs: Sequence[Cost], samples: int, least: int, without: int) -> None:
    for _ in range(samples):
        givers = [r for r, s in enumerate(shares) if r != without and s > least]
        if not givers:
            return
        shares[max(givers, key=lambda r: costs[r].time_ms(shares[r]))] -= 1
