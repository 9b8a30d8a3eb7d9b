"""Whether this machine may take part in a run now, or somebody needs it: by its use, the time of day and its power.

`uneven join` asks before it joins and waits until it may (`--only-when-idle`, `--between`, `--not-on-battery`), and
asks again during the run: a machine that is needed leaves it, and comes back (launch/nodes/departure.py). The
decision is pure: `Presence.answer` gets what was read and remembers only since when the machine is idle. Read without
root, on Linux: the CPU time of processes that are not ours (hardware/interference.py), when somebody last typed in a
terminal (as `w` shows it), and the power supply. A keyboard that is used in a graphical session alone shows as CPU use
at most. What a machine cannot tell never keeps it from taking part.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from uneven.errors import InputError
from uneven.hardware.interference import Counters, Interference, read_counters
from uneven.hardware.optional import read_text

IDLE_S = 300.0  # nobody has used the machine for so long: only then it takes part (again)
BUSY_SHARE = 0.2  # of all cores, used by others: a desktop at rest stays far below, a build or a game does not ...
BUSY_CORES = 0.75  # ... and at least about one core
BUSY_READINGS = 2  # in a row: one short burst, such as a cron job, is no use
POLL_S = 5.0
DAY = 24 * 60  # minutes


@dataclass(frozen=True)
class Between:
    """A span of the day by the clock on the wall, in minutes since midnight; `stop` before `start` is the next day's.

    Only the wall clock is compared and no time is counted, so the days on which the clock changes need no care.
    """

    start: int
    stop: int

    def holds(self, now: datetime) -> bool:
        minute = 60 * now.hour + now.minute
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.stop))


def parse_between(text: str) -> tuple[Between, ...]:
    """Spans of the day such as 22:00-07:00, several with commas; InputError where it is none.

    >>> parse_between("22:00-07:00")
    (Between(start=1320, stop=420),)
    """
    return tuple(_parse_span(text, span.strip()) for span in text.split(","))


def _parse_span(text: str, span: str) -> Between:
    first, _, last = span.partition("-")
    start, stop = _minute(first.strip()), _minute(last.strip())
    if start is None or stop is None or start % DAY == stop % DAY:
        raise InputError(
            f"between={text!r}: allowed are spans of the day from one time to another, as in 22:00-07:00 or "
            "12:00-13:00,20:00-06:30"
        )
    return Between(start % DAY, stop % DAY)


def _minute(clock: str) -> int | None:
    """Minutes since midnight; 24:00 is the day's end. None where it is no time of day."""
    found = re.fullmatch(r"([0-9]{1,2})(?::([0-9]{2}))?", clock)
    if found is None:
        return None
    hour, minute = int(found[1]), int(found[2] or 0)
    return 60 * hour + minute if minute < 60 and 60 * hour + minute <= DAY else None


@dataclass(frozen=True)
class Rules:
    """When this machine may take part; without any rule always."""

    only_when_idle: bool = False
    between: tuple[Between, ...] = ()
    on_battery: bool = True


class Readings(NamedTuple):
    """What was read of the machine; None where it cannot tell."""

    at_s: float  # of a clock that only grows
    now: datetime  # on the wall, local
    busy_share: float | None = None  # of all cores, used by processes that are not ours
    busy_cores: float | None = None
    typed_s: float | None = None  # since somebody last typed in a terminal
    on_battery: bool | None = None


class Answer(NamedTuple):
    """Whether the machine may take part; else why not, and the `cause` alone, which stays while the numbers change."""

    may: bool
    why: str = ""
    cause: str = ""


class Presence:
    """`answer` for every reading, in order.

    Any use of the machine (but for a single burst of CPU) makes it needed at once, and only after IDLE_S without use it
    may take part again.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._used_s: float | None = None  # when the machine was last in use ...
        self._use = ""  # ... by whom
        self._busy = 0  # readings in a row

    def answer(self, found: Readings) -> Answer:
        if self.rules.only_when_idle:
            self._note_use(found)
        if self.rules.between and not any(span.holds(found.now) for span in self.rules.between):
            spans = ", ".join(map(str, self.rules.between))
            return Answer(False, f"it is {found.now:%H:%M}, and it takes part between {spans}", "between")
        if found.on_battery and not self.rules.on_battery:
            return Answer(False, "it runs on battery", "battery")
        if self._used_s is not None and found.at_s - self._used_s < IDLE_S:
            ago = int((found.at_s - self._used_s) / 60)
            when = f"{ago} min ago" if ago else "just now"
            return Answer(
                False, f"{self._use} {when}, and it takes part after {IDLE_S / 60:.0f} min without use", "use"
            )
        self._used_s = None
        return Answer(True)

    def _note_use(self, found: Readings) -> None:
        is_busy = (found.busy_share or 0.0) >= BUSY_SHARE and (found.busy_cores or 0.0) >= BUSY_CORES
        self._busy = self._busy + 1 if is_busy else 0
        uses = [] if self._used_s is None else [(self._used_s, self._use)]
        if self._busy >= BUSY_READINGS:
            uses.append((found.at_s, f"other programs used {found.busy_cores:.1f} cores"))
        if found.typed_s is not None and found.typed_s < IDLE_S:
            uses.append((found.at_s - found.typed_s, "somebody typed in a terminal"))
        if uses:
            self._used_s, self._use = max(uses)


class Machine:
    """Reads this machine; the first reading has no CPU use, since that is measured from one to the next."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counters: Counters | None = None

    def read(self) -> Readings:
        before, self._counters = self._counters, read_counters(root=self._root)
        load = None if before is None else Interference.between(before, self._counters)
        return Readings(
            self._counters.time_s,
            datetime.now(),
            None if load is None else load.foreign_share,
            None if load is None else load.foreign_cores,
            typed_s(self._root, time.time()),
            on_battery(self._root),
        )


def typed_s(root: Path, now_s: float) -> float | None:
    """Seconds since somebody last typed in a terminal of this machine; None where there is no terminal."""
    reads = [read_s for path in (root / "dev/pts").glob("[0-9]*") if (read_s := _last_read_s(path)) is not None]
    return max(0.0, now_s - max(reads)) if reads else None


def _last_read_s(terminal: Path) -> float | None:
    """What is read from a terminal is what was typed there; output changes its mtime alone."""
    try:
        return terminal.stat().st_atime
    except OSError:  # closed meanwhile
        return None


def on_battery(root: Path) -> bool | None:
    """Whether the machine runs on battery; None where it has none."""
    supplies = {}
    for folder in (root / "sys/class/power_supply").glob("*"):
        if (read_text(folder / "scope") or "").strip() != "Device":  # the battery of a mouse is not the machine's
            supplies[folder] = (read_text(folder / "type") or "").strip()
    if "Battery" not in supplies.values():
        return None
    mains = [(read_text(folder / "online") or "").strip() for folder, kind in supplies.items() if kind != "Battery"]
    if mains:
        return "1" not in mains
    states = [(read_text(folder / "status") or "").strip() for folder, kind in supplies.items() if kind == "Battery"]
    return "Discharging" in states


def wait_until_free(
    presence: Presence | None,
    say: Callable[[str], None],
    read: Callable[[], Readings] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once this machine may take part; says why it waits, whenever the reason becomes another one.

    The same `presence` is asked during the run (launch/nodes/departure.py); None where there is no rule.
    """
    if presence is None:
        return
    read, said = read or Machine().read, ""
    if presence.rules.only_when_idle:  # CPU use is known after some readings
        for _ in range(BUSY_READINGS):
            presence.answer(read())
            sleep(1.0)
    while not (answer := presence.answer(read())).may:
        if answer.cause != said:
            say(f"this machine waits before it joins: {answer.why}")
            said = answer.cause
        sleep(POLL_S)
    if said:
        say("this machine is free now")
