"""Slices of a GPU from end to end: the daemon starts before the ranks and ends after them, in whatever way a run ends.

Without a GPU: the driver's program is a stand-in, and the ranks run scripts that never touch CUDA.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import nothing_left
from tests.forked import ForkedPopen
from tests.hardware.fake_mps import FakeMps
from tests.hardware.fake_mps import fake_mps as fake_mps
from uneven import Ddp, InputError, RankError, fit
from uneven.hardware.device import Device, parse_devices
from uneven.launch import run, script
from uneven.launch.context import ProcessContext
from uneven.launch.external.variables import read_launcher
from uneven.launch.find_script import Script
from uneven.launch.launcher import run_ranks
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

PAIR = "cuda:0%60,cuda:0%24"
TELL = """
import json, os, sys
from pathlib import Path
from uneven import Ddp
Path(sys.argv[1], f"rank-{Ddp.rank()}").write_text(json.dumps({"pid": os.getpid(), **os.environ}))
"""
WAIT = """
import os, signal, uneven
print("rank", os.getpid(), flush=True)
signal.pause()
"""


def told(folder: Path, rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / f"rank-{rank}").read_text())
    return facts


def run_on(devices: str, folder: Path, source: str) -> None:
    (folder / "script.py").write_text(source)
    order = {"path": str(folder / "script.py"), "args": [str(folder)], "settings": {}}
    run_ranks(None, parse_devices(devices), Requests(), Reporter("lines"), lambda _: None, script=order)


def test_every_rank_is_given_its_slice(fake_mps: FakeMps, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_on("cuda:0%60,cpu,cuda:0%70", tmp_path, TELL)
    ranks = [told(tmp_path, rank) for rank in range(3)]
    (home,) = fake_mps.homes()
    percents = [environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for environ in ranks]
    pipes = [environ.get("CUDA_MPS_PIPE_DIRECTORY") for environ in ranks]
    assert percents == ["60", None, "70"]
    assert pipes == [f"{home}/pipe", None, f"{home}/pipe"]
    assert capsys.readouterr().err.count("slices of cuda:0 add up to 130 %") == 1
    assert fake_mps.quits() == 1
    assert fake_mps.left() == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        pytest.param("raise KeyError('own')", "own", marks=pytest.mark.soak),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_run_that_fails_ends_the_daemon(fake_mps: FakeMps, tmp_path: Path, end: str, words: str) -> None:
    source = f"import os, signal\nfrom uneven import Ddp\nif Ddp.rank() == 1: {end}\nsignal.pause()"
    with pytest.raises(RankError) as caught:
        run_on(PAIR, tmp_path, source)
    assert "rank 1 (cuda:0%24" in str(caught.value)
    assert words in str(caught.value)
    assert fake_mps.left() == []


def test_a_wrong_mix_starts_nothing(fake_mps: FakeMps, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all ranks of a GPU are slices or none is"):
        run_on("cuda:0,cuda:0%24", tmp_path, TELL)
    assert fake_mps.starts() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_neither_ctrl_c_nor_a_killed_launcher_leaves_anything(
    fake_mps: FakeMps, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(WAIT)
    code = (
        "import sys\nfrom pathlib import Path\nfrom uneven.launch import script\n"
        "script.check_device = lambda device: None\n"
        "script.run_script(script.Script(Path(sys.argv[1])), {'devices': sys.argv[2]})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "script.py"), PAIR]
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(150) == -number
        nothing_left(pids, launcher.pid)
        fake_mps.all_gone()
    assert fake_mps.quits() == 1


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not there pass for once, and what `uneven run` changes in its process is put back."""
    monkeypatch.setattr("uneven.launch.script.check_device", lambda _: None)
    monkeypatch.setattr("uneven.launch.checks.preflight.check_device", lambda _: None)
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("clean")
def test_uneven_run_gives_a_single_slice_a_process_too(fake_mps: FakeMps, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TELL)
    script.run_script(Script(tmp_path / "script.py", (str(tmp_path),)), {"devices": "cuda:0%60"})
    facts = told(tmp_path, 0)
    assert facts["pid"] != os.getpid()
    assert facts["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    assert fake_mps.left() == []


def train(devices: str) -> dict[str, torch.Tensor]:
    return fit(
        model=lambda: torch.nn.Linear(4, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch).square().mean(),
        dataset=torch.randn(20, 4, generator=torch.Generator().manual_seed(0)),
        batch_size=4,
        epochs=2,
        devices=devices,
        progress="off",
    ).params


@pytest.mark.usefixtures("clean")
def test_fit_on_a_single_slice_trains_in_a_rank_process_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Device, ...]] = []
    true = run.train_on_ranks

    def on_a_cpu(task: Any, config: Any, devices: tuple[Device, ...], *rest: Any, **more: Any) -> Any:
        seen.append(devices)
        return true(task, config, (Device("cpu"),), *rest, **more)

    monkeypatch.setattr(run, "train_on_ranks", on_a_cpu)
    alone = train("cuda:0%60")
    assert seen == [parse_devices("cuda:0%60")]
    assert all(torch.equal(value, alone[name]) for name, value in train("cpu").items())


@pytest.mark.usefixtures("clean")
def test_a_loop_of_ones_own_on_a_slice_says_how_to_start_it() -> None:
    with pytest.raises(InputError, match=r"uneven run train\.py --devices cuda:0%60"):
        Ddp.setup(
            torch.nn.Linear(4, 1),
            lambda params: torch.optim.SGD(params, lr=0.1),
            dataset=torch.zeros(8, 4),
            batch_size=2,
            epochs=1,
            devices="cuda:0%60",
            progress="off",
        )


def test_under_torchrun_it_is_too_late_for_slices() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    started = read_launcher({**place, "TORCHELASTIC_RUN_ID": "job"})
    assert started is not None
    with pytest.raises(InputError) as caught:
        ProcessContext(started).devices(PAIR)
    message = str(caught.value)
    for word in ("torchrun", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "'cuda:0,cuda:0'", f"uneven run --devices {PAIR}"):
        assert word in message
