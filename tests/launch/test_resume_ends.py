"""Runs that have ended and are started again: which of them are over, and which go on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.checks.saved_runs import assert_equal, content, train
from uneven import Callback, CallbackInfo, EarlyStopping, TensorData, TrainedState
from uneven.errors import MachineError

TEST_SET = TensorData(torch.ones(4, 4), torch.ones(4, 1))


def eval_step(model: Any, batch: Any) -> tuple[dict[str, float], int]:
    return {"loss": 4.0}, 4


@pytest.mark.parametrize(
    ("first", "then", "steps"),
    [
        ({"epochs": 2, "max_steps": 100}, {"epochs": 4, "max_steps": 100}, 20),
        ({"epochs": 2, "max_steps": 100}, {"epochs": 2, "max_steps": 100}, 10),
        ({"epochs": 9, "max_steps": 7}, {"epochs": 9, "max_steps": 7}, 7),
        ({"epochs": 2, "max_steps": 7}, {"epochs": 9, "max_steps": 7}, 7),
        ({"epochs": 9, "max_steps": 7}, {"epochs": 9, "max_steps": 12}, 12),
    ],
)
def test_a_finished_run_goes_on_where_it_has_more_steps_now(
    first: dict[str, int], then: dict[str, int], steps: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slot = train(out=run, save_every="5 steps", **first).slot
    before = content(run)
    again = train(out=run, save_every="5 steps", resume="auto", **then)
    assert (again.slot, again.finished, TrainedState.load(run).slot) == (steps, True, steps)
    assert (content(run) == before) == (slot == steps)  # nothing is written where nothing is trained


def test_a_run_that_a_callback_has_ended_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"out": run, "save_every": "1 epoch", "resume": "auto", "evaluate": (TEST_SET, eval_step)}

    def go(**changes: Any) -> TrainedState:
        return train(**{**options, "epochs": 8, "callbacks": [EarlyStopping("loss", patience=1)], **changes})

    first = go()
    assert (first.slot, first.finished) == (10, False)
    before = content(run)
    capsys.readouterr()
    again = go()
    assert (again.slot, again.stopped) == (10, first.stopped)
    assert content(run) == before
    assert f"{run} was ended after 10 steps by a callback" in (said := capsys.readouterr().err)
    assert "it goes on with more epochs" in said
    assert go(epochs=9).slot == 15
    assert (run / "superseded-1" / "state.json").exists()  # else a kill would leave the run ended where it was
    assert go(epochs=9, resume=run / "epoch-1", callbacks=[]).finished


class Stops(Callback):
    def on_step(self, info: CallbackInfo) -> None:
        if info.step == 3:
            info.stop("enough")


def test_with_max_steps_the_epochs_that_it_leaves_are_those_of_the_record(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "save_every": "2 steps", "epochs": 9, "max_steps": 7}
    assert train(callbacks=[Stops()], **options).slot == 3
    assert train(resume="auto", **options).slot == 3
    assert train(resume="auto", **{**options, "max_steps": 8}).slot == 8


def test_a_result_that_cannot_be_written_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wanted = train(out=tmp_path / "whole")
    monkeypatch.setattr("uneven.results.state.write_tensors", write)
    with pytest.raises(MachineError) as full:
        train(out=tmp_path / "run", save_every="5 steps")
    assert "no space left" in str(full.value)
    assert "step-10 is the last checkpoint" in str(full.value)
    assert (full.value.state.slot, full.value.state.finished) == (10, True)
    monkeypatch.undo()
    assert_equal(full.value.state, tmp_path / "whole")
    full.value.state.save(tmp_path / "elsewhere")
    assert_equal(wanted, tmp_path / "elsewhere")
    assert_equal(train(out=tmp_path / "run", resume="auto"), tmp_path / "whole")  # nothing is trained again


def test_a_resumed_run_keeps_the_last_ones_from_its_start_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(out=run, save_every="1 steps")
    (run / "state.json").unlink()
    seen: list[list[str]] = []

    class Looks(Callback):
        def on_start(self, info: CallbackInfo) -> None:
            seen.append(sorted(path.name for path in run.glob("step-*")))

    train(out=run, resume="auto", save_every="1 steps", keep_last=2, epochs=3, callbacks=[Looks()])
    assert seen == [["step-10", "step-9"]]
    assert sorted(path.name for path in run.glob("step-*")) == ["step-14", "step-15"]


@pytest.mark.parametrize("first", [7, 10])
def test_an_epoch_that_goes_on_has_one_end_in_the_history(first: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "save_every": "5 steps", "epochs": 9}
    train(max_steps=first, **options)
    state = train(max_steps=15, resume="auto", **options)
    ends = [(entry["epoch"], entry["step"]) for entry in state.history if not entry.get("is_inside_epoch")]
    assert ends == [(1, 5), (2, 10), (3, 15)]
    inside = [(entry["epoch"], entry["step"]) for entry in state.history if entry.get("is_inside_epoch")]
    assert inside == ([(2, 7)] if first == 7 else [])
    again = train(max_steps=15, resume="auto", **options)
    assert [entry["step"] for entry in again.history] == [entry["step"] for entry in state.history]
