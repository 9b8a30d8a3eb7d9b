"""The launcher's watch over its rank processes: heartbeats and exits in, losses (lost.py) heeded.

Called by launch/launcher.py and launch/nodes/lead.py, on the thread that waits for the run. There is no coordinator:
the ranks agree among themselves, and the watch only shows their progress, passes the stop request on, and looks for a
rank that fails, falls silent or hangs. Where the others can go on it publishes the next generation (generations.py),
which each rank's heartbeat reads; else it raises, and the launcher ends all processes.
"""

import json
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from uneven.comm.lost import sender_of
from uneven.comm.store import Store, get_text
from uneven.errors import NOTHING_TRAINED, RankError, StoppedError
from uneven.launch.heartbeat import (
    GENERATION_KEY,
    SAVE_KEY,
    SIGNAL_KEY,
    STOP_KEY,
    TERMINATED,
    heartbeat_key,
    roster_key,
    suspicion_key,
)
from uneven.launch.nodes.remote import AllRanks
from uneven.launch.payload import drop_tensors
from uneven.launch.processes import INTERRUPTED, describe_error, describe_exit, is_about_peer, read_errors
from uneven.launch.training import has_result
from uneven.launch.watch.generations import COMMON_ERRORS, Generations, count_ranks, describe_loss, is_past, steps_done
from uneven.launch.watch.lost import RankHealth, Signs, because, find_cause, find_early_ends, judge
from uneven.launch.watch.turnover import Joining, Leaving
from uneven.results.progress import Reporter
from uneven.train.rank_info import Generation
from uneven.train.requests import Requests

POLL_S = 0.1
GRACE_S = 1.5  # for the other ranks' error reports, once one has failed
ALONE_S = 3.0  # for a rank before its first step whose peers have been stopped
BEFORE_FIRST = ("setup", "compile", "communication", "wait")
STOP_S = 10.0  # at least, and at least `grace`, for all ranks to stop after the same step
DELAY_S = 2.0  # between two looks: this process itself was stopped or swapped out
SUSPECT_S = 1.0  # for the exit or the silence of a rank that another one misses
RESULT_S = 10.0  # for the other ranks' ends, where one was lost and the result is there
Show = Callable[[Sequence[Mapping[str, Any]], Generations], object]


class LostAtStartError(RankError):
    """Processes were lost before any had trained a step: whoever started them all may start the others again."""

    def __init__(self, message: str, causes: Mapping[int, str]) -> None:
        """`causes`: what became of each that is lost."""
        super().__init__(message)
        self.causes = causes


class Watch:
    """Life cycle: one per launched run; `wait()` once. The processes are numbered as the first generation's members."""

    def __init__(
        self,
        processes: AllRanks,
        store: Store,
        folder: Path,
        generations: Generations,
        reporter: Reporter,
    ) -> None:
        self._processes = processes
        self._store = store
        self._folder = folder
        self._reporter = reporter
        now = time.monotonic()
        pairs = zip(generations.present.members, generations.present.roster.devices, strict=True)
        self._ranks = [RankHealth(member, device, now, now) for member, device in pairs]
        self._generations = generations
        self._joining = Joining(processes, store, self._ranks, self._generations, reporter)
        self._leaving = Leaving(processes, store, self._ranks, self._generations)
        self._looked_s = now
        self._suspected_s: float | None = None  # when a rank was first heard to have lost the present group
        self._result_s: float | None = None  # when the result was first seen
        self._stop_sent_s: float | None = None
        self._unsure_s: float | None = None  # since when a loss is known of which nobody says what it means
        self._was_rank_signalled = False
        self._alone_since_s = now
        self._saves = 0  # checkpoints asked for
        self._may_drop_tensors = False  # of the payload
        self._show: Show = lambda *_: None

    def wait(self, requests: Requests, show: Show = lambda *_: None, *, keeps_payload: bool = False) -> None:
        """Until every rank has ended well or was given up; raises when the run fails. `requests` are passed on.

        `show` has the heartbeats at every look, for `uneven status`. `keeps_payload`: for ranks that start later.
        """
        self._show = show
        self._may_drop_tensors = not keeps_payload
        while not self._look(requests):
            time.sleep(POLL_S)

    def _look(self, requests: Requests) -> bool:
        """Once at everything; returns whether the run is over."""
        self._joining.note_settled()
        self._joining.take_arrivals(time.monotonic())
        signs = self._read_signs()  # before the heartbeats, so that the last ones are read
        now = time.monotonic()
        self._read_heartbeats(now)
        found = judge(self._ranks, signs, now)
        codes = found.codes
        late = self._generations.aside | self._generations.joining  # a newcomer has nobody to settle with at the end
        if all(code in signs.ended_well or n in late for n, code in enumerate(codes)) or self._is_past(now):
            self._joining.end()
            return True
        if found.failed or found.gone:
            self._lose_ended(found.failed, found.gone, requests)
        elif found.hanging:
            self._lose_hanging(found.hanging)
        else:
            self._let_go(requests, now)
            if not self._leaving.is_parting:
                self._heed_suspicion([n for n, code in enumerate(codes) if code in signs.ended_well], now)
                self._let_in(now)
        self._drop_mapped_tensors()
        self._pass_on(requests, now)
        if self._stop_sent_s is not None:
            self._check_left_alone(codes, now)
            self._check_stopping(self._stop_sent_s, now, requests.grace)
        return False

    def _read_signs(self) -> Signs:
        codes = self._processes.exit_codes()
        return Signs(
            codes=codes,
            gone=self._processes.lost(),
            stopped=self._processes.stopped(),
            aside=self._generations.aside,
            ended_well=(0,) if self._stop_sent_s is None else (0, INTERRUPTED),
        )

    def _let_in(self, now_s: float) -> None:
        """Processes that want to join: those that are ready are in the next generation."""
        # Read here: one of them may have been started again in this very look.
        codes, lost = self._processes.exit_codes(), self._processes.lost()
        waiting = self._generations.waiting
        errors = read_errors(self._folder, list(waiting))
        ended = {number: lost[number] for number in waiting if number in lost}
        for number in waiting:
            if (code := codes[number]) is not None:
                ended[number] = describe_error(errors[number]) if number in errors else f"it {describe_exit(code)}"
            elif self._ranks[number].silent_s(now_s) > self._ranks[number].silence_limit_s:
                ended[number] = "it fell silent"
                self._processes.give_up(number)
        self._joining.forget_ended(ended)
        if self._stop_sent_s is not None or has_result(self._folder):
            return
        can_start = [number for number in ended if number not in errors]  # an error would come again
        self._joining.restart(can_start, now_s)
        if self._generations.joining:
            return
        present = [self._ranks[number].status for number in self._generations.numbers]
        if (generation := self._joining.admit(present)) is not None:
            self._publish(generation)

    def _let_go(self, requests: Requests, now_s: float) -> None:
        """Ranks that were asked to leave: those that have handed in their work are not in the next generation."""
        self._leaving.ask(self._processes.asked())
        self._leaving.ask_terminated(requests)
        if not self._leaving.is_asked:
            return
        if self._stop_sent_s is not None or has_result(self._folder):
            self._leaving.end()
        elif (generation := self._leaving.look(self._refusal, now_s)) is not None:
            self._publish(generation)

    def _is_past(self, now_s: float) -> bool:
        """Whether the result is there and ranks that may still wait for a lost one have had their time."""
        if self._generations.present.number == 0 or not has_result(self._folder):
            return False
        self._result_s = now_s if self._result_s is None else self._result_s
        return now_s - self._result_s > RESULT_S

    def _lose_ended(self, failed: Sequence[int], gone: Mapping[int, str], requests: Requests) -> None:
        """These processes have failed or were killed, and those are on machines that are gone: go on, or raise."""
        if has_result(self._folder):
            self._generations.given_up |= {*failed, *gone}
            return
        refusal = self._refusal([*failed, *gone])
        if self._is_unsure(refusal, [*failed, *gone]) and self._may_say_more([*failed, *gone]):
            return
        errors = read_errors(self._folder, failed)
        joining = self._generations.joining  # what keeps one of them out is its own
        is_common = any(error["kind"] in COMMON_ERRORS for n, error in errors.items() if n not in joining)
        is_bug = sum(self._generations.is_repeated(error) for error in errors.values()) > 0  # all of them are noted
        others = [self._ranks[number].status for number in self._generations.numbers if number not in failed]
        if refusal is not None or is_common or is_bug or (errors and any(map(is_past, others))):
            if failed:
                raise self._failure(requests, refusal or "")
            has_begun = any(map(steps_done, self._statuses()))
            ends = "the run ends" if has_begun or refusal else "a loss before the first step ends the run"
            raise RankError(f"{next(iter(gone.values()))}{because(refusal)}; {ends} on all machines")
        causes = [
            f"{self._ranks[number].name(number)} "
            + (f"failed: {describe_error(errors[number])}" if number in errors else describe_exit(code or 0))
            for number, code in enumerate(find_early_ends(self._ranks, self._processes.exit_codes()))
            if number in failed
        ]
        self._go_on_without({*failed, *gone}, [*causes, *dict.fromkeys(gone.values())])

    def _is_unsure(self, refusal: str | None, lost: Sequence[int]) -> bool:
        """Whether the next heartbeats tell more: what a loss means, or the newest checkpoint where one is needed."""
        since_s = time.monotonic() if self._unsure_s is None else self._unsure_s
        left = [self._ranks[number] for number in self._generations.numbers if number not in lost]
        if refusal is not None and not self._has_trained({}):
            return True
        said = {"checkpoint", "ends_because"}
        asked = [rank for rank in left if "min_ranks" in rank.status and said & {*rank.status}]
        return refusal == "" or any(rank.heard_s <= since_s for rank in asked)

    def _may_say_more(self, lost: Sequence[int]) -> bool:
        """Whether to look again: ranks that have just begun to train say a moment later that they can go on."""
        now = time.monotonic()
        self._unsure_s = now if self._unsure_s is None else self._unsure_s
        codes = self._processes.exit_codes()
        runs = any(code is None and number not in lost for number, code in enumerate(codes))
        return runs and self._stop_sent_s is None and now - self._unsure_s < GRACE_S

    def _lose_hanging(self, hanging: Mapping[int, tuple[str, str]]) -> None:
        """These processes run and are silent, or one of them is stuck: it is ended, and the others go on, or raise."""
        names = {number: self._ranks[number].name(number) for number in hanging}
        if (refusal := self._refusal(hanging)) is not None:
            number, (what, advice) = next(iter(hanging.items()))
            error = RankError(f"{names[number]} {what}{advice}{because(refusal)}")
            now = time.monotonic()
            silent = [n for n in hanging if self._ranks[n].silent_s(now) > self._ranks[n].silence_limit_s]
            raise self._lost_at_start(error, {n: f"{names[n]} {hanging[n][0]}" for n in silent}, {})
        self._go_on_without(set(hanging), [f"{names[number]} {what}" for number, (what, _) in hanging.items()])

    def _refusal(self, lost: Collection[int]) -> str | None:
        return self._generations.refusal([rank.status for rank in self._ranks], lost)

    def _go_on_without(self, lost: set[int], causes: Sequence[str]) -> None:
        self._generations.given_up |= lost
        self._unsure_s = None
        if not lost & set(self._generations.numbers):
            return  # it had finished, and left the roster
        statuses = [self._ranks[number].status for number in self._generations.numbers if number not in lost]
        self._publish(self._generations.drop(lost, describe_loss(causes, statuses)))
        # Ended after the others know: a woken one finds that it is not in the roster any more.
        for number in lost:
            self._processes.give_up(number)
            self._processes.lose(number, self._generations.present.why)
        if self._stop_sent_s is None and not all(map(is_past, statuses)):
            self._joining.restart(lost, time.monotonic())

    def _publish(self, generation: Generation) -> None:
        """All ranks read it by their heartbeats within a moment, and settle."""
        self._show_ranks()  # before the first rank of the new roster adds lines of its own
        self._store.set(roster_key(generation.number), json.dumps(generation.to_json()))
        self._store.set(GENERATION_KEY, str(generation.number))
        self._reporter.say([generation.why])
        now = time.monotonic()
        for number in self._generations.numbers:
            self._ranks[number].restart(now)
        self._suspected_s = None

    def _heed_suspicion(self, ended: Sequence[int], now_s: float) -> None:
        """A rank has lost its group, and no process has failed: others have left the run, or a connection broke."""
        numbers, generation = self._generations.numbers, self._generations.present.number
        if not any("min_ranks" in self._ranks[number].status for number in numbers):
            return
        keys = {number: suspicion_key(generation, self._ranks[number].member) for number in numbers}
        causes = [text for key in keys.values() if (text := get_text(self._store, key)) is not None]
        causes.sort(key=lambda cause: sender_of(cause) is None)  # the others miss who has given up the group
        if not causes:
            return
        self._suspected_s = suspected_s = now_s if self._suspected_s is None else self._suspected_s
        if now_s - suspected_s < SUSPECT_S or any(self._ranks[n].heard_s <= suspected_s for n in {*numbers} - {*ended}):
            return
        if joining := self._generations.joining & {*numbers}:
            # A machine that joins may not be reached by all others.
            self._go_on_without(joining, self._joining.turn_away(joining, causes[0]))
            return
        if left := [n for n in numbers if n in ended or "min_ranks" not in self._ranks[n].status]:
            if len(left) == len(numbers):
                return  # all of them are past the run
            names = ", ".join(self._ranks[number].name(number) for number in left)
            rest = count_ranks(len(numbers) - len(left), "goes on", "go on")
            self._publish(self._generations.drop(left, f"{names} had finished already: {rest}"))
            return
        done = max(steps_done(self._ranks[number].status) for number in numbers)
        wrong = self._generations.sends_wrong_again(causes, done)
        if wrong is not None and self._refusal([wrong]) is None:
            self._go_on_without({wrong}, [f"{self._ranks[wrong].name(wrong)} sent wrong bits twice ({causes[0]})"])
            return
        self._publish(self._generations.repeat(causes[0], done))

    def _pass_on(self, requests: Requests, now_s: float) -> None:
        """Requests of this process to the ranks, and a rank's signal to this process: one of them stops the run."""
        graces = [status["grace"] for status in self._statuses() if "grace" in status]
        requests.grace = max(graces, default=requests.grace)
        if requests.save.is_set():
            requests.save.clear()
            self._saves += 1
            self._store.set(SAVE_KEY, str(self._saves))
        if not self._was_rank_signalled and (number := get_text(self._store, SIGNAL_KEY)) is not None:
            self._was_rank_signalled = True
            requests.rank_signalled(int(number))
        if requests.stop.is_set() and self._stop_sent_s is None:
            self._store.set(STOP_KEY, TERMINATED if requests.is_terminated else "1")
            self._stop_sent_s = now_s

    def _read_heartbeats(self, now_s: float) -> None:
        if now_s - self._looked_s > DELAY_S:  # the ranks' heartbeats may have waited for this process
            for rank in self._ranks:
                rank.restart(now_s)
        self._looked_s = now_s
        for number, rank in enumerate(self._ranks):
            text = None if number in self._generations.given_up else get_text(self._store, heartbeat_key(rank.member))
            if text is not None:
                rank.update(json.loads(text), now_s)
        self._show_ranks()

    def _show_ranks(self) -> None:
        statuses = [rank.status for rank in self._ranks]  # who joins later is in the lines, and has no bar of its own
        self._reporter.ranks(statuses, first=self._generations.numbers[0])
        self._show(statuses, self._generations)

    def _statuses(self) -> list[dict[str, Any]]:
        """Of the ranks that are in the run."""
        return [rank.status for number, rank in enumerate(self._ranks) if number not in self._generations.aside]

    def _check_stopping(self, sent_s: float, now_s: float, grace_s: float) -> None:
        """StoppedError where nothing was trained yet, RankError where the ranks do not obey the stop request."""
        statuses = self._statuses()
        # A rank without a heartbeat has trained nothing; of the others only heartbeats count that were sent after they
        # had read the request, for at most STOP_S: on a busy machine the last one may be older than their first step.
        are_fresh = all(status.get("was_stop_read") for status in statuses if status)
        has_begun = any(status.get("handles_stop") for status in statuses)
        if not has_begun and (are_fresh or now_s - sent_s > STOP_S):
            raise StoppedError(NOTHING_TRAINED)
        if any(status.get("phase") in ("evaluation", "checkpoint", "user") for status in statuses):
            self._stop_sent_s = now_s  # these may last: the time to stop counts from their end
        elif now_s - sent_s > max(STOP_S, grace_s, 3 * max(rank.longest_step_s for rank in self._ranks)):
            raise RankError("the ranks did not stop when asked and were ended; nothing was saved")

    def _was_terminated_at_start(self) -> bool:
        """Whether SIGTERM hit a process that could not handle it yet, since Python itself was only starting there."""
        has_begun = any(rank.status.get("handles_stop") for rank in self._ranks)
        return not has_begun and -signal.SIGTERM in self._processes.exit_codes()

    def _check_left_alone(self, codes: Sequence[int | None], now_s: float) -> None:
        """StoppedError where a script was stopped before its run in some processes, and others wait to form the group.

        Not at the first look: a rank that stops after its very first step may have left, and the last heartbeat of one
        that still saves may be older than that step.
        """
        aside = self._generations.aside
        running = [self._ranks[n].status for n, code in enumerate(codes) if code is None and n not in aside]
        begun = [one for one in running if one.get("slot") or is_past(one)]  # a rank that is past its run saves it
        waits = not begun and all(status.get("phase", "setup") in BEFORE_FIRST for status in running)
        if INTERRUPTED not in codes or not running or not waits:
            self._alone_since_s = now_s
        elif now_s - self._alone_since_s > ALONE_S:
            raise StoppedError(NOTHING_TRAINED)

    def _drop_mapped_tensors(self) -> None:
        """Once all ranks have mapped the payload's tensors, their files need no names any more."""
        if self._may_drop_tensors and all(rank.status.get("is_loaded") for rank in self._ranks):
            self._may_drop_tensors = False
            drop_tensors(self._folder)

    def _failure(self, requests: Requests, refusal: str) -> Exception:
        """The cause of a failed run: a rank that was killed, else the first one that failed by itself."""
        if self._was_terminated_at_start():
            requests.rank_signalled(signal.SIGTERM)
            return StoppedError(NOTHING_TRAINED)
        end = time.monotonic() + GRACE_S
        left = [number for number in range(len(self._ranks)) if number not in self._generations.aside]
        while time.monotonic() < end and any(self._processes.exit_codes()[number] is None for number in left):
            time.sleep(0.02)
        codes = self._processes.exit_codes()
        self._read_heartbeats(time.monotonic())  # the last lines of those that ended meanwhile
        errors, codes = read_errors(self._folder, left), find_early_ends(self._ranks, codes)
        gone = [why for number, why in self._processes.lost().items() if number in left]
        names = {number: self._ranks[number].name(number) for number in left}
        killed = {n: f"{names[n]} {describe_exit(code)}" for n in left if (code := codes[n]) is not None and code < 0}
        return self._lost_at_start(find_cause(names, errors, codes, refusal, gone), killed, errors)

    def _lost_at_start(
        self, error: Exception, causes: Mapping[int, str], errors: Mapping[int, Mapping[str, Any]]
    ) -> Exception:
        """`error` as one that the others need not end with, where nothing was trained.

        A rank that has failed by itself is no loss: the others would raise the same.
        """
        left = {*self._generations.numbers} - {*causes}
        by_itself = any(not is_about_peer(one["what"]) for one in errors.values())
        if not causes or not left or by_itself or self._stop_sent_s is not None or self._has_trained(errors):
            return error
        needed = max(int(rank.status.get("needs", 1)) for rank in self._ranks)
        if len(left) < needed:
            return RankError(f"{error}; {count_ranks(len(left))} left, and this run needs {needed} to begin")
        return LostAtStartError(str(error), causes)

    def _has_trained(self, errors: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether any rank has trained a step, in this run of the script or an earlier one."""
        known = [*(rank.status for rank in self._ranks), *errors.values()]
        return any(one.get("has_trained", bool(one.get("slot"))) for one in known)
