"""A stop request on a slow machine: a run that has begun is never taken for one that has not."""

import json
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.fake_processes import FakeProcesses
from uneven.comm.store import get_text, open_store
from uneven.errors import StoppedError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import STOP_KEY, heartbeat_key
from uneven.launch.processes import INTERRUPTED
from uneven.launch.watch import watch as watch_module
from uneven.launch.watch.generations import Generations
from uneven.launch.watch.watch import Watch
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

MEMBERS = ["a", "b"]
ROSTER = Roster.on_one_machine(parse_devices("cpu,cpu"))


class Processes(FakeProcesses):
    """Two ranks whose heartbeats come as late as they like: `beats` are sent one by one."""

    def __init__(self, store: Any, beats: list[dict[str, Any]]) -> None:
        self._store, self._beats, self._count = store, beats, 0

    def exit_codes(self) -> list[int | None]:
        if not self._beats:
            return [INTERRUPTED, INTERRUPTED]
        if self._count == 0 or get_text(self._store, STOP_KEY) is not None:
            self._count += 1
            status = {"count": self._count, "slot": 0, "phase": "setup", **self._beats.pop(0)}
            for member in MEMBERS:
                self._store.set(heartbeat_key(member), json.dumps(status))
        return [None, None]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks again at once: however many looks it needs, the limits of time are far away."""
    monkeypatch.setattr(watch_module, "POLL_S", 0.001)


def wait(folder: Path, *beats: dict[str, Any]) -> None:
    store, _ = open_store()
    processes: Any = Processes(store, list(beats))
    requests = Requests()
    requests.stop.set()
    Watch(processes, store, folder, Generations(ROSTER, MEMBERS), Reporter("off")).wait(requests)


def test_a_wish_for_a_checkpoint_reaches_the_run_of_rank_0_each_time_it_is_asked_for(tmp_path: Path) -> None:
    store, port = open_store()
    environment = LaunchEnvironment("fit", world_size=2, host="127.0.0.1", port=port, member="a")
    context, asked, heard = ProcessContext(environment), Requests(), Requests()
    context.begin_run(heard)
    context.start_heartbeat(dict, lambda: None)
    waits = {"count": 1, "slot": 0, "phase": "setup"}
    store.set(heartbeat_key("b"), json.dumps(waits))
    processes: Any = FakeProcesses(lambda: [0, 0] if ended.is_set() else [None, None])
    ended, watch = (
        threading.Event(),
        Watch(processes, store, tmp_path, Generations(ROSTER, MEMBERS), Reporter("off")),
    )
    thread = threading.Thread(target=watch.wait, args=(asked,))
    thread.start()
    for _ in range(2):
        asked.save.set()
        assert heard.save.wait(100)
        heard.save.clear()  # as the worker does
    assert not asked.save.is_set()
    assert not heard.stop.is_set()
    context.close_heartbeat()
    ended.set()
    thread.join()


def test_a_stop_request_that_is_heard_while_results_are_saved_does_not_interrupt_that() -> None:
    """The peers' request had stopped the run already: the rank's own heartbeat reads it later."""
    context, requests, interrupted = ProcessContext(LaunchEnvironment("fit", world_size=2)), Requests(), []
    context.signals[signal.SIGTERM] = SimpleNamespace(interrupt=lambda: interrupted.append(1))  # type: ignore[assignment]
    context.begin_run(requests)
    context.leave_group()
    context.request_stop(is_terminated=True)
    assert requests.is_terminated
    assert interrupted == []
    context.end_saving(Requests())  # another run's
    context.request_stop(is_terminated=True)
    assert interrupted == []
    context.end_saving(requests)
    context.request_stop(is_terminated=True)  # now it is the script that is interrupted
    assert interrupted == [1]


def test_heartbeats_from_before_the_request_do_not_tell_that_nothing_has_begun(tmp_path: Path) -> None:
    old, new = {"was_stop_read": False}, {"was_stop_read": True, "handles_stop": True}
    wait(tmp_path, *[old] * 10, new)


def test_ranks_that_have_read_the_request_and_not_begun_are_ended(tmp_path: Path) -> None:
    with pytest.raises(StoppedError, match="before its first step"):
        wait(tmp_path, {"was_stop_read": False}, {"was_stop_read": True}, {"was_stop_read": True})


def test_a_rank_whose_peer_was_stopped_before_its_run_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `uneven run` the request may reach one script inside `fit`, where it waits, and another before it."""
    monkeypatch.setattr(watch_module, "ALONE_S", 0.2)
    store, _ = open_store()
    status = {"count": 1, "slot": 0, "phase": "setup", "handles_stop": True, "was_stop_read": True}
    for member in MEMBERS:
        store.set(heartbeat_key(member), json.dumps(status))
    codes: list[int | None] = [None, INTERRUPTED]
    processes: Any = FakeProcesses(lambda: codes)
    requests = Requests()
    requests.terminate()
    watch = Watch(processes, store, tmp_path, Generations(ROSTER, MEMBERS), Reporter("off"))
    monkeypatch.setattr(watch, "_stop_sent_s", time.monotonic())
    with pytest.raises(StoppedError, match="before its first step"):
        watch.wait(requests)


def test_a_rank_that_saves_its_run_is_waited_for_when_the_others_have_left(tmp_path: Path) -> None:
    """Its worker is gone, and it says `setup` at slot 0 as before its first step: it was ended after 3 s."""
    store, _ = open_store()
    status = {"count": 1, "slot": 0, "phase": "setup", "handles_stop": True, "was_stop_read": True}
    for member, is_past in zip(MEMBERS, (True, False), strict=True):
        store.set(heartbeat_key(member), json.dumps({**status, "is_past": is_past}))
    processes: Any = FakeProcesses(lambda: [None, INTERRUPTED])
    watch = Watch(processes, store, tmp_path, Generations(ROSTER, MEMBERS), Reporter("off"))
    watch._read_heartbeats(time.monotonic())
    watch._alone_since_s = 0.0
    watch._check_left_alone([None, INTERRUPTED], 10.0)
    assert watch._alone_since_s == 10.0
