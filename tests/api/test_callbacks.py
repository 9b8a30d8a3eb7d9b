"""max_steps and callbacks through the entry points: fit, the builder, a loop of your own; alone and on rank processes.

The rules between ranks are tested on threads, in tests/train/test_callbacks.py and test_steps.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from tests.train.step_runs import EVALUATION, Plain, eval_step
from uneven import Callback, CallbackInfo, Ddp, EarlyStopping, InputError, KeepBest, RankError, TrainedState, fit
from uneven.data.tensors import TensorData
from uneven.launch.find_script import Script
from uneven.launch.script import run_script

DATA = TensorData(X.double(), Y)
COMMON: dict[str, Any] = {"dataset": DATA, "batch_size": 24, "seed": 3, "progress": "off", "devices": "cpu"}


def run_fit(**changes: Any) -> TrainedState:
    given = {"model": lambda: Net(torch.float64), "optimizer": OPTIMIZERS["sgd"], "step": mean_loss, **COMMON}
    return fit(**given | changes)


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: list[int] = []

    def on_step(self, info: CallbackInfo) -> None:
        self.seen.append(info.step)
        if info.step >= self.step:
            info.stop("seen enough")


def test_fit_ends_after_max_steps_and_evaluates_in_steps(capfd: pytest.CaptureFixture[str]) -> None:
    evaluate = (EVALUATION.dataset, eval_step)
    state = run_fit(max_steps=7, evaluate=evaluate, eval_every="4 steps", progress="lines")
    Plain().train(0, 7).assert_equal(state)
    assert (state.finished, state.slot, state.config["epochs"]) == (True, 7, 3)
    assert [(e["epoch"], e["step"], "loss" in e) for e in state.history] == [
        *((1, 3, False), (2, 4, True), (2, 6, False)),
        (3, 7, True),
    ]
    said = capfd.readouterr().err
    assert "70 samples, 3 epochs of 3 steps; it ends after 7 steps" in said
    assert "epoch 2/3, step 4  train_loss" in said
    entries: list[int] = []
    builder = Ddp.builder(lambda: Net(torch.float64), OPTIMIZERS["sgd"], mean_loss).dataset(DATA)
    builder.evaluate(*evaluate, every="2 steps").on_epoch(lambda entry: entries.append(entry["step"]))
    run = builder.batch_size(24).max_steps(4).progress("off").devices("cpu").run()
    assert [entry["step"] for entry in run.metrics()] == [2, 3, 4]
    assert run.join().slot == 4
    assert entries == [3, 4]  # the ends of epochs alone


def test_a_callback_stops_fit_without_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callback = StopsAt(4)
    state = run_fit(epochs=9, callbacks=[callback], out=tmp_path / "run", progress="lines")
    assert callback.seen == [1, 2, 3, 4]  # in one process it is this very object
    for found in (state, TrainedState.load(tmp_path / "run")):
        assert (found.finished, found.stopped, found.slot) == (False, "StopsAt: seen enough", 4)
    assert "stopped early (StopsAt: seen enough): trained 94 samples" in capfd.readouterr().err
    Plain().train(0, 4).assert_equal(state)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 0}, "max_steps=0 must be a whole number of at least 1"),
        ({"epochs": 1, "eval_every": "5 months"}, "eval_every='5 months' must be a whole number of epochs"),
        ({"epochs": 1, "eval_every": "5 steps"}, "eval_every='5 steps' without an evaluation: pass evaluate="),
        ({"epochs": 1, "monitor": "loss"}, "monitor='loss' without an evaluation"),
        ({"epochs": 1, "callbacks": KeepBest()}, "callbacks must be a list, got KeepBest"),
        ({"epochs": 1, "callbacks": [KeepBest()]}, "KeepBest follows an evaluated metric; pass evaluate="),
        ({}, "epochs is missing: pass epochs=..., or max_steps=..."),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        run_fit(**changes)
    assert words in str(caught.value)


class Failing(Callback):
    def on_step(self, info: CallbackInfo) -> None:
        if info.step >= 5:
            raise KeyError("boom")


def test_on_rank_processes_all_of_it_together(tmp_path: Path) -> None:
    """Claims, events inside epochs, a stop agreed by all and the best params, which the launcher reads and saves."""
    options: dict[str, Any] = {"batch_size": 4, "devices": "cpu,cpu@0.4", "policy": "async", "epochs": 50}
    evaluation = {"evaluate": (EVALUATION.dataset, eval_step), "eval_every": "7 steps"}
    callbacks = [EarlyStopping("loss", patience=2, min_delta=10.0), KeepBest("loss", mode="max")]
    state = run_fit(**options, **evaluation, callbacks=callbacks, out=tmp_path / "run")
    assert (state.finished, state.slot) == (False, 21)
    assert (state.stopped or "").startswith("EarlyStopping: loss has not improved in 2 evaluations; the best was ")
    evaluated = {entry["step"]: entry["loss"] for entry in state.history if "loss" in entry}
    assert list(evaluated) == [7, 14, 21]
    assert state.best is not None
    assert state.best["step"] == max(evaluated, key=lambda step: evaluated[step])
    for found in (state, TrainedState.load(tmp_path / "run")):
        with torch.no_grad():
            sums, count = eval_step(found.load_into(Net(torch.float64)), (X[:37].double(), Y[:37]))
        assert float(sums["loss"]) / count == pytest.approx(state.best["loss"], rel=1e-9)
    failing = {"batch_size": 12, "devices": "cpu,cpu", "policy": "balanced", "max_steps": 9, "callbacks": [Failing()]}
    with pytest.raises(RankError, match=r"callback Failing.on_step failed on rank [01] at step 5: KeyError: 'boom' \("):
        run_fit(**failing)


def train_loop(**changes: Any) -> tuple[TrainedState, nn.Module, int]:
    model, batches = Net(torch.float64), 0
    ddp = Ddp.setup(model, OPTIMIZERS["sgd"], **COMMON | changes)
    for epoch in range(ddp.epochs):
        for x, y in ddp.batches(epoch):
            batches += 1
            ddp.step(F.cross_entropy(ddp(x), y))
    return ddp.finish(), model, batches


def test_a_loop_of_your_own_ends_after_max_steps() -> None:
    state, _, batches = train_loop(max_steps=7)
    assert (state.finished, state.slot, batches, len(state.history)) == (True, 7, 7, 3)
    Plain().train(0, 7).assert_equal(state)


def test_a_loop_of_your_own_ends_when_a_callback_stops_it() -> None:
    state, model, batches = train_loop(epochs=9, callbacks=[StopsAt(4)])
    assert (state.finished, state.stopped, batches) == (False, "StopsAt: seen enough", 4)
    Plain().train(0, 4).assert_equal(state)
    assert all(torch.equal(param, state.params[name]) for name, param in model.named_parameters())
    with pytest.raises(RankError, match=r"callback Failing.on_step failed on rank 0 at step 5: KeyError: 'boom'"):
        train_loop(epochs=9, callbacks=[Failing()])
    with pytest.raises(InputError, match="eval_every='5 steps' without an evaluation"):
        train_loop(epochs=9, eval_every="5 steps")


SCRIPT = """
import sys
from pathlib import Path
from torch.nn import functional as F
from tests.api.test_callbacks import COMMON, Net, OPTIMIZERS, StopsAt
from uneven import Ddp
import torch

settings = COMMON | {"devices": "auto", "batch_size": 12, "epochs": 9}
callbacks = [StopsAt(4)] if Ddp.rank() == 0 else []  # as people write it: on the first rank alone
ddp = Ddp.setup(Net(torch.float64), OPTIMIZERS["sgd"], callbacks=callbacks, **settings)
for epoch in range(ddp.epochs):
    for x, y in ddp.batches(epoch):
        ddp.step(F.cross_entropy(ddp(x), y))
state = ddp.finish()
Path(sys.argv[1], f"{ddp.rank}").write_text(f"{state.slot} {state.stopped}")
"""


def test_a_stop_by_the_first_rank_of_a_script_ends_all_ranks_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run_script(Script(script, (str(tmp_path),)), {"devices": "cpu,cpu"})  # exit code 0, or it raises
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["5 StopsAt: seen enough"] * 2
