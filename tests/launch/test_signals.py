"""The handlers of SIGTERM and Ctrl-C in this process: there while a run is on, and a user's own stays."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import run_forked
from tests.launch.fake_processes import FakeProcesses
from uneven import Ddp, TensorData, TrainedState, fit
from uneven.comm.store import open_store
from uneven.errors import StoppedError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.signals import SAME_S, SIGNALS, Stoppable
from uneven.launch.watch.generations import Generations
from uneven.launch.watch.watch import Watch
from uneven.results.progress import Reporter
from uneven.train.requests import Requests


@pytest.fixture
def default() -> Iterator[None]:
    """SIGTERM acts by default; earlier runs are over, and the thread of their handlers, told to end, has ended."""
    end = time.monotonic() + 100
    while SIGNALS._stoppables and time.monotonic() < end:  # one on a thread of its own may still be saving
        time.sleep(0.05)
    assert SIGNALS._stoppables == [], "a run that is on would keep these tests from ending, or end this very process"
    SIGNALS.restore()
    for thread in _threads():
        thread.join(100)
    assert _threads() == []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "uneven-signals"]


def train(step: Callable[..., Any], **changes: Any) -> TrainedState:
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 2, "devices": "cpu", "progress": "off", **changes}
    make, sgd = (lambda: torch.nn.Linear(2, 1)), lambda params: torch.optim.SGD(params, lr=0.1)
    return fit(model=make, optimizer=sgd, step=step, dataset=torch.zeros(8, 2), **settings)


@pytest.mark.usefixtures("default")
def test_the_handler_is_there_while_a_run_is_on_and_a_users_own_is_never_replaced() -> None:
    seen: list[Any] = []

    def step(model: Any, batch: Any) -> Any:
        seen.append(signal.getsignal(signal.SIGTERM))
        return model(batch).mean()

    train(step)
    assert seen[0] == SIGNALS._handle
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    own: list[int] = []

    def handle(number: int, _: Any) -> None:
        own.append(number)

    def step_with_signal(model: Any, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return model(batch).mean()

    signal.signal(signal.SIGTERM, handle)
    assert train(step_with_signal).finished
    assert own
    assert signal.getsignal(signal.SIGTERM) is handle
    threads = [threading.Thread(target=train, args=(step,))]  # elsewhere nothing can be set, and nothing is
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seen.clear()
    threads[0].start()
    threads[0].join()
    assert seen[0] == signal.SIG_DFL


@pytest.mark.usefixtures("default")
def test_a_process_forked_during_a_run_ends_by_sigterm(tmp_path: Path) -> None:
    codes: list[int | None] = []
    context = multiprocessing.get_context("fork")

    def wait(ready: Any) -> None:
        ready.send(1)
        threading.Event().wait(100)

    def step(model: Any, batch: Any) -> Any:
        if not codes:
            there, here = context.Pipe()
            child = context.Process(target=wait, args=(here,), daemon=True)
            child.start()
            there.recv()  # Python forgets signals that come while it forks
            child.terminate()
            child.join(100)
            codes.append(child.exitcode)
        return model(batch).mean()

    ddp = Ddp.setup(
        model := torch.nn.Linear(2, 1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=TensorData(torch.zeros(8, 2)),
        batch_size=4,
        epochs=1,
        progress="off",
        out=tmp_path / "run",
    )
    for x in ddp:
        ddp.step(step(ddp, x))
    assert ddp.finish().finished
    assert codes == [-signal.SIGTERM]


AFTER_THE_LAST = """
import signal, threading
from uneven.errors import Terminated
from uneven.launch import signals
from uneven.launch.signals import SIGNALS, Stoppable

signal.signal(signal.SIGTERM, signal.SIG_DFL)
signals.SAME_S = float("inf")  # on a busy machine the second may come late
stopped = []
stoppable = Stoppable(lambda: 100.0, stopped.append)
SIGNALS.add(stoppable, signal.SIGTERM)
for _ in range(2):
    signal.raise_signal(signal.SIGTERM)
thread = threading.Thread(target=SIGNALS.discard, args=(stoppable,))  # as the thread of a run does
code = None
try:
    thread.start()
    threading.Event().wait(100)
except Terminated as ended:
    code = ended.code
thread.join()
SIGNALS.leave()  # once is enough
print(code, stopped == [signal.SIGTERM], signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


# As for a main thread that begins to wait just after the signal has come: that does not end its wait.
FIRST_IS_LOST = """
import signal
send, sent = signal.pthread_kill, []
signal.pthread_kill = lambda *call: send(*call) if sent else sent.append(call)
"""


@pytest.mark.parametrize("before", ["", FIRST_IS_LOST])
def test_a_signal_after_the_last_run_acts_by_default_and_two_at_once_are_one(before: str, tmp_path: Path) -> None:
    """In a process of its own, which a signal that comes at the wrong moment ends."""
    script = tmp_path / "signalled.py"
    script.write_text(before + AFTER_THE_LAST)
    answer = run_forked([sys.executable, script])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["143", "True", "True"]


@pytest.mark.usefixtures("default")
def test_the_handlers_that_a_run_left_which_ended_on_another_thread_do_not_hinder_the_next() -> None:
    first, second = Stoppable(lambda: 100.0, lambda number: None), Stoppable(lambda: 100.0, lambda number: None)
    SIGNALS.add(first, signal.SIGTERM)
    thread = threading.Thread(target=SIGNALS.discard, args=(first,))
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by whoever else
    SIGNALS.add(second, signal.SIGTERM)
    is_handled = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    SIGNALS.discard(second)
    assert is_handled
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("default")
def test_what_a_rank_got_and_what_this_process_gets_later_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends SIGTERM to the launcher and to all ranks, whose word of it comes a moment later, or earlier."""
    monkeypatch.setattr("uneven.launch.signals.SAME_S", 0.0)
    cut: list[int] = []
    monkeypatch.setattr("uneven.launch.signals.end_process", lambda number, why: cut.append(number))
    for own_first in (True, False):
        stopped: queue.SimpleQueue[int] = queue.SimpleQueue()
        stoppable = Stoppable(lambda: 100.0, stopped.put)
        SIGNALS.add(stoppable, signal.SIGTERM)
        for is_own in (own_first, not own_first):
            signal.raise_signal(signal.SIGTERM) if is_own else SIGNALS.receive()
        assert stopped.get(timeout=100) == signal.SIGTERM
        (thread,) = _threads()
        SIGNALS.discard(stoppable)
        thread.join(100)
        assert stopped.empty()
    assert cut == []


def test_a_rank_that_sigterm_hit_before_python_had_started_ends_the_run_as_one_that_never_began(tmp_path: Path) -> None:
    class Processes(FakeProcesses):
        def exit_codes(self) -> list[int | None]:
            return [None, -signal.SIGTERM]

    store, _ = open_store()
    requests, processes, roster = Requests(), Processes(), Roster.on_one_machine(parse_devices("cpu,cpu"))
    watch = Watch(processes, store, tmp_path, Generations(roster, ["a", "b"]), Reporter("off"))  # type: ignore[arg-type]
    with pytest.raises(StoppedError, match="before its first step"):
        watch.wait(requests)
    assert requests.is_terminated


def test_the_settings_name_the_time_in_which_two_signals_are_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    assert SAME_S == 1.0
    assert "Two SIGTERMs within a second count as one" in " ".join(page.split())
