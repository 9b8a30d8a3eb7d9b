"""Processes that join a run in progress, as the watch sees them: from their start until they are in a roster.

Held by launch/watch/watch.py. A machine comes by the leader's door, and a rank of this machine that was lost may be
started again (setting `restarts`). Either warms up and measures by itself while the others train on; when it says that
it is ready, the next generation has it as a rank. Whatever happens to it before costs the run one line.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from uneven.comm.store import Store
from uneven.launch.heartbeat import ready_key, settled_key
from uneven.launch.local_ranks import Newcomer
from uneven.launch.watch.deadlines import RankHealth
from uneven.launch.watch.generations import Generations
from uneven.results.progress import Reporter
from uneven.train.elastic.membership import Generation


class Recruits(Protocol):
    """Starts processes that are to join the run."""

    def arrivals(self, number: int, present: Generation) -> list[Newcomer]:
        """Those of machines that have come since the last call: their processes have the numbers from this one on."""
        ...

    def restart(self, lost: int, number: int, present: Generation) -> Newcomer | None:
        """A lost process of this machine, started again under another number; None where it is not of this one."""
        ...

    def turn_away(self, number: int, why: str) -> None:
        """This process has not joined, and will not."""
        ...

    def let_go(self, number: int, line: str) -> None:
        """This process has left on purpose; the line says what it has handed in."""
        ...

    def lose(self, number: int, line: str) -> None:
        """The run goes on without this process, for the cause that the line tells."""
        ...


class Joining:
    """Life cycle: one per launched run, with its watch. `ranks` is the watch's list, which grows by newcomers."""

    def __init__(
        self,
        recruits: Recruits,
        store: Store,
        ranks: list[RankHealth],
        generations: Generations,
        reporter: Reporter,
    ) -> None:
        self._recruits, self._store, self._ranks = recruits, store, ranks
        self._generations, self._reporter = generations, reporter
        self._restarts = 0  # that were used up
        self._allowed = 0  # by the setting, which travels in the heartbeats of ranks that are in the run
        self._together: dict[int, tuple[str, int]] = {}  # process -> host and number of those that it came with

    def take_arrivals(self, now_s: float) -> None:
        """Machines that have come by the door; before exit codes are read, which are theirs too from now on."""
        first = len(self._ranks)
        for newcomer in self._recruits.arrivals(first, self._generations.present):
            self._expect(newcomer, now_s, first)

    def restart(self, lost: Collection[int], now_s: float) -> None:
        """Start those of the lost ranks again that are of this machine, as often as the setting says."""
        self._allowed = max([self._allowed, *(int(self._ranks[n].status.get("restarts", 0)) for n in lost)])
        for number in sorted(lost):
            if self._restarts >= self._allowed:
                return
            newcomer = self._recruits.restart(number, len(self._ranks), self._generations.present)
            if newcomer is not None:
                self._restarts += 1
                self._expect(newcomer, now_s, len(self._ranks))
                times = f"restart {self._restarts} of {self._allowed}"
                self._reporter.say(
                    [f"a rank on {newcomer.device} is started again, and joins when it is ready ({times})"]
                )

    def _expect(self, newcomer: Newcomer, now_s: float, first: int) -> None:
        self._together[self._generations.expect(newcomer)] = newcomer.host, first
        self._ranks.append(RankHealth(newcomer.member, newcomer.device, now_s, now_s))

    def forget_ended(self, causes: Mapping[int, str]) -> None:
        """These processes have ended, or are lost, before they were in a roster."""
        for number, cause in causes.items():
            newcomer = self._generations.waiting.pop(number)
            self._generations.given_up.add(number)
            place = f"{newcomer.device} on {newcomer.member.split('/')[0]}"
            self._reporter.say([f"{place} has not joined: {cause}; the run goes on without it"])
            self._recruits.turn_away(number, cause)

    def turn_away(self, numbers: Collection[int], cause: str) -> list[str]:
        """These processes are in the roster and could not settle: their machines may go; a line about each.

        Nobody told them: `uneven join` stayed connected to the run, without ranks, until its end.
        """
        why = f"could not settle ({cause})"
        for number in numbers:
            self._recruits.turn_away(number, why)
        return [f"{self._ranks[number].name(number)} {why}" for number in numbers]

    def end(self) -> None:
        """The run is over: whoever waits, or has not settled, has not trained in it, and its machine is told so."""
        for number in [*self._generations.waiting, *self._generations.joining]:
            self._recruits.turn_away(number, "the run was over before it could join")

    def admit(self, statuses: Sequence[Mapping[str, Any]]) -> Generation | None:
        """The generation with those who are ready, where the `statuses` of all present ranks say that others may join.

        The ranks of a machine that has come join together: every generation costs all others a moment. One that was
        started again waits for nobody: the next may be lost, too, before it is ready.
        """
        waiting = self._generations.waiting
        if not waiting or not all(status.get("admits") for status in statuses):
            return None
        is_ready = {number: self._store.check([ready_key(newcomer.member)]) for number, newcomer in waiting.items()}
        late = {self._together[number] for number, ready in is_ready.items() if not ready}
        ready = [number for number in waiting if self._together[number] not in late]
        return self._generations.admit(ready) if ready else None

    def note_settled(self) -> None:
        """Those who have settled with the others are ranks like them from then on."""
        number = self._generations.present.number
        for one in list(self._generations.joining):
            if self._store.check([settled_key(number, self._ranks[one].member)]):
                self._generations.joining.discard(one)
