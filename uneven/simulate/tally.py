"""What is counted while a run is simulated: every member's time by state, samples, lanes, and efficiency over time."""

from collections.abc import Sequence
from typing import NamedTuple

STATES = ("compute", "communication", "wait", "settling", "idle")
COMPUTE, COMMUNICATION, WAIT, SETTLING, IDLE = range(len(STATES))
LANES = 16  # members that are drawn, at even distances
LANE_SPANS = 600  # of one lane, from the run's beginning
POINTS = 120  # of the efficiency over time
MAX_MARKS = 4096


class Span(NamedTuple):
    """What a rank did in an interval of simulated time: one of STATES."""

    rank: int
    state: str
    start_s: float
    end_s: float


class _Mark(NamedTuple):
    at_s: float
    samples: int
    possible: float  # samples that those who were there could have trained by then, each alone


class Tally:
    """`pass_time` moves the clock; `spend` says what a member did meanwhile."""

    def __init__(self, members: int) -> None:
        self.now_s = 0.0
        self.samples = 0  # that count, those trained again once
        self.possible = 0.0
        self.again = 0
        self.rounds = 0
        self.eval_s = 0.0  # of all members' time
        self.sums_s = 0.0
        self.sums_between_s = 0.0  # of the time of sums, what the network between machines took
        self.trained: list[int] = []
        self.spent: list[list[float]] = []  # by member, in the order of STATES
        self.lanes: list[Span] = []
        self._drawn: dict[int, int] = {}  # members that are drawn: spans so far
        self._saved: tuple[list[int], int] = ([], 0)
        self._marks = [_Mark(0.0, 0, 0.0)]
        self._every = 1
        self._unmarked = 0
        self.grow(members)
        chosen = min(LANES, members)
        self._drawn = {(place * members) // chosen: 0 for place in range(chosen)}

    def grow(self, members: int) -> None:
        """Room for a member that has joined."""
        while len(self.trained) < members:
            self.trained.append(0)
            self.spent.append([0.0] * len(STATES))

    def spend(self, number: int, start_s: float, *parts: tuple[int, float], is_drawn: bool = True) -> None:
        """What a member did from a moment on: states, one after the other, and the seconds of each.

        They are spans of its lane, if it is one of those that are drawn.
        """
        spent = self.spent[number]
        for state, seconds in parts:
            spent[state] += seconds
        if not is_drawn or self._drawn.get(number, LANE_SPANS) >= LANE_SPANS:
            return
        for state, seconds in parts:
            if seconds > 0.0:
                self._drawn[number] += 1
                self.lanes.append(Span(number, STATES[state], start_s, start_s + seconds))
            start_s += seconds

    def evaluate(self, members: Sequence[int], seconds: float) -> None:
        """At an epoch's end; not training time, so it does not count against the efficiency."""
        if seconds:
            for number in members:
                self.spend(number, self.now_s, (IDLE, seconds))
            self.eval_s += len(members) * seconds
            self.pass_time(self.now_s + seconds, 0.0)

    def train(self, number: int, samples: int) -> None:
        self.trained[number] += samples
        self.samples += samples

    def lose(self, number: int, samples: int, again: int) -> None:
        """Samples of a member that do not count, `again` of them trained in vain."""
        self.trained[number] -= samples
        self.samples -= samples
        self.again += again

    def save(self) -> None:
        """A checkpoint, at an epoch's end; plain DDP goes back to it."""
        self._saved = (list(self.trained), self.samples)

    def go_back(self) -> None:
        """To the last checkpoint: what was trained since then is trained again."""
        trained, samples = self._saved
        self.again += self.samples - samples
        self.trained = [*trained, *([0] * (len(self.trained) - len(trained)))]
        self.samples = samples

    def pass_time(self, until_s: float, speed: float) -> None:
        """To this moment; `speed`: the samples per second that those who are there train alone, 0 for an evaluation."""
        if until_s > self.now_s:
            self.possible += speed * (until_s - self.now_s)
            self.now_s = until_s

    def mark(self) -> None:
        """A point of the efficiency over time; called after every step or round."""
        self._unmarked += 1
        if self._unmarked < self._every or self.now_s <= self._marks[-1].at_s:
            return
        self._unmarked = 0
        self._marks.append(_Mark(self.now_s, self.samples, self.possible))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._every *= 2

    def over_time(self) -> tuple[tuple[float, float], ...]:
        """(seconds, efficiency since the point before)."""
        last = _Mark(self.now_s, self.samples, self.possible)
        marks = self._marks if self._marks[-1] == last else [*self._marks, last]
        step_s = self.now_s / POINTS
        points, before = [], marks[0]
        for mark in marks[1:]:
            is_end = mark is marks[-1]
            if (mark.at_s - before.at_s >= step_s or is_end) and mark.possible > before.possible:
                found = (mark.samples - before.samples) / (mark.possible - before.possible)
                points.append((mark.at_s, max(0.0, found)))
                before = mark
        return tuple(points)
