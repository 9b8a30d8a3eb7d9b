"""Who is lost and why, judged from heartbeats, deadlines and exits, whatever started the ranks. Pure.

Used by the launcher's watch over its processes (watch.py) and by that of ranks which torchrun, Slurm or Ray started
(peers.py): they differ in what they know beside the heartbeats (`Signs`), and in what they may do about a loss.
Invariant: a healthy slow run is never ended. A rank that waits for others is not stuck, nor is one whose phase may
last: setup, compile, evaluation, checkpoint, and code of the user's own between epochs or inside `ddp.pause()`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from uneven.errors import USER_ERRORS, NotFiniteError, RankError, RefusedError
from uneven.hardware.device import Device
from uneven.launch.processes import EARLY, describe_exit, is_about_peer

SILENT_S = 15.0  # a rank without a heartbeat for so long is lost; `deadline` replaces it
LEAST_SILENT_S = 2.0  # ten heartbeats
STUCK_S = 30.0  # at least, and ten times its longest step, without a new slot; `deadline` replaces it
START_S = 120.0  # for a rank's first heartbeat: loading torch from a cold disk takes its time
SLOW_PHASES = ("setup", "compile", "evaluation", "checkpoint", "user")  # may last as long as they like
WAITING_PHASES = ("wait", "communication")  # the rank waits for others


@dataclass
class RankHealth:
    """What is known about one rank process, from its heartbeats."""

    member: str
    device: Device
    heard_s: float  # when its last heartbeat was new
    moved_s: float  # when it last finished a slot, or was in a phase that may last
    status: dict[str, Any] = field(default_factory=dict)  # its last heartbeat
    longest_step_s: float = 0.0
    is_stopped: bool = False  # True where its process is known to be stopped by a signal, or taken for it
    stopped_s: float | None = None  # since when that is so, in user code

    def update(self, status: dict[str, Any], now_s: float) -> None:
        """Take in a heartbeat that was read; nothing changes where it is the last one again."""
        if status["count"] == self.status.get("count"):
            return
        self.heard_s = now_s
        if status["slot"] != self.status.get("slot") or status["phase"] in SLOW_PHASES:
            steps = max(1, status["slot"] - self.status.get("slot", 0))
            if status["phase"] not in SLOW_PHASES and self.status.get("phase") not in SLOW_PHASES:
                self.longest_step_s = max(self.longest_step_s, (now_s - self.moved_s) / steps)
            self.moved_s = now_s
        self.status = status

    @property
    def deadline(self) -> Any:
        """The setting of that name, which travels in the heartbeats: the launcher of a script knows no settings."""
        return self.status.get("deadline", "auto")

    @property
    def silence_limit_s(self) -> float:
        if not self.status:
            return START_S
        # Loading and compiling hold Python's lock for seconds; a deadline below 15 s is meant for the steps.
        if self.deadline in (None, "auto") or self.status["phase"] in ("setup", "compile"):
            return silence_allowed_s(self.deadline)
        return max(LEAST_SILENT_S, float(self.deadline))

    def silent_s(self, now_s: float) -> float:
        """How long it has sent nothing, where it could have.

        Code of the user's own may hold Python's lock, so that the heartbeat's thread cannot run: silence counts there
        only while a signal has stopped the process.
        """
        if not self.status or self.status["phase"] != "user":
            return now_s - self.heard_s
        if not self.is_stopped or now_s - self.heard_s < LEAST_SILENT_S:
            self.stopped_s = None
            return 0.0
        self.stopped_s = now_s if self.stopped_s is None else self.stopped_s
        return now_s - self.stopped_s

    @property
    def step_limit_s(self) -> float:
        if self.deadline is None:
            return math.inf
        return max(STUCK_S, 10 * self.longest_step_s) if self.deadline == "auto" else float(self.deadline)

    def restart(self, now_s: float) -> None:
        """Count its silence and its steps from now: it had to wait for something else."""
        self.heard_s = self.moved_s = now_s

    def name(self, number: int) -> str:
        """A process by its present rank, its device and its machine."""
        host = self.status.get("member", self.member).split("/")[0]
        return f"rank {self.status.get('rank', number)} ({self.device} on {host})"

    def place(self, number: int) -> str:
        """What it does, or which collective it waits for."""
        doing = self.status.get("collective", self.status.get("phase", "setup"))
        return f"rank {self.status.get('rank', number)} in {doing}"


def silence_allowed_s(deadline: Any) -> float:
    """How long nothing may be heard, with this setting, before a rank or the store counts as lost."""
    if deadline is None:
        return math.inf
    return SILENT_S if deadline == "auto" else max(SILENT_S, float(deadline))


def find_lost(ranks: Sequence[RankHealth], running: Sequence[int], now_s: float) -> dict[int, tuple[str, str]]:
    """Running processes that are silent; else the first that does not wait for others, where none moves; else the first
    that waits in a collective where it should compute.

    What is wrong with each, and what the user can do about it.
    """
    silent_s = {number: ranks[number].silent_s(now_s) for number in running}
    if silent := [number for number in running if silent_s[number] > ranks[number].silence_limit_s]:
        advice = "; deadline=SECONDS waits longer for it, deadline=None for ever"
        return {n: (f"fell silent {silent_s[n]:.0f} s ago (stopped or swapped out?)", advice) for n in silent}
    if any(now_s - ranks[number].moved_s <= ranks[number].step_limit_s for number in running):
        return {}  # one of them moves: the others wait for it and are not stuck
    busy = [n for n in running if ranks[n].status and ranks[n].status["phase"] not in (*WAITING_PHASES, *SLOW_PHASES)]
    if not busy:
        return {}
    number = min(busy, key=lambda n: "collective" in ranks[n].status)
    rank = ranks[number]
    where = f"at slot {rank.status['slot']} for {rank.step_limit_s:.0f} s"
    deadline = f"deadline=SECONDS (now {rank.deadline!r}; None waits for ever)"
    if "collective" in rank.status:
        what = f"hangs in a collective {where} ({'; '.join(ranks[n].place(n) for n in running)})"
        advice = (
            ". Ranks wait for each other like this where they start collectives in different orders: all must run the "
            f"same layers, and collectives of your own at the same places. For a slow network set {deadline}"
        )
    else:
        what = f"is stuck in {rank.status['phase']} {where}"
        advice = (
            ". If it does long work of your own there, such as an evaluation, put that into "
            f'`with ddp.pause("evaluation"):`, or set {deadline}'
        )
    return {number: (what, advice)}


@dataclass(frozen=True)
class Signs:
    """What is known of the processes beside their heartbeats, by their numbers."""

    codes: Sequence[int | None]  # of all of them; None for one that runs
    gone: Mapping[int, str] = field(default_factory=dict)  # on machines that are gone, with a line that says so
    stopped: Collection[int] = ()  # by a signal
    aside: Collection[int] = ()  # those whose end does not matter
    ended_well: Collection[int] = (0,)  # the codes that do not mean a failure


@dataclass(frozen=True)
class Losses:
    """Of one look: `codes` with EARLY where a process ended with 0 in the middle of its run, by os._exit(0), say.

    Such a run had counted as finished, whatever was left to train.
    """

    codes: list[int | None]
    failed: list[int]
    gone: dict[int, str]
    hanging: dict[int, tuple[str, str]]  # what is wrong, and what the user can do about it


def judge(ranks: Sequence[RankHealth], signs: Signs, now_s: float) -> Losses:
    """`signs` were read before the heartbeats of `ranks`, so that the last ones are among those."""
    for number, rank in enumerate(ranks):
        rank.is_stopped = number in signs.stopped
    codes = find_early_ends(ranks, signs.codes)
    failed = [n for n, code in enumerate(codes) if code not in (None, *signs.ended_well) and n not in signs.aside]
    gone = {number: why for number, why in signs.gone.items() if number not in signs.aside}
    running = [n for n, code in enumerate(codes) if code is None and n not in signs.aside and n not in gone]
    hanging = {} if failed or gone else find_lost(ranks, running, now_s)
    return Losses(codes, failed, gone, hanging)


def find_early_ends(ranks: Sequence[RankHealth], codes: Sequence[int | None]) -> list[int | None]:
    last = [rank.status for rank in ranks]
    is_early = [bool(status.get("in_run") and not status.get("has_ended")) for status in last]
    return [EARLY if code == 0 and early else code for code, early in zip(codes, is_early, strict=True)]


def find_cause(
    names: Mapping[int, str],
    errors: Mapping[int, Mapping[str, Any]],
    codes: Sequence[int | None],
    refusal: str,
    gone: Sequence[str] = (),
) -> Exception:
    """A rank that was killed, else the first one that failed by itself, else a machine that is lost.

    `names` of the processes that count; `refusal` is why the others cannot go on without it, or empty; `gone`: the
    lines about lost machines. A rank here may notice such a loss first, and only knows that a connection broke.
    """
    for number, name in names.items():
        if number not in errors and (code := codes[number]) not in (None, 0):
            assert code is not None
            return RankError(f"{name} {describe_exit(code)}{because(refusal)}")
    # A rank whose peer is gone fails too, a moment later, and its message is about the connection.
    by_itself = {number: error for number, error in errors.items() if not is_about_peer(error["what"])}
    if gone and not by_itself:
        return RankError(f"{gone[0]}{because(refusal)}; the run ends on all machines")
    by_itself = by_itself or dict(errors)
    number = min(by_itself, key=lambda number: float(errors[number]["time"]))
    error, name = errors[number], names[number]
    if error["kind"] in USER_ERRORS:
        kind = USER_ERRORS[error["kind"]]
        # All ranks raise those alike, and they name the rank or machine that is the cause.
        return kind(error["message"] if kind in (NotFiniteError, RefusedError) else f"{name}: {error['message']}")
    what = error["what"] + (f"\n  at {error['place']}" if error.get("place") else "") + because(refusal)
    return RankError(f"{name} failed: {what}\n\nIts traceback:\n{error['traceback']}")


def because(refusal: str | None) -> str:
    """What follows a line about a loss, where the run ends with it."""
    return f"; {refusal}" if refusal else ""
