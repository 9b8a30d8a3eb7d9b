"""What a run may be resumed from, and what becomes of its folder: one device, in this process."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import run_forked
from tests.launch.checks.saved_runs import X, Y, assert_equal, content, make, step, train
from tests.results.checkpoints import flip_byte
from uneven import TensorData, TrainedState, fit
from uneven.errors import InputError
from uneven.results.record import RECORD, encode

torch.manual_seed(0)
FILES = ("state.json", "state.safetensors", "rank-0.json", "rank-0.safetensors")
Fit = Callable[..., TrainedState]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at steps 3, 6, 9 and its end, 10."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(out=folder, save_every="3 steps")
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """As if that run had been killed after its third checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "step-10")
    for path in folder.iterdir():
        if path.is_file() and path.name != ".uneven":
            path.unlink()
    return folder


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_version(path: Path) -> None:
    record = json.loads(path.read_bytes())
    del record["crc32"]
    path.write_bytes(encode({**record, "version": 3}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"a flipped byte in {name}": (lambda folder, name=name: flip_byte(folder / name, 100), name) for name in FILES},
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink(), f"{name} is missing") for name in FILES},
    **{f"half of {name}": (lambda folder, name=name: shorten(folder / name), name) for name in FILES},
    "an empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], ""),
    "another version": (lambda folder: of_another_version(folder / RECORD), "version 3"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_auto_takes_the_one_before_it(
    run: Path, whole: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = DAMAGES[damage]
    spoil(run / "step-9")
    before = content(run)
    for named in (run / "step-9", run):
        with pytest.raises(InputError) as refused:
            train(resume=named)
        assert "\n" not in str(refused.value)
        assert words in str(refused.value)
        assert "step-9" in str(refused.value)
        assert (f"{run / 'step-6'} is whole, and can be named instead" in str(refused.value)) == (named == run)
    assert content(run) == before
    capsys.readouterr()
    state = train(out=run, resume="auto", save_every="3 steps")
    said = capsys.readouterr().err
    assert "passed over: checkpoint" in said
    assert f"resumes from {run / 'step-6'}: 6 steps are trained" in said
    assert "1 later checkpoint" in said
    assert_equal(state, whole)
    assert {path.name for path in run.glob("s*-*")} == {
        *("step-3", "step-6", "step-9", "step-10", "superseded-1"),
    }


def another_model() -> nn.Module:
    return nn.Linear(4, 1, bias=False)


def test_all_checkpoints_damaged_or_of_another_model_is_one_line(run: Path) -> None:
    before = content(run)
    for named in (run, run / "step-9", "auto"):
        with pytest.raises(InputError, match="step-9 is of another model: bias has shape") as refused:
            train(another_model, out=run, resume=named)
        assert "\n" not in str(refused.value)
    assert content(run) == before
    for folder in run.glob("step-*"):
        (folder / "state.safetensors").unlink()
    with pytest.raises(InputError, match=r"none of 3 checkpoints can be used: .*step-9: state.safetensors is missing"):
        train(out=run, resume="auto")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resume": "nowhere"}, "resume='nowhere': there is no such folder"),
        ({"resume": "a file"}, "resume='a file': it is a file"),
        ({"resume": "empty"}, "resume='empty': no checkpoint in it"),
        ({"resume": "auto"}, "resume='auto' looks for checkpoints in the run's own folder: add out="),
        ({"resume": "run", "seed": 6}, "it has seed=5, this run 6; pass seed=5"),
        ({"resume": "run", "shuffle": False}, "it has shuffle=True, this run False; pass shuffle=True and no sampler"),
        ({"resume": "run", "global_batch_size": 4}, "it has global_batch_size=8, this run 4"),
        ({"resume": "run", "policy": "cadence", "batch_size": 4}, "pass batch_size=8"),
        ({"resume": "run", "samples": 32}, "its data set had 40 samples an epoch, this one has 32"),
        ({"resume": "run", "epochs": 1}, "9 steps are trained, and this run has only 5"),
        ({"resume": "run", "out": "run", "overwrite": True}, "leave overwrite out"),
        ({"resume": "run", "overwrite": True}, "leave overwrite out"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_does_not_fit_is_one_line_and_nothing_is_touched(
    run: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    Path("a file").touch()
    Path("empty").mkdir()
    before = content(run.parent)
    with pytest.raises(InputError) as refused:
        train(**changes)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert content(run.parent) == before


def test_a_run_goes_on_in_its_folder_and_a_finished_one_is_returned_as_it_is(run: Path, whole: Path) -> None:
    assert_equal(train(resume=run), whole)  # `out` need not be named again
    before = content(run)
    for changes in ({"resume": run}, {"resume": "auto", "out": run}):
        again = train(**changes)
        assert_equal(again, whole)
        assert again.folder == run
    assert content(run) == before
    for changes in ({"samples": 32}, {"model": another_model}):
        with pytest.raises(InputError, match=r"its data set had 40|is of another model"):
            train(resume=run, **changes)
    for path in run.glob("step-*"):  # the result needs none of them
        shutil.rmtree(path)
    assert_equal(train(resume=run), whole)
    flip_byte(run / "state.safetensors", 100)
    with pytest.raises(InputError, match="no checkpoint in it"):
        train(resume=run)


def test_a_run_that_was_killed_before_it_wrote_its_result_trains_nothing_again(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "state.json").unlink()
    assert_equal(train(out=run, resume="auto", save_every="3 steps"), whole)
    assert f"resumes from {run / 'step-10'}: 10 steps are trained" in capsys.readouterr().err
    assert json.loads((run / "log.json").read_text())["saves"] == [3, 6, 9, 10]


def test_more_epochs_go_on_and_so_do_more_steps(run: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "three"
    train(out=wanted, epochs=3)
    train(resume=run)
    assert_equal(train(resume=run, epochs=3), wanted)
    assert_equal(train(resume=run / "step-9", out=tmp_path / "steps", epochs=9, max_steps=15), wanted)
    before = content(tmp_path / "steps")
    train(resume=tmp_path / "steps", epochs=9, max_steps=15)
    assert content(tmp_path / "steps") == before


def test_an_older_checkpoint_moves_the_later_ones_aside_and_another_folder_leaves_all(
    run: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    assert_equal(train(resume=run / "step-3", out=tmp_path / "other"), whole)
    assert content(run) == before
    assert not list((tmp_path / "other").glob("step-*"))
    capsys.readouterr()
    assert_equal(train(resume=run / "step-3"), whole)
    assert f"2 later checkpoints of {run} moved to {run / 'superseded-1'}" in capsys.readouterr().err
    assert {path.name for path in (run / "superseded-1").iterdir()} == {"step-6", "step-9"}
    # The run is finished now; its result goes aside, too: a killed run would otherwise be taken for a finished one.
    assert_equal(train(resume=run / "step-3"), whole)
    assert f"the result of {run} moved to {run / 'superseded-2'}" in capsys.readouterr().err
    assert (run / "superseded-2" / "state.json").exists()
    assert (run / "superseded-2" / "timeline.json").exists()


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from tests.launch.checks.saved_runs import train
train(devices=None)
"""


def test_uneven_run_refuses_with_exit_code_2(run: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[3])))
    flip_byte(run / "step-9" / "rank-0.safetensors", 100)
    command = [sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu", "--global-batch-size", "8"]
    refused = run_forked([*command, "--resume", str(run)], cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "Traceback" not in refused.stderr
    assert [line for line in refused.stderr.splitlines() if "rank-0.safetensors" in line] == [
        line for line in refused.stderr.splitlines() if line.startswith("uneven: ")
    ]
    passed = run_forked([*command, "--resume", "auto", "--out", str(run)], cwd=tmp_path)
    assert passed.returncode == 0, passed.stderr
    assert f"resumes from {run / 'step-6'}" in passed.stderr
    assert "it was saved by 1 device and goes on with 2" in passed.stderr
    assert TrainedState.load(run).finished


def test_settings_that_are_kept_from_the_checkpoint_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other_adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.02, betas=(0.5, 0.999), weight_decay=0.1)

    train(resume=run / "step-6", out=run.parent / "same", save_every="3 steps")
    said = capsys.readouterr().err
    assert "kept from the checkpoint" not in said
    assert "a step keeps" not in said
    data = TensorData(X, Y)
    fit(
        model=make, optimizer=other_adam, step=step, dataset=data, batch_size=16, epochs=2, seed=5, devices="cpu",
        progress="lines", resume=run / "step-6", out=run.parent / "other",
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "the optimizer's betas=[0.9, 0.999] is kept from the checkpoint; [0.5, 0.999] has no effect" in said
    assert "the optimizer's weight_decay=0 is kept from the checkpoint; 0.1 has no effect" in said
    assert said.count("has no effect") == 2  # a new lr has one
    assert "a step keeps the 8 samples of the checkpoint; with this run's batch_size it had 16" in said
    assert "  batch 8   precision" in said
