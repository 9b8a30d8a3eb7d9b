"""SIGTERM and Ctrl-C to real processes: a run saves, whoever gets the signal, within `grace`."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.faults import STARTS, Launcher, ended_by_signal, saved_state, trains
from tests.faults import start as start
from tests.forked import ForkedPopen
from uneven.comm.store import open_store

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


@contextmanager
def running(words: Sequence[str | Path], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive a test that fails."""
    pipe, env = subprocess.PIPE, os.environ | more
    process = ForkedPopen(words, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()


def signalled(
    folder: Path,
    script: str,
    *args: str,
    number: int = signal.SIGTERM,
    times: int = 1,
    command: Sequence[str | Path] = STARTS["plain"],
    is_for_all: bool = False,
) -> tuple[int, list[str], str]:
    """Run the script until it says "step", and signal it: exit code, what it said afterwards, stderr.

    `is_for_all`: every process of it gets the signal, as Slurm does.
    """
    (folder / "train.py").write_text(script)
    words = [*command, "train.py", *args]
    with running(words, folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        errors = "" if line else process.communicate()[1]
        assert line == "step\n", errors
        children = psutil.Process(process.pid).children(recursive=True) if is_for_all else []
        for one in [*children, process]:
            with suppress(psutil.NoSuchProcess):  # a loader process ends with its epoch
                one.send_signal(number)
        for _ in range(100 if times > 1 else 0):  # those within SAME_S of the first are one request with it
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
                break
            process.send_signal(number)
        out, errors = process.communicate(timeout=150)
    return process.returncode, out.splitlines(), errors


@pytest.mark.parametrize("how", ["join", "metrics", "own code", "loaders"])
def test_a_plain_run_saves_wherever_the_caller_is_and_then_its_finally_blocks_run(tmp_path: Path, how: str) -> None:
    code, said, errors = signalled(tmp_path, FIT, how, is_for_all=how == "loaders")
    assert code == 143, errors
    assert said[-1] == "finally"
    assert "stopped after" in errors
    assert "Traceback" not in errors
    saved_state(tmp_path)


@pytest.mark.parametrize(
    ("how", "number"), [("inside", signal.SIGTERM), ("between", signal.SIGTERM), ("inside", signal.SIGINT)]
)
def test_a_loop_of_ones_own_saves_inside_and_between_epochs(tmp_path: Path, how: str, number: int) -> None:
    code, said, errors = signalled(tmp_path, LOOP, how, number=number)
    assert code == (143 if number == signal.SIGTERM else -signal.SIGINT), errors
    assert said[-1] == "finally"
    assert saved_state(tmp_path).slot >= 32


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
    pids: dict[str, Callable[[Launcher], list[int]]] = {
        "launcher": lambda launcher: [launcher.process.pid],
        "rank": lambda launcher: launcher.pids[1:],
        "everyone": lambda launcher: [*launcher.pids, launcher.process.pid],
    }
    assert "stopped after" in ended_by_signal(launcher, trains, signal.SIGTERM, whom=pids[whom])
    saved_state(launcher.folder)


def test_at_start_up_there_is_nothing_to_save_and_a_second_one_ends_the_ranks(start: Callable[..., Launcher]) -> None:
    launcher = start("starting")
    assert "before its first step" in ended_by_signal(launcher, lambda _: len(launcher.pids) == 2, signal.SIGTERM)
    ended_by_signal(start("endless"), lambda lines: lines.count("step") == 2, signal.SIGTERM, times=2)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_script_that_is_stopped_before_it_calls_uneven_says_that_nothing_was_trained(
    tmp_path: Path, devices: str
) -> None:
    script = "import os, threading, uneven\nos.write(1, b'step\\n')\nthreading.Event().wait()\n"
    command = [*STARTS["uneven run"][:-1], devices]
    code, _, errors = signalled(tmp_path, script, number=signal.SIGINT, command=command)
    assert code == 130, errors
    assert "stopped before its first step" in errors
    assert "Traceback" not in errors


def test_uneven_run_saves_and_ends_with_143(tmp_path: Path) -> None:
    code, said, errors = signalled(tmp_path, LOOP, "inside", command=STARTS["uneven run"])
    assert code == 143, errors
    assert said.count("finally") == 2
    assert "stopped after" in errors
    assert "Traceback" not in errors
    saved_state(tmp_path)


INTERRUPTED_RANK = """
import os, signal, sys, torch
from uneven import Ddp, TensorData, fit
steps = 0
def interrupt(rank):
    global steps
    steps += 1
    if rank == 1 and steps == 3:
        os.kill(os.getpid(), signal.SIGINT)
model = torch.nn.Linear(2, 1)
settings = dict(batch_size=4, epochs=10**6, progress="lines")
if sys.argv[1] == "fit":
    def step(model, batch):
        interrupt(Ddp.rank())
        return model(batch).mean()
    fit(model=lambda: model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), step=step, dataset=torch.zeros(64, 2),
        **settings)
else:
    ddp = Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset=TensorData(torch.zeros(64, 2)),
                    **settings)
    for epoch in range(10**6):
        for x in ddp.batches(epoch):
            interrupt(ddp.rank)
            ddp.step(ddp(x).mean())
os.write(1, b"went on\\n")
"""


@pytest.mark.parametrize("how", ["fit", "loop"])
def test_ctrl_c_that_reaches_one_rank_alone_ends_the_script_on_all(tmp_path: Path, how: str) -> None:
    """It went on with what was trained so far, on the other ranks, and the exit code was 0."""
    (tmp_path / "train.py").write_text(INTERRUPTED_RANK)
    with running([*STARTS["uneven run"], "train.py", how], tmp_path) as process:
        out, errors = process.communicate(timeout=150)
    assert process.returncode == 130, errors
    assert out == ""
    assert "stopped after" in errors
    assert "Traceback" not in errors
    saved_state(tmp_path)


def test_a_rank_under_torchrun_that_gets_it_alone_stops_the_others_and_rank_0_saves(tmp_path: Path) -> None:
    """Torchrun's variables, without its agent: the next test has that."""
    (tmp_path / "train.py").write_text(LOOP)
    store, port = open_store()
    given = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [*STARTS["plain"], "train.py", "inside"]
    with ExitStack() as stack:
        numbers = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
        ranks = [stack.enter_context(running(words, tmp_path, **given, **own)) for own in numbers]
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "step\n"
        for _ in range(2):  # torchrun passes on what a scheduler has sent to everyone: a second one changes nothing
            ranks[1].send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], said
    assert [out.split() for out, _ in said] == [["finally"]] * 2
    assert "Traceback" not in said[0][1] + said[1][1]
    saved_state(tmp_path)
    del store


@pytest.mark.soak
def test_torchrun_passes_it_on_and_rank_0_saves(tmp_path: Path) -> None:
    code, said, errors = signalled(tmp_path, LOOP, "inside", command=STARTS["torchrun"])
    assert code != 0
    assert said.count("finally") == 2, errors
    assert "stopped after" in errors
    saved_state(tmp_path)
