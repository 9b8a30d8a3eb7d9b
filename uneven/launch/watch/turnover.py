"""Ranks that join a run in progress, and ranks that leave it on purpose, as the launcher's watch sees them.

Held by launch/watch/watch.py. `Joining`: a machine comes by the leader's door, or a rank of this machine that was lost
is started again (setting `restarts`). Either warms up and measures by itself while the others train on; when it says
that it is ready, the next generation has it as a rank. Whatever happens to it before costs the run one line.
`Leaving`: a rank that was told hands in what it has trained with its next step or round, and all ranks wait there
(train/settler.py); the next generation is without it. Who cannot leave is refused in words, and stays.
"""

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from uneven.comm.store import Store, get_text
from uneven.launch.control.leave_requests import ENDS, Answer, LeaveRequest
from uneven.launch.heartbeat import LEAVE, STAY, handed_key, leave_key, ready_key, settled_key, suspicion_key
from uneven.launch.local_ranks import Newcomer
from uneven.launch.nodes.remote import AllRanks
from uneven.launch.watch.generations import Generations, count_ranks, steps_done
from uneven.launch.watch.lost import RankHealth
from uneven.results.progress import Reporter
from uneven.train.rank_info import PARTING, Generation
from uneven.train.requests import Requests

ARRIVE_S = 1.0  # for the other ranks to come as far, once one of them has
PARTING_S = 5.0  # for all of it; then it is a group that ranks have lost
NOT_BEGUN = "the run has not begun to train"
Refusal = Callable[[Collection[int]], str | None]


class Joining:
    """Life cycle: one per launched run, with its watch. `ranks` is the watch's list, which grows by newcomers."""

    def __init__(
        self,
        processes: AllRanks,
        store: Store,
        ranks: list[RankHealth],
        generations: Generations,
        reporter: Reporter,
    ) -> None:
        self._processes = processes
        self._store = store
        self._ranks = ranks
        self._generations = generations
        self._reporter = reporter
        self._restarts = 0  # that were used up
        self._allowed = 0  # by the setting, which travels in the heartbeats of ranks that are in the run
        self._together: dict[int, tuple[str, int]] = {}  # process -> host and number of those that it came with

    def take_arrivals(self, now_s: float) -> None:
        """Machines that have come by the door; before exit codes are read, which are theirs too from now on."""
        first = len(self._ranks)
        for newcomer in self._processes.arrivals(first, self._generations.present):
            self._expect(newcomer, now_s, first)

    def restart(self, lost: Collection[int], now_s: float) -> None:
        """Start those of the lost ranks again that are of this machine, as often as the setting says."""
        self._allowed = max([self._allowed, *(int(self._ranks[n].status.get("restarts", 0)) for n in lost)])
        for number in sorted(lost):
            if self._restarts >= self._allowed:
                return
            newcomer = self._processes.restart(number, len(self._ranks), self._generations.present)
            if newcomer is not None:
                self._restarts += 1
                self._expect(newcomer, now_s, len(self._ranks))
                times = f"restart {self._restarts} of {self._allowed}"
                line = f"a rank on {newcomer.device} is started again, and joins when it is ready ({times})"
                self._reporter.say([line])

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
            self._processes.turn_away(number, cause)

    def turn_away(self, numbers: Collection[int], cause: str) -> list[str]:
        """These processes are in the roster and could not settle: their machines may go; a line about each.

        Nobody told them: `uneven join` stayed connected to the run, without ranks, until its end.
        """
        why = f"could not settle ({cause})"
        for number in numbers:
            self._processes.turn_away(number, why)
        return [f"{self._ranks[number].name(number)} {why}" for number in numbers]

    def end(self) -> None:
        """The run is over: whoever waits, or has not settled, has not trained in it, and its machine is told so."""
        for number in [*self._generations.waiting, *self._generations.joining]:
            self._processes.turn_away(number, "the run was over before it could join")

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


class Leaving:
    """Life cycle: one per launched run, with its watch; `ask` at any time, `look` at every look of the watch."""

    def __init__(
        self, processes: AllRanks, store: Store, ranks: Sequence[RankHealth], generations: Generations
    ) -> None:
        """`ranks` is the watch's list."""
        self._processes = processes
        self._store = store
        self._ranks = ranks
        self._generations = generations
        self._open: dict[LeaveRequest, list[int]] = {}  # with the processes that it means, once they were told
        self._lines: dict[int, str] = {}  # of those who have gone
        self._terminated: set[int] = set()
        self._since_s: float | None = None  # when ranks were first seen to part
        self.is_parting = False  # ranks wait for the generation without one of them

    @property
    def is_asked(self) -> bool:
        return bool(self._open)

    def ask(self, requests: Sequence[LeaveRequest]) -> None:
        self._open.update((request, []) for request in requests)

    def ask_terminated(self, requests: Requests) -> None:
        """Ranks of other machines that got a SIGTERM leave; where one cannot, the run is to stop and to be saved."""

        def answer(found: Answer) -> None:
            if "refused" in found:
                requests.rank_signalled(signal.SIGTERM)

        for number in self._generations.numbers:
            if self._ranks[number].status.get("terminated") and number not in self._terminated:
                self._terminated.add(number)
                self.ask([LeaveRequest((number,), answer, is_urgent=True)])

    def end(self) -> None:
        """The run ends: whoever is asked to leave does not leave before.

        Ranks that were parting wait for a generation: from now on the watch heeds them as ranks that have lost a group.
        """
        for request in list(self._open):
            self._refuse(request, ENDS)
        self._forget_parting()

    def look(self, refusal: Refusal, now_s: float) -> Generation | None:
        """Tell those who may go, and answer; the generation without those who have handed in, where there are some.

        `refusal`: why the run cannot go on without these processes; empty where it cannot yet, None where it can.
        """
        for request, told in list(self._open.items()):
            if told or not request.is_open():
                self._follow(request, told)
            else:
                self._decide(request, refusal)
        told_all = self._told()
        if not told_all:
            self._forget_parting()
            return None
        return self._part(told_all, refusal, now_s)

    def _forget_parting(self) -> None:
        self._since_s = None
        self.is_parting = False

    def _told(self) -> list[int]:
        present = set(self._generations.numbers)
        return sorted({number for numbers in self._open.values() for number in numbers} & present)

    def _decide(self, request: LeaveRequest, refusal: Refusal) -> None:
        """Whether those who are meant may go now."""
        numbers = self._find(request)
        if isinstance(numbers, str):
            self._refuse(request, numbers)
            return
        waiting = self._generations.waiting
        for number in [number for number in numbers if number in waiting]:
            newcomer = waiting.pop(number)
            self._generations.given_up.add(number)
            self._processes.give_up(number)
            self._note_gone(number, f"{newcomer.device} on {newcomer.host} leaves before it has joined")
        numbers = [number for number in numbers if number not in self._generations.given_up]
        if not numbers:
            self._answer_left(request, request.home)
            return
        why = refusal({*self._told(), *numbers})
        if not why:
            known = (self._ranks[number].status.get("stays_because") for number in self._generations.numbers)
            why = next(filter(None, known), why)
        if any(number in self._generations.joining for number in numbers):
            return  # it settles, which takes a moment
        if why or (why == "" and request.is_urgent):
            self._refuse(request, why or NOT_BEGUN)
        elif why is None:
            self._open[request] = numbers
            for number in numbers:
                self._store.set(leave_key(self._ranks[number].member), LEAVE)

    def _find(self, request: LeaveRequest) -> list[int] | str:
        """The processes that are meant, or what is wrong."""
        if request.ranks is None:
            return list(request.home)
        present, found = self._generations.numbers, []
        for rank in request.ranks:
            if not 0 <= rank < len(present):
                return f"there is no rank {rank}: the run has ranks 0 to {len(present) - 1}"
            number = present[rank]
            if number not in request.home and not request.may_be_elsewhere:
                return f"{self._ranks[number].name(number)} is not on this machine"
            found.append(number)
        return found

    def _follow(self, request: LeaveRequest, told: list[int]) -> None:
        """A request that was passed on: over where all of them are gone, or where it was withdrawn."""
        if not request.is_open():
            del self._open[request]
            self._stay(told)
        elif not {*self._generations.numbers} & {*told}:
            self._answer_left(request, told)

    def _answer_left(self, request: LeaveRequest, numbers: Sequence[int]) -> None:
        del self._open[request]
        lines = dict.fromkeys(self._lines[number] for number in numbers if number in self._lines)
        request.answer({"left": "; ".join(lines) or "it was not in the run any more"})

    def _refuse(self, request: LeaveRequest, why: str) -> None:
        self._stay(self._open.pop(request))
        request.answer({"refused": why})

    def _stay(self, numbers: Collection[int]) -> None:
        others = {number for told in self._open.values() for number in told}
        for number in numbers:
            if number not in others:
                with suppress(RuntimeError):
                    self._store.set(leave_key(self._ranks[number].member), STAY)

    def _part(self, told: list[int], refusal: Refusal, now_s: float) -> Generation | None:
        numbers, present = self._generations.numbers, self._generations.present.number
        members = {number: self._ranks[number].member for number in numbers}
        handed = {n: text for n in told if (text := get_text(self._store, handed_key(present, members[n]))) is not None}
        others = [number for number in numbers if number not in handed]
        words = {number: get_text(self._store, suspicion_key(present, members[number])) for number in others}
        arrived = [number for number in others if words[number] is not None]
        is_begun = bool(handed) or PARTING in words.values()
        self._since_s = (now_s if self._since_s is None else self._since_s) if is_begun else None
        waited_s = 0.0 if self._since_s is None else now_s - self._since_s
        self.is_parting = is_begun and waited_s < PARTING_S
        if not handed or not arrived or (len(arrived) < len(others) and waited_s < ARRIVE_S):
            return None
        self._forget_parting()
        names = ", ".join(self._ranks[number].name(number) for number in handed)
        if (why := refusal({*handed})) is not None:  # another one was lost meanwhile
            for request in [request for request, meant in self._open.items() if {*meant} & {*handed}]:
                self._refuse(request, why)
            done = max(steps_done(self._ranks[number].status) for number in numbers)
            return self._generations.repeat(f"{names} cannot leave now ({why})", done)
        left = count_ranks(len(others), "goes on", "go on")
        for number, samples in handed.items():
            name = self._ranks[number].name(number)
            self._note_gone(number, f"{name} has handed in {int(samples):,} samples and left: {left}")
        verb = "leaves" if len(handed) == 1 else "leave"
        return self._generations.let_go(list(handed), f"{names} {verb}: {left}")

    def _note_gone(self, number: int, line: str) -> None:
        self._lines[number] = line
        self._processes.let_go(number, line)
