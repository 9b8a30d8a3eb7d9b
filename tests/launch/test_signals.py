"""SIGTERM: it saves as Ctrl-C does, whoever gets it, within `grace`; and a user's own handler stays."""

import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.faults import Launcher, alive, nothing_left, saved_state
from tests.faults import start as start
from tests.forked import ForkedPopen
from uneven import Ddp, TensorData, TrainedState, fit
from uneven.comm.store import open_store
from uneven.errors import StoppedError, Terminated
from uneven.hardware.device import parse_devices
from uneven.launch.requests import Requests
from uneven.launch.signals import SIGNALS, Stoppable
from uneven.launch.watch import Watch
from uneven.results.progress import Reporter

HEAD = """
import os, sys, threading, time, torch
from uneven import Ddp, TensorData, fit
model = torch.nn.Linear(2, 1)
how = sys.argv[1]
settings = dict(batch_size=4, epochs=10**6, progress="lines", devices="cpu")
def say(line):
    os.write(1, line.encode() + b"\\n")  # in one piece: ranks share the pipe
try:
"""
FIT = (
    HEAD
    + """
    def step(model, batch):
        say("step")
        if how == "endless":
            threading.Event().wait()
        return model(batch).mean()
    run = Ddp.builder(lambda: model, lambda p: torch.optim.SGD(p, lr=0.1), step).dataset(
        list(torch.zeros(64, 2)) if how == "loaders" else torch.zeros(64, 2)).settings(
        grace=0.5 if len(sys.argv) > 2 else 60, num_workers=int(how == "loaders"), **settings).run()
    if how == "own code":
        threading.Event().wait()
    for entry in run.metrics() if how == "metrics" else ():
        pass
    run.join()
finally:
    say("finally")
"""
)
LOOP = (
    HEAD
    + """
    del settings["devices"]
    ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset=TensorData(torch.zeros(64, 2)),
                    **settings)
    for epoch in range(10**6):
        for x in ddp.batches(epoch):
            ddp.step(ddp(x).mean())
        if epoch == 1 and ddp.rank == 0:
            say("step")
            if how == "between":
                threading.Event().wait()
finally:
    say("finally")
"""
)


def signalled(
    folder: Path,
    script: str,
    *args: str,
    number: int = signal.SIGTERM,
    times: int = 1,
    command: Any = None,
    is_for_all: bool = False,
) -> tuple[int, list[str], str]:
    """Run the script until it says "step", and signal it: exit code, what it said afterwards, stderr.

    `is_for_all`: every process of it gets the signal, as Slurm does.
    """
    (folder / "train.py").write_text(script)
    words = [*(command or (sys.executable,)), "train.py", *args]
    process = ForkedPopen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    errors = "" if line else process.communicate()[1]
    assert line == "step\n", errors
    children = psutil.Process(process.pid).children(recursive=True) if is_for_all else []
    for one in [*children, process]:
        one.send_signal(number)
    for _ in range(100 if times > 1 else 0):  # those within SAME_S of the first are one request with it
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
            break
        process.send_signal(number)
    out, errors = process.communicate(timeout=150)
    return process.returncode, out.splitlines(), errors


def saved(folder: Path) -> TrainedState:
    (found,) = (folder / "runs").glob("interrupted-*")
    state = TrainedState.load(found)
    assert not state.finished
    assert state.slot >= 1
    return state


@pytest.mark.parametrize("how", ["join", "metrics", "own code", "loaders"])
def test_a_plain_run_saves_wherever_the_caller_is_and_then_its_finally_blocks_run(tmp_path: Path, how: str) -> None:
    code, said, errors = signalled(tmp_path, FIT, how, is_for_all=how == "loaders")
    assert code == 143, errors
    assert said[-1] == "finally"
    assert "stopped after" in errors
    assert "Traceback" not in errors
    saved(tmp_path)


@pytest.mark.parametrize(
    ("how", "number"), [("inside", signal.SIGTERM), ("between", signal.SIGTERM), ("inside", signal.SIGINT)]
)
def test_a_loop_of_ones_own_saves_inside_and_between_epochs(tmp_path: Path, how: str, number: int) -> None:
    code, said, errors = signalled(tmp_path, LOOP, how, number=number)
    assert code == (143 if number == signal.SIGTERM else -signal.SIGINT), errors
    assert said[-1] == "finally"
    assert saved(tmp_path).slot >= 32


@pytest.mark.parametrize(("args", "times", "words"), [((), 2, "a second SIGTERM"), (("0.5",), 1, "within grace=0.5 s")])
def test_a_run_that_does_not_stop_is_ended_by_a_second_sigterm_and_by_its_grace(
    tmp_path: Path, args: tuple[str, ...], times: int, words: str
) -> None:
    code, _, errors = signalled(tmp_path, FIT, "endless", *args, times=times)
    assert code == 143, errors
    assert words in errors.splitlines()[-1]


def test_the_grace_of_ctrl_c_ends_a_run_that_does_not_stop(tmp_path: Path) -> None:
    code, _, errors = signalled(tmp_path, FIT, "endless", "0.5", number=signal.SIGINT)
    assert code == 130, errors
    assert "not saved within grace=0.5 s" in errors.splitlines()[-1]


@pytest.mark.parametrize("whom", ["launcher", "rank", "everyone"])
def test_ranks_of_fit_save_once_whoever_gets_it(start: Callable[..., Launcher], whom: str) -> None:
    launcher = start("training", {"launcher": "sync", "rank": "async", "everyone": "cadence"}[whom])
    launcher.read_until(lambda lines: lines.count("step") >= 6)
    ranks = launcher.pids
    pids = {"launcher": [launcher.process.pid], "rank": ranks[1:], "everyone": [*ranks, launcher.process.pid]}[whom]
    code, _ = launcher.interrupt(number=signal.SIGTERM, pids=pids)
    assert code == 143, launcher.said()
    assert "stopped after" in launcher.said()
    saved_state(launcher)
    nothing_left(launcher.pids, launcher.process.pid)


def test_at_start_up_there_is_nothing_to_save_and_a_second_one_ends_the_ranks(start: Callable[..., Launcher]) -> None:
    launcher = start("starting")
    launcher.read_until(lambda _: len(launcher.pids) == 2)
    code, _ = launcher.interrupt(number=signal.SIGTERM)
    assert code == 143, launcher.said()
    assert "before its first step" in launcher.said()
    nothing_left(launcher.pids, launcher.process.pid)
    launcher = start("endless")
    launcher.read_until(lambda lines: lines.count("step") == 2)
    code, _ = launcher.interrupt(number=signal.SIGTERM, times=2)
    assert code == 143, launcher.said()
    nothing_left(launcher.pids, launcher.process.pid)


def test_uneven_run_saves_and_ends_with_143(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "uneven", "run", "--devices", "cpu,cpu")
    code, said, errors = signalled(tmp_path, LOOP, "inside", command=command)
    assert code == 143, errors
    assert said.count("finally") == 2
    assert "stopped after" in errors
    assert "Traceback" not in errors
    saved(tmp_path)


def test_a_rank_under_torchrun_that_gets_it_alone_stops_the_others_and_rank_0_saves(tmp_path: Path) -> None:
    """Torchrun's variables, without its agent: the next test has that."""
    (tmp_path / "train.py").write_text(LOOP)
    store, port = open_store()
    started = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        ForkedPopen(
            [sys.executable, "train.py", "inside"],
            cwd=tmp_path,
            env=os.environ | started | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline() == "step\n"
    for _ in range(2):  # torchrun passes on what a scheduler has sent to everyone: a second one changes nothing
        ranks[1].send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], said
    assert [out.split() for out, _ in said] == [["finally"]] * 2
    assert "Traceback" not in said[0][1] + said[1][1]
    saved(tmp_path)
    del store


@pytest.mark.soak
def test_torchrun_passes_it_on_and_rank_0_saves(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    command = (torchrun, "--standalone", "--nproc-per-node", "2")
    code, said, errors = signalled(tmp_path, LOOP, "inside", command=command)
    assert code != 0
    assert said.count("finally") == 2, errors
    assert "stopped after" in errors
    saved(tmp_path)


@pytest.fixture
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


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


@pytest.mark.usefixtures("default")
def test_a_signal_after_the_last_run_acts_by_default_and_two_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the second may come late, and would end this very process.
    monkeypatch.setattr("uneven.launch.signals.SAME_S", float("inf"))
    stopped: list[int] = []
    stoppable = Stoppable(lambda: 100.0, stopped.append)
    SIGNALS.add(stoppable, signal.SIGTERM)
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    thread = threading.Thread(target=SIGNALS.discard, args=(stoppable,))  # as the thread of a run does

    def own_code() -> None:
        thread.start()
        threading.Event().wait(100)

    with pytest.raises(Terminated) as ended:
        own_code()
    thread.join()
    assert ended.value.code == 143
    assert stopped == [signal.SIGTERM]
    SIGNALS.leave()  # once is enough
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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
        (thread,) = (one for one in threading.enumerate() if one.name == "uneven-signals")
        SIGNALS.discard(stoppable)
        thread.join(100)
        assert stopped.empty()
    assert cut == []


def test_a_rank_that_sigterm_hit_before_python_had_started_ends_the_run_as_one_that_never_began(tmp_path: Path) -> None:
    class Processes:
        def exit_codes(self) -> list[int | None]:
            return [None, -signal.SIGTERM]

    store, _ = open_store()
    requests, processes = Requests(), Processes()
    watch = Watch(processes, store, tmp_path, ["a", "b"], parse_devices("cpu,cpu"), Reporter("off"))  # type: ignore[arg-type]
    with pytest.raises(StoppedError, match="before its first step"):
        watch.wait(requests)
    assert requests.is_terminated


STARTS = {
    "plain": (sys.executable,),
    "uneven run": (sys.executable, "-m", "uneven", "run", "--devices", "cpu,cpu"),
    "torchrun": (Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"),
}
RANDOM = """
import os, sys, time, torch
from uneven import Ddp, TensorData, fit
how, policy, out = sys.argv[1:]
data = TensorData(torch.randn(256, 2), torch.zeros(256))
make, sgd = (lambda: torch.nn.Linear(2, 1)), lambda params: torch.optim.SGD(params, lr=0.01)
def loss(model, batch):
    time.sleep(0.002)
    return model(batch[0]).square().mean()
def score(model, batch):
    return {"loss": model(batch[0]).square().sum()}, len(batch[0])
settings = dict(batch_size=4, epochs=10**6, policy=policy, out=out, grace=20.0, save_every=1, keep_last=2)
settings["progress"] = "lines"
os.write(1, b"go\\n")
if how == "fit":
    fit(model=make, optimizer=sgd, step=loss, dataset=data, evaluate=(data, score), **settings)
else:
    ddp = Ddp.setup(model := make(), sgd(model.parameters()), dataset=data, evaluate=(data, score), **settings)
    for epoch in range(ddp.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(loss(ddp, batch))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STARTS)
def test_soak_sigterm_at_random_moments(tmp_path: Path, name: str) -> None:
    """20 times: a whole state, or the word that nothing was trained, within grace; and nothing is left running."""
    moments, times, whole = random.Random(name), [], 0
    (tmp_path / "train.py").write_text(RANDOM)
    for number in range(20):
        out, policy = tmp_path / f"out-{number}", moments.choice(["sync", "balanced", "cadence", "async"])
        how = moments.choice(["fit", "loop"])
        words = [*STARTS[name], "train.py", how, policy, str(out)]
        with (tmp_path / f"errors-{number}").open("w+") as errors:
            process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            time.sleep(moments.uniform(0.0, 12.0))  # a moment of the scheduler's choice
            children = psutil.Process(process.pid).children(recursive=True)
            began = time.monotonic()
            for one in [process, *(children if moments.random() < 0.5 else [])]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGTERM)
            try:
                process.stdout.read()
                code = process.wait(60)
            finally:
                process.kill()
            times.append(time.monotonic() - began)
            errors.seek(0)
            said = errors.read()
        assert code in ((1,) if name == "torchrun" else (130, 143, -signal.SIGTERM)), said  # 1 is the agent's own
        assert "RankError" not in said, said
        psutil.wait_procs(children, timeout=20)
        assert not any(alive(child.pid) for child in children)
        if "stopped after" in said:
            whole += 1
            assert not TrainedState.load(out).finished
        else:
            assert "before its first step" in said or code == -signal.SIGTERM or not (out / "state.json").exists(), said
    print(f"\n{name} SIGTERM: {' '.join(f'{one:.1f}' for one in times)} s; {whole} of {len(times)} had begun and saved")
    # Torchrun kills after 30 s: a rank that waits for one that left before its run may be inside a call of the store.
    assert max(times) <= (30.0 if name == "torchrun" else 20.0) + 5.0
    assert whole > 0
