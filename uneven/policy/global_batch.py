"""How large a step of the exact policies is made where the user leaves it open: global_batch_size="auto".

Every step sums gradients once, whatever its size. Where that takes long against the compute of a step, several
micro-batches are accumulated into one: their sum is then a small part of the step. That changes what is trained (fewer,
larger steps), so it is done only where it was asked for, and never beyond the limit given.
"""

import math
from collections.abc import Sequence

from uneven.policy.finish import Cost, equal_finish, finish_ms

SUM_SHARE = 0.1  # of a step that the gradient sum may take before steps are made larger


def step_ms(costs: Sequence[Cost], samples: int, least: int = 1) -> float:
    """The compute time of a step of so many samples, split so that all ranks finish together."""
    return finish_ms(costs, equal_finish(costs, samples, least=least))


def choose_factor(compute_ms: float, sum_ms: float, most: int) -> int:
    """How many times as large to make a step: the least that brings the sum down to SUM_SHARE, and at most `most`.

    >>> choose_factor(compute_ms=10.0, sum_ms=1.0, most=4), choose_factor(compute_ms=1.0, sum_ms=0.3, most=4)
    (1, 3)
    """
    if most <= 1 or compute_ms <= 0.0:
        return 1
    wanted = math.ceil(sum_ms * (1.0 - SUM_SHARE) / (SUM_SHARE * compute_ms) - 1e-9)
    return min(max(1, wanted), most)
