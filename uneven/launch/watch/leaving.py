"""Ranks that leave a run on purpose, as the watch sees them: asked, told, handed in, gone.

Held by launch/watch/watch.py. A rank that was told hands in what it has trained with its next step or round, and all
ranks wait there (train/elastic/leaving.py); the next generation is without it. Who cannot leave is refused in words,
and stays.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from uneven.comm.store import Store, get_text
from uneven.launch.control.leave_requests import ENDS, Answer, LeaveRequest
from uneven.launch.heartbeat import LEAVE, STAY, handed_key, leave_key, suspicion_key
from uneven.launch.watch.deadlines import RankHealth
from uneven.launch.watch.generations import Generations, count_ranks, steps_done
from uneven.train.elastic.leaving import PARTING
from uneven.train.elastic.membership import Generation

ARRIVE_S = 1.0  # for the other ranks to come as far, once one of them has
PARTING_S = 5.0  # for all of it; then it is a group that ranks have lost
NOT_BEGUN = "the run has not begun to train"
Refusal = Callable[[Collection[int]], str | None]


class Leaving:
    """Life cycle: one per launched run, with its watch; `ask` at any time, `look` at every look of the watch.

    `ranks` is the watch's list. `give_up` ends a process that has not joined yet; `on_gone` hears of every one that
    has left, with a line about it.
    """

    def __init__(
        self,
        store: Store,
        ranks: list[RankHealth],
        generations: Generations,
        give_up: Callable[[int], None],
        on_gone: Callable[[int, str], None],
    ) -> None:
        self._store, self._ranks, self._generations = store, ranks, generations
        self._give_up, self._on_gone = give_up, on_gone
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

    def ask_terminated(self, on_refused: Callable[[], None]) -> None:
        """Ranks of other machines that got a SIGTERM leave; where one cannot, the run is to stop and to be saved."""

        def answer(found: Answer) -> None:
            if "refused" in found:
                on_refused()

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
        self.is_parting, self._since_s = False, None

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
            self.is_parting, self._since_s = False, None
            return None
        return self._part(told_all, refusal, now_s)

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
            self._give_up(number)
            self._note_gone(number, f"{newcomer.device} on {newcomer.host} leaves before it has joined")
        numbers = [number for number in numbers if number not in self._generations.given_up]
        if not numbers:
            self._answer_left(request, self._find_lines(request))
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
        present = set(self._generations.numbers)
        if not request.is_open():
            del self._open[request]
            self._stay(told)
        elif not present & {*told}:
            self._answer_left(request, [self._lines.get(number, "") for number in told])

    def _find_lines(self, request: LeaveRequest) -> list[str]:
        return [self._lines.get(number, "") for number in request.home]

    def _answer_left(self, request: LeaveRequest, lines: list[str]) -> None:
        del self._open[request]
        request.answer({"left": "; ".join(dict.fromkeys(filter(None, lines))) or "it was not in the run any more"})

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
        arrived = [n for n in others if get_text(self._store, suspicion_key(present, members[n])) is not None]
        is_begun = bool(handed) or any(
            get_text(self._store, suspicion_key(present, members[n])) == PARTING for n in arrived
        )
        self._since_s = (now_s if self._since_s is None else self._since_s) if is_begun else None
        waited_s = 0.0 if self._since_s is None else now_s - self._since_s
        self.is_parting = is_begun and waited_s < PARTING_S
        if not handed or not arrived or (len(arrived) < len(others) and waited_s < ARRIVE_S):
            return None
        self._since_s, self.is_parting = None, False
        if (why := refusal({*handed})) is not None:  # another one was lost meanwhile
            for request in [request for request, meant in self._open.items() if {*meant} & {*handed}]:
                self._refuse(request, why)
            done = max(steps_done(self._ranks[number].status) for number in numbers)
            return self._generations.repeat(f"{self._names(handed)} cannot leave now ({why})", done)
        return self._let_go({number: int(samples) for number, samples in handed.items()})

    def _let_go(self, handed: dict[int, int]) -> Generation:
        left = count_ranks(len(self._generations.numbers) - len(handed), "goes on", "go on")
        for number, samples in handed.items():
            name = self._ranks[number].name(number)
            self._note_gone(number, f"{name} has handed in {samples:,} samples and left: {left}")
        verb = "leaves" if len(handed) == 1 else "leave"
        return self._generations.let_go(list(handed), f"{self._names(handed)} {verb}: {left}")

    def _note_gone(self, number: int, line: str) -> None:
        self._lines[number] = line
        self._on_gone(number, line)

    def _names(self, numbers: Collection[int]) -> str:
        return ", ".join(self._ranks[number].name(number) for number in numbers)
