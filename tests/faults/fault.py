"""One thing that happens to a run of the storm, and how such things are drawn. See cases.py for the kinds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SILENT_S = 2.0  # after which a silent rank is lost in the storm
HOLD_S = 10.0
STAGES = ("average", "snapshot", "sent snapshot")  # of a round, in which a bit changes
INSIDE = ("flip", "hold")  # done by the rank to itself (inside.py)


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one process or machine of a run."""

    kind: str
    victim: int  # the number of its process, of a machine for `cut` and `join`; any for `delay` and `full`
    at: float  # when this part of the run's samples is trained
    later_ms: float  # and so much later: anywhere inside a step, a sum or what lies between
    for_s: float = 0.0  # until it is woken, plugged in, or the disk has room again
    how: str = ""  # flip: the stage; cut: cable, flicker or launcher

    @property
    def is_loss(self) -> bool:
        """Whether the others must go on without it."""
        if self.kind == "cut":
            return self.how != "flicker"
        if self.kind == "flip":
            return self.how != "average"
        return self.kind in ("kill", "stop")

    @property
    def may_be_loss(self) -> bool:
        """Of two ranks with different averages nobody is blamed, of more the odd one is. Who wakes up late is lost, but
        for a launcher on a busy machine that could not look meanwhile: it counts the silence from its next look on."""
        return self.is_loss or self.kind == "flip" or (self.kind == "wake" and self.for_s > SILENT_S)

    def __str__(self) -> str:
        how = f"({self.how})" if self.how else ""
        return f"{self.kind}{how}:{self.victim}@{self.at:.2f}" + (f"+{self.for_s:.1f}s" if self.for_s else "")


def draw_faults(
    chance: random.Random, kind: str, allowed: Sequence[str], machines: Sequence[int], *, most: int, joins: int = 0
) -> tuple[Fault, ...]:
    """The fault of the case first, then up to `most` in all; one rank at least is never lost, on the first machine.

    On several machines rank 0's process is never hit: whoever takes its place is on that machine, if there is one.
    """
    ranks = sum(machines)
    victims = chance.sample(range(ranks), ranks) if len(machines) == 1 else [*chance.sample(range(1, ranks), ranks - 1)]
    found: list[Fault] = []
    more = [one for one in ("kill", "stop", "wake", "delay") if one in allowed] or [kind]
    for place in range(1 if kind == "hold" else chance.randint(1, most)):
        one = kind if place == 0 else chance.choice(more)
        made = _draw(chance, one, victims, machines, joins)
        if made is None:
            break
        if made.kind == "cut":  # with all that are on that machine
            first = sum(machines[: made.victim])
            victims = [victim for victim in victims if not first <= victim < first + machines[made.victim]]
        found.append(made)
    return tuple(found)


def _draw(chance: random.Random, kind: str, victims: list[int], machines: Sequence[int], joins: int) -> Fault | None:
    """None where nobody may be lost any more. Takes its victim out of `victims`."""
    if kind == "delay":
        return _moment(chance, kind, 0, (0.03, 0.95), chance.uniform(0.1, 1.0))
    if kind == "full":
        return _moment(chance, kind, 0, (0.1, 0.6), chance.uniform(0.2, 0.8))
    if kind == "cut":
        how = chance.choice(["cable", "cable", "launcher", "flicker"])
        sleeps_s = chance.uniform(0.2, 0.5) if how == "flicker" else 0.0
        return _moment(chance, kind, chance.randrange(1, len(machines)), (0.05, 0.9), sleeps_s, how)
    if kind == "join" and joins:
        return _moment(chance, kind, len(machines), (0.02, 0.2))
    if len(victims) < (2 if len(machines) == 1 else 1):
        return None
    victim = victims.pop()
    if kind == "join":  # by a kill, after which it is started again
        return _moment(chance, "kill", victim, (0.03, 0.2))
    if kind == "hold":
        return _moment(chance, kind, victim, (0.1, 0.8), HOLD_S)
    if kind == "flip":
        return _moment(chance, kind, victim, (0.05, 0.6), how=chance.choice(STAGES))
    if kind == "shards":
        kind = chance.choice(["kill", "kill", "stop"])
    # Clearly before or clearly after its silence counts: what happens in between is the scheduler's choice.
    sleeps_s = chance.choice([chance.uniform(0.05, 0.5 * SILENT_S), chance.uniform(1.5, 2.0) * SILENT_S])
    return _moment(chance, kind, victim, (0.03, 0.95), sleeps_s if kind == "wake" else 0.0)


def _moment(
    chance: random.Random, kind: str, victim: int, between: tuple[float, float], for_s: float = 0.0, how: str = ""
) -> Fault:
    return Fault(kind, victim, chance.uniform(*between), chance.uniform(0.0, 20.0), for_s, how)
