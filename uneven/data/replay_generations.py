"""The generations of a recorded run in which ranks were lost or joined, as its log tells them, for a replay.

A replay trains with the same members in the same groups. Each member does in a generation what counts of it: the parts
of its log, the rounds that were committed, the events that were over. Then all of them settle, by the code of the run
itself (train/elastic/settler.py), and whoever was lost leaves. What a lost rank had trained beyond that is not in the
log, and is not repeated. A member is told by its name, which the log has for each of its rows.

Read by data/replay.py, followed by train/elastic/replay_membership.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uneven.policy.recorded import RecordedShares, Round

Part = tuple[int, int, int]  # slot, first, samples


@dataclass(frozen=True)
class End:
    """Where a generation ended, as the next one began with it."""

    trained: int  # slots that were trained then, by all members
    event: int  # all events up to this slot were over
    averages: int  # of buffers
    rounds: int  # of a local policy, that were committed in this generation
    has_loss: bool  # the mean loss for an event that was not over was known
    is_over: bool  # nothing was left to train, and all had finished


@dataclass(frozen=True)
class RecordedGeneration:
    """`number` counts those that ranks have settled in: the log may leave some out."""

    number: int
    members: tuple[str, ...]  # in rank order
    newcomers: tuple[str, ...]
    source: str | None  # whose state the others took over; None of the first
    parts: Mapping[str, int]  # that each member had trained when it began
    lr_scale: float | None
    end: End | None  # None of the last
    why: str = ""


@dataclass(frozen=True)
class RecordedGenerations:
    """All generations of a run, and every member's log: its parts, and its rounds of a local policy."""

    generations: tuple[RecordedGeneration, ...]
    logs: Mapping[str, Sequence[Part]]
    rounds: Mapping[str, Sequence[Round]]

    @classmethod
    def read(
        cls, segments: Sequence[Mapping[str, Any]], members: Sequence[str | None], logs: Any, rounds: Any
    ) -> "RecordedGenerations":
        """From the entries of log.json. ValueError where they do not tell all that a replay must know."""
        found = []
        if any("members" not in segment for segment in segments):
            raise ValueError("it was resumed, too")
        if len(members) != len(logs) or None in members or len(set(members)) != len(members):
            raise ValueError("not all of its ranks are known by name")
        for number, segment in enumerate(segments):
            later = segments[number + 1 :]
            waiting = {name for one in later for name in one["newcomers"]}  # it had not settled before
            following = later[0] if later else None
            found.append(
                RecordedGeneration(
                    number,
                    tuple(name for name in segment["members"] if name not in waiting),
                    tuple(name for name in segment.get("newcomers", ()) if name not in waiting),
                    segment.get("source"),
                    segment.get("parts", {}),
                    segment.get("lr_scale"),
                    None if following is None else _end(following),
                    segment.get("why", ""),
                )
            )
        own_logs, own_rounds = (dict(zip(map(str, members), rows, strict=True)) for rows in (logs, rounds))
        named = dict.fromkeys(name for one in found for name in one.members)
        if unknown := own_logs.keys() - named.keys():
            raise ValueError(f"it does not tell when {min(unknown)} trained")
        known = cls(
            tuple(found),
            {name: own_logs.get(name, []) for name in named},  # who was lost before its first part has none
            {name: own_rounds.get(name, []) for name in named},
        )
        known.check()
        return known

    def check(self) -> None:
        """ValueError where the generations do not fit the members' logs."""
        for name, rounds in self.rounds.items():
            own = [one for one in self.generations if name in one.members]
            committed = sum(one.end.rounds for one in own if one.end is not None)
            known, was_lost = max(0, len(rounds) - 1), own[-1].end is not None
            if known < committed or (was_lost and known > committed):  # a lost one has no rounds beyond those
                raise ValueError(f"not all rounds of {name} are known")

    @property
    def most_ranks(self) -> int:
        """So many ranks trained at once."""
        return max(len(one.members) for one in self.generations)

    def roles(self) -> list[list[str]]:
        """For every process of a replay the members that it is, one after the other: who joined takes a place that is
        free by then.
        """
        roles: list[list[str]] = [[name] for name in self.generations[0].members]
        for generation in self.generations[1:]:
            for newcomer in generation.newcomers:
                free = next((one for one in roles if one[-1] not in generation.members), None)
                if free is None:
                    roles.append(free := [])
                free.append(newcomer)
        return roles

    def after(self, number: int) -> RecordedGeneration | None:
        return self.generations[number + 1] if number + 1 < len(self.generations) else None

    def span(self, name: str, number: int) -> tuple[int, int]:
        """The first of a member's parts in a generation, and the one after its last."""
        following = self.after(number)
        is_last = following is None or name not in following.members
        end = len(self.logs[name]) if is_last or following is None else following.parts.get(name, 0)
        return self.generations[number].parts.get(name, 0), end

    def rounds_of(self, name: str, number: int) -> list[Round]:
        """A member's rounds in a generation; the first entry tells where it began."""
        place = 1
        for one in self.generations[:number]:
            if name in one.members:
                place += 0 if one.end is None else one.end.rounds
        generation, (first, _) = self.generations[number], self.span(name, number)
        count = len(self.rounds[name]) if generation.end is None else generation.end.rounds
        start = self.rounds[name][place - 1] if self.rounds[name] else Round(0, 0, 0, 1.0)
        scale = start.scale if generation.lr_scale is None else generation.lr_scale
        return [Round(start.due, first, first, scale), *self.rounds[name][place : place + count]]

    def open_slot(self, number: int, total: int) -> int:
        """The first slot that a later generation trained: nobody has passed it in this one."""
        later = (
            slot
            for one in self.generations[number + 1 :]
            for name in one.members
            for slot, _, _ in self.logs[name][slice(*self.span(name, one.number))]
        )
        return min(later, default=total)

    def shares(self, number: int, slots: int) -> RecordedShares:
        """The policy that repeats an exact generation's shares."""
        generation = self.generations[number]
        before = self.generations[number - 1].end if number else None
        first = 0 if before is None else before.trained
        stop = slots if generation.end is None else generation.end.trained
        plan = [[0] * len(generation.members) for _ in range(slots)]
        for rank, name in enumerate(generation.members):
            for slot, _, count in self.logs[name]:
                if first <= slot < stop:
                    plan[slot][rank] = count
        return RecordedShares(tuple(tuple(shares) for shares in plan), first, stop)


def _end(following: Mapping[str, Any]) -> End:
    return End(
        trained=following["slot"],
        event=following["event"],
        averages=following["averages"],
        rounds=following["rounds"],
        has_loss=following["has_loss"],
        is_over=following["is_over"],
    )
