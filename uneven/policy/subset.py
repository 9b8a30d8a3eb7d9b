"""Which subset of the devices is predicted to train fastest, from the costs measured before training.

A job can be so small, or a device so slow, that summing gradients costs more than the device contributes. Then the user
is advised before training to leave it out, with the setting to use. train/ prints the advice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from uneven.policy.finish import Cost, equal_finish, finish_ms

WORTH_IT = 1.05  # joint speed over the best single device's, below which distribution does not pay
MAX_TRIED = 8  # up to so many ranks every subset is tried


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted samples/s: all ranks together, the best one alone, and the best subset of ranks."""

    together: float
    best_single: float
    single: int
    best: float
    subset: tuple[int, ...]


def forecast(costs: Sequence[Cost], samples: int, sum_ms: float) -> Forecast:
    """For the exact policies: every step sums gradients, which takes `sum_ms`; a single rank does not sum."""

    def speed(ranks: tuple[int, ...]) -> float:
        chosen = [costs[rank] for rank in ranks]
        step_ms = finish_ms(chosen, equal_finish(chosen, samples))
        return 1e3 * samples / (step_ms + (sum_ms if len(ranks) > 1 else 0.0))

    return _best(len(costs), speed)


def forecast_local(costs: Sequence[Cost], samples: int, round_ms: float, max_anchor: int, target: float) -> Forecast:
    """For the local policies: a round of `round_ms` after windows that grow until it costs no more than `target`."""

    def speed(ranks: tuple[int, ...]) -> float:
        slot_ms = [costs[rank].time_ms(samples) for rank in ranks]
        alone = sum(1e3 * samples / ms for ms in slot_ms)
        if len(ranks) == 1:
            return alone
        return alone * (1.0 - max(target, round_ms / (max_anchor * max(slot_ms) + round_ms)))

    return _best(len(costs), speed)


def _best(num_ranks: int, speed: Callable[[tuple[int, ...]], float]) -> Forecast:
    everyone = tuple(range(num_ranks))
    by_speed = sorted(everyone, key=lambda rank: -speed((rank,)))
    if num_ranks <= MAX_TRIED:
        tried = [subset for last in everyone for subset in combinations(everyone, last + 1)]
    else:
        tried = [tuple(sorted(by_speed[: last + 1])) for last in everyone]
    best = max(tried, key=lambda subset: (speed(subset), -len(subset)))
    return Forecast(speed(everyone), speed((by_speed[0],)), by_speed[0], speed(best), best)


def advice(found: Forecast, devices: Sequence[str]) -> list[str]:
    """One line if a single device, or fewer devices, would be faster; else none."""
    names = ",".join(devices[rank] for rank in found.subset)
    if found.best < WORTH_IT * found.best_single:  # no subset pays, whichever of them is the best by a little
        single = devices[found.single]
        return [
            f"this job does not gain from several devices: together ~{found.together:,.0f} samples/s, "
            f"{single} alone ~{found.best_single:,.0f}; use devices={single!r}"
        ]
    if found.best >= WORTH_IT * found.together:
        return [
            f"fewer devices would be faster (~{found.best:,.0f} against ~{found.together:,.0f} samples/s): "
            f"use devices={names!r}"
        ]
    return []
