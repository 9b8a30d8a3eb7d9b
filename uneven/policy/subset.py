"""Does it pay? Which of the devices together train fastest, predicted from what was measured before training.

A job can be so small, or a device so slow, that sums of gradients cost more than the device brings. Then the honest
answer is to leave it out, said before training and with the words to type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from uneven.policy.finish import Cost, equal_finish, finish_ms

WORTH_IT = 1.05  # joint speed over the best single device's, below which distribution does not pay
MOST_TRIED = 8  # ranks up to which every subset is tried


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted samples/s: all ranks together, the best one alone, and the best subset of ranks."""

    together: float
    best_single: float
    single: int
    best: float
    subset: tuple[int, ...]

    @property
    def pays(self) -> bool:
        return self.together >= WORTH_IT * self.best_single


def forecast(costs: Sequence[Cost], samples: int, sum_ms: float, least: int = 1) -> Forecast:
    """`sum_ms` is one gradient sum over all ranks; a rank alone needs none and trains the same `samples` a step."""

    def speed(ranks: tuple[int, ...]) -> float:
        chosen = [costs[rank] for rank in ranks]
        step_ms = finish_ms(chosen, equal_finish(chosen, samples, least=least))
        return 1e3 * samples / (step_ms + (sum_ms if len(ranks) > 1 else 0.0))

    everyone = tuple(range(len(costs)))
    by_speed = sorted(everyone, key=lambda rank: costs[rank].time_ms(samples))
    if len(costs) <= MOST_TRIED:
        tried = [subset for size in everyone for subset in combinations(everyone, size + 1)]
    else:
        tried = [tuple(sorted(by_speed[: size + 1])) for size in everyone]
    best = max(tried, key=lambda subset: (speed(subset), -len(subset)))
    return Forecast(speed(everyone), speed((by_speed[0],)), by_speed[0], speed(best), best)


def advice(found: Forecast, devices: Sequence[str]) -> str | None:
    """One line when distribution does not pay, or when fewer devices would be faster; else None."""
    names = ",".join(devices[rank] for rank in found.subset)
    if not found.pays:
        return (
            f"this job does not gain from several devices: together ~{found.together:,.0f} samples/s, "
            f"{devices[found.single]} alone ~{found.best_single:,.0f}; use devices={names!r}"
        )
    if found.best >= WORTH_IT * found.together:
        return (
            f"fewer devices would be faster (~{found.best:,.0f} against ~{found.together:,.0f} samples/s): "
            f"use devices={names!r}"
        )
    return None
