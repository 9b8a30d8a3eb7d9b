"""Who takes part in a simulated run, and what chance does to them: failures, joins and slowdowns at given rates.

A member keeps its number for the whole run; the ranks of a generation are the members that are there, in their order.
Random numbers are the same on every CPU: nothing but uniform numbers, + - * /, roots and comparisons. `random.gauss`
and `random.expovariate` use log, sin and cos, whose last bit depends on the machine's C library.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from uneven.policy.axis import Axis
from uneven.simulate.cluster import Cluster, Job, RankKind
from uneven.simulate.links import Links
from uneven.simulate.tally import Tally

NEVER = float("inf")
TABLE_SIZE = 1024


def _make_table() -> tuple[float, ...]:
    """Numbers with mean 0 and deviation 1, close to a normal distribution: each a sum of three uniform ones."""
    rng = random.Random(0)
    drawn = [rng.random() + rng.random() + rng.random() - 1.5 for _ in range(TABLE_SIZE // 2)]
    scale = math.sqrt(len(drawn) / math.fsum(value * value for value in drawn))
    return tuple([scale * value for value in drawn] + [-scale * value for value in drawn])


_TABLE = _make_table()


class Draws:
    """A stream of random numbers of its own, by seed and name."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed} {name}").random

    def normals(self, count: int) -> list[float]:
        uniform, table = self._random, _TABLE
        return [table[int(TABLE_SIZE * uniform())] for _ in range(count)]

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


@dataclass(slots=True)
class Member:
    """A device that takes part, or did: `factor` is how much slower it is at the moment."""

    number: int
    kind: RankKind
    machine: int
    factor: float = 1.0
    is_lost: bool = False
    lost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """The same ranks from one failure or join to the next, and what every generation of a run shares."""

    job: Job
    axis: Axis
    ranks: list[Member]
    links: Links
    draws: Draws
    tally: Tally

    @property
    def numbers(self) -> list[int]:
        return [member.number for member in self.ranks]

    @property
    def speed(self) -> float:
        """Samples per second of these ranks, each alone."""
        return speed_of(self.ranks, self.job)


def speed_of(members: Sequence[Member], job: Job) -> float:
    return math.fsum(member.kind.speed(job.batch_size) for member in members)


class Members:
    """The members of a run and the next thing that happens to them; `take` it when its time has come."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.all = [
            Member(number, kind, machine)
            for number, (kind, machine) in enumerate(zip(cluster.ranks, cluster.machines, strict=True))
        ]
        self._draws = Draws(cluster.seed, "what happens")
        self._rates = {
            "failure": cluster.failures_per_hour,
            "join": cluster.joins_per_hour,
            "slowdown": cluster.slowdowns_per_hour,
        }
        self._next_s = {kind: self._after(kind, 0.0) for kind in self._rates}
        self._recoveries: list[tuple[float, int]] = []
        self.failures = 0
        self.joins = 0

    @property
    def there(self) -> list[Member]:
        return [member for member in self.all if not member.is_lost]

    @property
    def next_s(self) -> float:
        """When the next thing happens."""
        return min([*self._next_s.values(), *(at_s for at_s, _ in self._recoveries)])

    def links(self, backend: str) -> Links:
        machines = tuple(member.machine for member in self.there)
        return Links(machines, self._cluster.inside, self._cluster.between, backend)

    def take(self) -> tuple[str, Member | None]:
        """Let the next thing happen: "failure", "join", "slowdown" or "recovery", and whom it is about."""
        if self._recoveries and self._recoveries[0][0] <= min(self._next_s.values()):
            _, number = self._recoveries.pop(0)
            self.all[number].factor = 1.0
            return "recovery", self.all[number]
        kind = min(self._next_s, key=lambda one: self._next_s[one])
        at_s = self._next_s[kind]
        self._next_s[kind] = self._after(kind, at_s)
        if kind == "join":
            return kind, self._join()
        there = self.there
        member = there[self._draws.below(len(there))]
        if kind == "slowdown":
            member.factor = self._cluster.slowdown_factor
            self._recoveries = [one for one in self._recoveries if one[1] != member.number]
            self._recoveries.append((at_s + self._cluster.slowdown_s, member.number))
            return kind, member
        if len(there) == 1:
            return kind, None  # the last one: the run could not go on, and is not simulated further into ruin
        member.is_lost = True
        member.lost_s = at_s
        member.factor = 1.0
        self._recoveries = [one for one in self._recoveries if one[1] != member.number]
        self.failures += 1
        return kind, member

    def _join(self) -> Member:
        self.joins += 1
        lost = [member for member in self.all if member.is_lost]
        if lost:
            back = min(lost, key=lambda member: member.lost_s)
            back.is_lost = False
            return back
        model = self.all[self._draws.below(len(self.all))]
        self.all.append(Member(len(self.all), model.kind, model.machine))
        return self.all[-1]

    def _after(self, kind: str, now_s: float) -> float:
        rate = self._rates[kind]
        return now_s + 3600.0 / rate * self._draws.exponential() if rate else NEVER
