"""What ranks of a local policy tell each other when others are lost, and what follows from it. Pure.

The *lineage* of a run is the rounds that count: for every generation of its group, how many were committed. A round is
committed if any rank that is left has its average. Ranks that are left have merged all rounds of the lineage but for
the last, which some of them may have in flight. A slot counts once it is in an average of the lineage, or while a rank
that is left has trained it since: nothing else of a rank that is gone counts, and its other slots are trained again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from uneven.policy.ledger import Ledger

Part = tuple[int, int, int]  # slot, first, samples
Runs = list[list[int]]  # [slot, first, samples, count] of parts that follow each other


class Era(NamedTuple):
    """A generation in the lineage: its members, in rank order, and how many of its rounds count."""

    generation: int
    rounds: int
    members: tuple[str, ...]


@dataclass
class Lineage:
    """The rounds that one rank knows to count: of earlier generations, and of the one that it trains in."""

    past: list[Era] = field(default_factory=list)
    generation: int = 0
    members: tuple[str, ...] = ()
    rounds: int = 0  # of this generation, merged by this rank

    @property
    def eras(self) -> list[Era]:
        return [*self.past, Era(self.generation, self.rounds, self.members)]

    @property
    def merged(self) -> int:
        """Rounds of all generations."""
        return sum(era.rounds for era in self.eras)

    def count_round(self) -> None:
        """This rank has merged one more."""
        self.rounds += 1

    def gone(self, members: Sequence[str]) -> list[str]:
        """Everyone that was ever in it and is not one of these, in order."""
        known = dict.fromkeys(member for era in self.eras for member in era.members)
        return [member for member in known if member not in members]


@dataclass(frozen=True)
class Held:
    """What one rank that is left has trained."""

    trained: Runs  # its parts since the last event that it has passed
    given: tuple[int, ...] = ()  # slots that it was to train next
    end: tuple[int, int] = (0, 0)  # an epoch of a stream and its samples, where it was told of the end; else 0 samples

    def to_json(self) -> list[Any]:
        return [self.trained, list(self.given), list(self.end)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> "Held":
        trained, given, (epoch, samples) = data
        return cls(trained, tuple(given), (epoch, samples))


def settled_ledger(held: Iterable[Held], lost: Iterable[Iterable[Part]], passed: int) -> Ledger:
    """What is trained: all before the last event, what ranks that are left have trained, what is known of the others.

    `lost` are the parts of the lineage that were trained by ranks which are gone. ValueError where a slot was trained
    twice.
    """
    return Ledger.from_logs([*(decode(one.trained) for one in held), *lost], done=passed)


def trained_again(ledger: Ledger, held: Iterable[Held]) -> list[int]:
    """The slots that ranks which are gone may have trained and that nobody has: at most what they had claimed."""
    given = {slot for one in held for slot in one.given}
    return [slot for first, stop in ledger.gaps for slot in range(first, stop) if slot not in given]


def encode(parts: Iterable[Part]) -> Runs:
    runs: Runs = []
    for slot, first, samples in parts:
        if runs:
            last = runs[-1]
            count = last[3]
            if [slot, first, samples] == [last[0] + count, last[1] + count * last[2], last[2]]:
                last[3] += 1
                continue
        runs.append([slot, first, samples, 1])
    return runs


def decode(runs: Iterable[Sequence[int]]) -> list[Part]:
    return [
        (slot + place, first + place * samples, samples)
        for slot, first, samples, count in runs
        for place in range(count)
    ]
