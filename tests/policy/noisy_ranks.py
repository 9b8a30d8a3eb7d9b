"""Ranks whose steps take noisy times, for tests of the exact policies."""

import random
from dataclasses import dataclass

from uneven.policy.finish import Cost


@dataclass
class NoisyRanks:
    """Ranks with true costs; the policy sees them only through noisy step times."""

    costs: list[Cost]
    jitter: float
    rng: random.Random

    def busy_ms(self, shares: tuple[int, ...]) -> list[float]:
        spikes = [3.0 if self.rng.random() < 0.01 else 1.0 for _ in shares]
        return [
            cost.time_ms(share) * spike * (1 + self.rng.uniform(-self.jitter, self.jitter))
            for cost, share, spike in zip(self.costs, shares, spikes, strict=True)
        ]
