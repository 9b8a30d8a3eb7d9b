"""Two live runs never write to one folder; what a run has died in, and what is over, is free."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.forked import ForkedPopen
from tests.launch.checks.saved_runs import adam, content, make, step, train
from uneven import Ddp, TensorData
from uneven.errors import InputError
from uneven.files import MARK
from uneven.launch.control import folder_lock

# It trains to its first checkpoint, says so, and waits there until it is ended.
LIVE = """
import sys
from uneven import Callback
from tests.forked import ForkedPopen
from tests.launch.checks.saved_runs import train

class Waits(Callback):
    def on_save(self, info):
        print("saved", flush=True)
        sys.stdin.read()

train(out=sys.argv[1], save_every="3 steps", callbacks=[Waits()], progress="off")
"""


def is_locked(folder: Path) -> bool:
    with (folder / MARK).open("r+b") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def live(tmp_path: Path) -> Any:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", LIVE, str(tmp_path / "run")]
    with ForkedPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        yield process
        process.kill()


def test_a_live_run_keeps_its_folder_until_it_dies(live: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = {name: found for name, found in content(run).items() if "logs" not in name}  # the live run writes those
    for changes in ({}, {"overwrite": True}, {"resume": "auto"}, {"resume": run / "step-3"}):
        with pytest.raises(InputError) as refused:
            train(**{"out": run, **changes})
        assert f"a run (pid {live.pid}) is writing there" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert {name: found for name, found in content(run).items() if "logs" not in name} == before
    assert train(resume=run / "step-3", out=tmp_path / "other").finished  # reading disturbs nobody
    live.send_signal(signal.SIGKILL)
    live.wait()
    state = train(out=run, resume="auto")
    assert (state.finished, state.segments[-1]["slot"]) == (True, 3)


def test_runs_of_one_process_follow_each_other(tmp_path: Path) -> None:
    for _ in range(2):
        assert train(out=tmp_path / "run", save_every="3 steps").finished
        assert not is_locked(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(model=lambda: 1 / 0, out=tmp_path / "failed")
    assert not (tmp_path / "failed").exists()


def test_a_launcher_holds_the_folder_of_its_ranks(tmp_path: Path) -> None:
    data = TensorData(torch.randn(64, 4), torch.randn(64, 1))
    builder = Ddp.builder(make, adam, step).dataset(data).batch_size(4).epochs(10000).progress("off")
    run = builder.devices("cpu,cpu").out(tmp_path / "run").run()
    try:
        next(iter(run.metrics()))  # its ranks train
        assert is_locked(tmp_path / "run")
    finally:
        run.stop()
        run.join()
    assert not is_locked(tmp_path / "run")


def test_a_loop_that_was_left_gives_its_folder_up_to_the_next_one(tmp_path: Path) -> None:
    def loop() -> Any:
        model = make()
        data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
        settings: Any = {"batch_size": 4, "epochs": 1, "devices": "cpu", "progress": "off", "out": tmp_path / "run"}
        return Ddp.setup(model, adam(model.parameters()), dataset=data, **settings)

    left = loop()
    assert is_locked(tmp_path / "run")
    with loop() as ddp:
        for x, y in ddp.batches(0):
            ddp.step(F.mse_loss(ddp(x), y))
        left.__exit__(RuntimeError, None, None)
        assert is_locked(tmp_path / "run")  # by the one that is on
    assert not is_locked(tmp_path / "run")


def test_where_there_are_no_locks_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder_lock.fcntl, "flock", flock)
    assert train(out=tmp_path / "run").finished
