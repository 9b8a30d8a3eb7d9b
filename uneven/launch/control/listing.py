"""A run in the list of this user's runs, on its own side: what `uneven status`, `stop`, `logs` and `leave` find.

The list is the private folders of live processes (launch/cleanup.py). One file in it says which run it is and where it
is, from the heartbeats of its ranks; launch/control/known_runs.py reads it. When the run has ended it goes into the
history, and then the folder goes. No torch in this file: `uneven join` has one, too.
"""

import json
import os
import secrets
import shutil
import string
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.errors import StoppedError, Terminated
from uneven.files import finite
from uneven.launch.cleanup import make_private_folder, process_start, remove
from uneven.launch.control.known_runs import STATUS, remember
from uneven.launch.control.leave_requests import await_readers
from uneven.launch.control.rank_log import FOLDER as LOGS
from uneven.launch.control.rank_log import LAUNCHER, SWITCH, LogFile, own_log
from uneven.machines.addresses import host_label

if TYPE_CHECKING:
    from uneven.launch.watch.generations import Generations  # imports torch
    from uneven.results.progress import Reporter

EVERY_S = 1.0  # a person reads no faster
FINISHED, STOPPED = "finished", "stopped"
FAILED, LEFT = "failed", "left"
BEFORE_TRAINING = "start"  # the phase of a rank that has not sent a heartbeat
COMMON = ("policy", "out", "epochs", "steps", "total")  # what is said once for all ranks


def new_run_id() -> str:
    """Short enough to type. It begins with a letter, so that no process id looks like one."""
    return secrets.choice(string.ascii_lowercase) + secrets.token_hex(3)


class Listing:
    """Life cycle: one per run and machine. `show` often, on any thread; `close` however the run has ended.

    The line in the history is written once, before the folder goes: who sees the folder gone finds the line.
    """

    def __init__(
        self,
        script: str | None = None,
        *,
        run_id: str | None = None,
        leader: str | None = None,
        keeps: bool = True,
        folder: Path | None = None,
    ) -> None:
        """`leader` is the machine that leads the run, where it is not this one. Without `keeps` it is listed while it
        is on, and forgotten: for a program of many runs. `folder` is a private one that is there already."""
        self.folder = folder or make_private_folder()
        self.id = run_id or new_run_id()
        self.last: dict[str, Any] = {}  # where the run was when it was last shown
        self.log = LogFile(self.folder / LOGS / LAUNCHER)
        self.saved: str | None = None  # where the state of the run is
        self._keeps = keeps
        self._began_s = time.time()
        self._shown_s = float("-inf")
        self._heard: tuple[Sequence[Mapping[str, Any]], Generations] | None = None
        self._read: Callable[[], Mapping[str, Any]] | None = None  # of `follow`
        self._thread: threading.Thread | None = None
        self._closed, self._ending = threading.Event(), threading.Lock()
        self.about = {
            "id": self.id,
            "script": _absolute(sys.argv[0] if script is None else script),
            "leader": leader,
            "host": host_label(),
            "since": self._began_s,
            "start": process_start(os.getpid()),
            "cwd": os.getcwd(),
        }
        self._write({})

    def attach(self, reporter: "Reporter") -> None:
        """Keep the lines that this process says about the run, unless all that it prints is kept already. They stand
        above the bars of its ranks."""
        reporter.share_terminal(self.folder)
        if own_log() is None:
            reporter.keep_in(self.log.write)

    def hear(self, statuses: Sequence[Mapping[str, Any]], generations: "Generations") -> bool:
        """The last heartbeats of all processes; called at every look of the watch, and mostly does nothing.

        Returns whether `last` is new.
        """
        self._heard = statuses, generations
        is_due = time.monotonic() - self._shown_s >= EVERY_S
        if is_due:
            self.show_last()
        return is_due

    def follow(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Show what `read` returns every second, on a thread: for a run inside this process, which nobody watches."""
        self._read = read
        self.show_last()
        self._thread = threading.Thread(target=self._follow, name="uneven-status", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.show_last()

    def show_last(self) -> None:
        """What is known now, whenever it was shown before."""
        if self._heard is not None:
            statuses, generations = self._heard
            present, own = generations.present, str(self.about["host"])
            hosts = map(present.roster.host, range(len(present.members)))
            self.show(
                describe(
                    [statuses[number] for number in generations.numbers],
                    [str(device) for device in present.roster.devices],
                    [own if host == "localhost" else host for host in hosts],
                    present.number,
                    generations.lost,
                    present.why,
                )
            )
        elif self._read is not None:
            with suppress(Exception):  # the worker may be in the middle of anything
                self.show(self._read())

    def show(self, status: Mapping[str, Any]) -> None:
        """Write where the run is. Never raises: it is only looked at."""
        self._shown_s = time.monotonic()
        if self.about["leader"] is None and status.get("out"):
            out = Path(os.path.abspath(str(status["out"])))
            status = {**status, "out": str(out)}
            if self._keeps and status.get("has_begun") and out.is_dir() and os.environ.get(SWITCH) != "0":
                self.log.move(out / LOGS / LAUNCHER)
        self.last = dict(status)
        self._write({"at": time.time(), **status})

    def _write(self, status: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError, TypeError):  # a full disk, or figures that JSON has no words for
            draft = self.folder / f".{STATUS}"
            draft.write_text(json.dumps({**self.about, **status}))
            draft.rename(self.folder / STATUS)

    def close(self, result: str, why: str = "", samples: int | None = None) -> None:
        """The run has ended: keep a line about it, then take it off the list. More than once is no error."""
        if self.record_end(result, why, samples):
            await_readers(self.folder)
            remove(self.folder)

    def record_end(self, result: str, why: str = "", samples: int | None = None) -> bool:
        """Keep a line about the run, and leave its folder, in which its ranks are found: before they are all ended by
        force. When it returns the line is there; False where another thread has written it."""
        with self._ending:
            if self._closed.is_set():
                return False
            self._closed.set()
            if self._thread is not None:
                self._thread.join()
            if self._read is None or result != FAILED:  # one that failed early leaves no folder, so no log there
                self.show_last()
            if result == FAILED and why:
                self.log.write([why])
            if self._keeps:
                remember(self._line(result, why, samples))
            return True

    def _line(self, result: str, why: str, samples: int | None) -> dict[str, Any]:
        """Of the history."""
        end_s = time.time()
        saved = self.saved or self.last.get("saved")
        return {
            **self.about,
            "pid": os.getpid(),
            "end": end_s,
            "seconds": end_s - self._began_s,
            "result": result,
            "why": why.partition("\n")[0][:300],
            "samples": samples if samples is not None else self.last.get("samples"),
            "slot": self.last.get("slot"),
            "policy": self.last.get("policy"),
            "devices": [rank["device"] for rank in self.last.get("ranks", ())],
            "out": self.last.get("out"),
            "saved": os.path.abspath(saved) if saved else None,
        }

    def clear(self) -> None:
        """The ranks have ended: nothing is left in the folder but what tells about the run."""
        await_readers(self.folder)
        for path in self.folder.iterdir():
            if path.name not in (STATUS, LOGS):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def listed(listing: Listing) -> Iterator[Listing]:
    """Around a run: it is taken off the list at the end, with how it ended."""
    try:
        yield listing
    except BaseException as error:
        listing.close(*describe_result(error))
        raise
    listing.close(FINISHED)


def describe_result(error: BaseException | None) -> tuple[str, str]:
    """How a run has ended by what it raised: the result, and why in one line."""
    if error is None:
        return FINISHED, ""
    if isinstance(error, KeyboardInterrupt | Terminated | StoppedError):
        return STOPPED, str(error) if isinstance(error, StoppedError) else ""
    return FAILED, str(error) or type(error).__name__


def _absolute(script: str) -> str | None:
    """The script as it is found from everywhere; None for an interactive Python. What is no file stays as it is: -c, or
    a script that has left the folder it was started in."""
    return os.path.abspath(script) if os.path.isfile(script) else script or None


def describe(
    statuses: Sequence[Mapping[str, Any]],
    devices: Sequence[str],
    hosts: Sequence[str],
    generation: int = 0,
    lost: int = 0,
    why: str = "",
) -> dict[str, Any]:
    """Where a run is, from the last heartbeats of the ranks that are in it, in rank order.

    `lost` is how many processes the run goes on without, `why` the line about the newest generation.
    """
    lead = next((status for status in statuses if "total" in status), statuses[0] if statuses else {})
    trained = sum(int(status.get("own", 0)) for status in statuses)
    ranks = [
        {
            "rank": rank,
            "device": device,
            "machine": host,
            "slot": _slot(status),
            "phase": str(status.get("phase", BEFORE_TRAINING)),
            "samples": int(status.get("own", 0)),
            "share": int(status.get("own", 0)) / trained if trained else None,
            "samples_per_s": _speed(status),
            "loss": finite(status.get("loss")),
            "round": (status.get("rounds") or {}).get("round"),
        }
        for rank, (status, device, host) in enumerate(zip(statuses, devices, hosts, strict=True))
    ]
    saved = [str(status["saved"]) for status in statuses if status.get("saved")]
    return {
        **{name: lead.get(name) for name in COMMON},
        "generation": generation,
        "lost": lost,
        "why": why,
        "slot": max((_slot(status) for status in statuses), default=0),
        "epoch": _epoch(lead),
        "samples": max([trained, *(int(status.get("samples", 0)) for status in statuses)]),
        "samples_per_s": sum(_speed(status) for status in statuses),
        "saved": saved[-1] if saved else None,
        "has_begun": any("total" in status for status in statuses),
        "ranks": ranks,
    }


def _slot(status: Mapping[str, Any]) -> int:
    """The steps that a rank has trained; once its run is over its heartbeats say how far that came."""
    return int(status.get("slot") or status.get("reached") or 0)


def _epoch(lead: Mapping[str, Any]) -> int | None:
    """The epoch that is being trained, counted from 1."""
    if lead.get("epoch") is None:
        return None
    epoch = int(lead["epoch"]) + 1
    return min(epoch, int(lead["epochs"])) if lead.get("epochs") else epoch


def _speed(status: Mapping[str, Any]) -> float:
    seconds = float(status.get("seconds", 0.0))
    return int(status.get("own", 0)) / seconds if seconds > 0 else 0.0
