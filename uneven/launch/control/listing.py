"""A run in the list of this user's runs, on its own side: what `uneven status`, `stop`, `logs` and `leave` find.

The list is the private folders of live processes (launch/cleanup.py). `run.json` in one says which run it is,
`status.json` where it is; launch/control/known_runs.py reads both. When the run has ended it goes into the history, and
then the folder goes. No torch in this file: `uneven join` has one, too.
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
from uneven.launch.cleanup import make_private_folder, process_start, remove
from uneven.launch.control import live_status
from uneven.launch.control.history import remember
from uneven.launch.control.leave_requests import ABOUT, await_readers, describe_run
from uneven.launch.control.rank_log import FOLDER as LOGS
from uneven.launch.control.rank_log import LAUNCHER, SWITCH, LogFile, own_log
from uneven.machines.addresses import host_label

if TYPE_CHECKING:
    from uneven.launch.watch.generations import Generations  # imports torch
    from uneven.results.progress import Reporter

EVERY_S = 1.0  # a person reads no faster
FINISHED, STOPPED, FAILED, LEFT = "finished", "stopped", "failed", "left"


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
        self._began_s, self._shown_s = time.time(), float("-inf")
        self._keeps, self._is_closed, self._ending = keeps, threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._read: Callable[[], Mapping[str, Any]] | None = None  # of `follow`
        self.last: dict[str, Any] = {}  # the status that was last written
        self._heard: tuple[Sequence[Mapping[str, Any]], Generations] | None = None
        self.on_shown: Callable[[Mapping[str, Any]], None] = lambda _: None  # other machines are told
        self.log = LogFile(self.folder / LOGS / LAUNCHER)
        self.saved: str | None = None  # where the state of the run is
        self.about = {
            "id": self.id,
            "script": _absolute(sys.argv[0] if script is None else script),
            "leader": leader,
            "host": host_label(),
            "since": self._began_s,
            "start": process_start(os.getpid()),
            "cwd": os.getcwd(),
        }
        with suppress(OSError):  # a full disk
            describe_run(self.folder, **self.about)

    def attach(self, reporter: "Reporter") -> None:
        """Keep the lines that this process says about the run, unless all that it prints is kept already. They stand
        above the bars of its ranks."""
        reporter.share_terminal(self.folder)
        if own_log() is None:
            reporter.keep_in(self.log.write)

    def hear(self, statuses: Sequence[Mapping[str, Any]], generations: "Generations") -> None:
        """The last heartbeats of all processes; called at every look of the watch, and mostly does nothing."""
        self._heard = statuses, generations
        if time.monotonic() - self._shown_s >= EVERY_S:
            self._show_heard()

    def show_last(self) -> None:
        """The last of it, whenever the one before was shown: other machines keep it, too."""
        self._show_heard()

    def _show_heard(self) -> None:
        if self._heard is None:
            return
        statuses, generations = self._heard
        present, own = generations.present, str(self.about["host"])
        hosts = [own if one == "localhost" else one for one in map(present.roster.host, range(len(present.members)))]
        devices = [str(device) for device in present.roster.devices]
        heard = [statuses[number] for number in generations.numbers]
        found = (present.number, len(generations.given_up), present.why)
        self.show(live_status.describe(heard, devices, hosts, *found))

    def show(self, status: Mapping[str, Any]) -> None:
        """Write where the run is. Never raises: it is only looked at."""
        self._shown_s = time.monotonic()
        is_led_here = self.about["leader"] is None
        if is_led_here and status.get("out"):
            out = Path(os.path.abspath(str(status["out"])))
            status = {**status, "out": str(out)}
            if self._keeps and status.get("has_begun") and out.is_dir() and os.environ.get(SWITCH) != "0":
                self.log.move(out / LOGS / LAUNCHER)
        self.last = dict(status)
        self.on_shown(self.last)
        with suppress(OSError, ValueError, TypeError):
            draft = self.folder / f".{live_status.NAME}"
            draft.write_text(json.dumps({"at": time.time(), **status}))
            draft.rename(self.folder / live_status.NAME)

    def follow(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Show what `read` returns every second, on a thread: for a run inside this process, which nobody watches."""

        def run() -> None:
            while not self._is_closed.wait(EVERY_S):
                with suppress(Exception):  # the worker may be in the middle of anything
                    self.show(read())

        self._read = read
        with suppress(Exception):
            self.show(read())
        self._thread = threading.Thread(target=run, name="uneven-status", daemon=True)
        self._thread.start()

    def close(self, result: str, why: str = "", samples: int | None = None) -> None:
        """The run has ended: keep a line about it, then take it off the list. More than once is no error."""
        if self.record_end(result, why, samples):
            await_readers(self.folder)
            remove(self.folder)

    def record_end(self, result: str, why: str = "", samples: int | None = None) -> bool:
        """Keep a line about the run, and leave its folder, in which its ranks are found: before they are all ended by
        force. When it returns the line is there; False where another thread has written it."""
        with self._ending:
            if self._is_closed.is_set():
                return False
            self._is_closed.set()
            self._remember(result, why, samples)
            return True

    def _remember(self, result: str, why: str, samples: int | None) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._read is not None and result != FAILED:  # one that failed early leaves no folder, so no log there
            with suppress(Exception):
                self.show(self._read())  # the run may have ended before the thread's first look
        self._show_heard()
        if result == FAILED and why:
            self.log.write([why])
        saved = self.saved or self.last.get("saved")
        if self._keeps:
            end_s = time.time()
            remember(
                {
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
            )

    def clear(self) -> None:
        """The ranks have ended: nothing is left in the folder but what tells about the run."""
        await_readers(self.folder)
        for path in self.folder.iterdir():
            if path.name not in (ABOUT, live_status.NAME, LOGS):
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


def read_status(folder: Path) -> dict[str, Any]:
    """What `show` wrote; empty where nothing was."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / live_status.NAME).read_text())
        return found if isinstance(found, dict) else {}
    return {}
