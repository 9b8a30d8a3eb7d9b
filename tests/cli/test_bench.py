import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.documents import check_document
from uneven import TrainedState
from uneven.bench import models, modes
from uneven.cli.main import main


def uneven(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uneven", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def test_list_shows_every_model_and_mode() -> None:
    done = uneven("bench", "list", "--json")
    assert done.returncode == 0
    listed = json.loads(done.stdout)
    assert [row["name"] for row in listed["models"]] == [*models.NAMES, *models.LARGE]
    assert listed["modes"] == list(modes.NAMES)
    assert "sync" in listed["modes"]


def test_json_is_the_summary_alone(tmp_path: Path) -> None:
    done = uneven(
        *("bench", "run", "--model", "logistic", "--data", "mnist-mini", "--epochs", "1", "--samples", "640"),
        *("--out", str(tmp_path), "--json"),
    )
    check_document("bench run", json.loads(done.stdout))
    assert json.loads(done.stdout)["model"] == "logistic"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "lenet5"), 2, ("'lenet5'", "lenet")),
        (("--model", "logistic", "--device", "cpu@0"), 2, ("'cpu@0'", "above 0")),
        (("--model", "logistic", "--device", "cpu%50"), 2, ("'cpu%50'", "cpu@")),
        (("--model", "logistic", "--device", "cuda:9"), 2, ("'cuda:9'", "uneven devices")),
        (("--model", "logistic", "--batch-size", "0"), 2, ("batch_size=0", "at least 1")),
        (("--model", "logistic", "--epochs", "many"), 2, ("--epochs", "integer")),
        (("--model", "logistic", "--out", "/proc/nowhere"), 3, ("/proc/nowhere", "--out")),
    ],
)
def test_bad_input_is_one_line_without_a_traceback(
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["uneven", "bench", "run", "--data", "mnist-mini", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(word in said for word in words), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "devices", "slots"),
    [("solo-0", "cpu", 157), pytest.param("sync", "cpu,cpu", 79, marks=pytest.mark.soak)],
)
def test_ctrl_c_exits_130_and_keeps_the_state(tmp_path: Path, mode: str, devices: str, slots: int) -> None:
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "uneven", "bench", "run", "--model", "mlp", "--data", "mnist-mini"),
            *("--epochs", "1000", "--out", str(tmp_path), "--mode", mode, "--device", devices),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("epoch 1/"):
            break
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=150)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert "stopped" in errors
    folder = tmp_path / "mlp" / mode / "seed-0"
    state = TrainedState.load(folder)
    assert not state.finished
    assert state.slot >= slots
    assert not (folder / "summary.json").exists()
