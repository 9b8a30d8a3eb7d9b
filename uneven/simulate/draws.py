"""Random numbers that are the same on every CPU: nothing but uniform numbers, + - * /, roots and comparisons.

`random.gauss` and `random.expovariate` use log, sin and cos, whose last bit depends on the machine's C library.
"""

import math
import random

_SIZE = 1024


def _make_table() -> tuple[float, ...]:
    """Numbers with mean 0 and deviation 1, close to a normal distribution: each a sum of three uniform ones."""
    rng = random.Random(0)
    drawn = [rng.random() + rng.random() + rng.random() - 1.5 for _ in range(_SIZE // 2)]
    scale = math.sqrt(len(drawn) / math.fsum(value * value for value in drawn))
    return tuple([scale * value for value in drawn] + [-scale * value for value in drawn])


_TABLE = _make_table()


class Draws:
    """A stream of random numbers of its own, by seed and name."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed} {name}").random

    def normals(self, count: int) -> list[float]:
        uniform, table = self._random, _TABLE
        return [table[int(_SIZE * uniform())] for _ in range(count)]

    def exponential(self) -> float:
        """With mean 1, by comparisons alone (von Neumann's method)."""
        whole = 0
        while True:
            first = last = self._random()
            falling = 1
            while (drawn := self._random()) < last:
                last = drawn
                falling += 1
            if falling % 2:
                return whole + first
            whole += 1

    def below(self, count: int) -> int:
        return int(count * self._random())
