"""A rank that is lost before the first step: the others are started again without it, as processes."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from uneven import InputError, TrainedState, fit
from uneven.errors import RankError
from uneven.launch import membership
from uneven.launch.find_script import Script
from uneven.launch.script import run_script
from uneven.train import worker

# Where it is lost: what process 1 calls there, which ends it. `model` is before the ranks meet, `step` in the warm-up.
PLACES: dict[str, tuple[Any, str]] = {
    "the comparison": (membership, "check_agreement"),
    "the group": (membership, "form_group"),
    "round 0": (worker, "send_model"),
    "the costs": (worker, "gather_rows"),
    "the members": (worker, "gather_json"),
}


def is_process(number: int) -> bool:
    return sys.argv[0].endswith("rank.py") and sys.argv[2] == str(number)


@dataclass(frozen=True)
class Dying:
    """Makes the model of a run in which process 1 is lost at a place, at its first starts."""

    place: str
    folder: Path
    times: int = 1

    def __call__(self) -> nn.Module:
        self.at("model")
        if is_process(1) and self.place in PLACES:
            module, name = PLACES[self.place]
            setattr(module, name, self._before(getattr(module, name)))
        return make()

    def at(self, place: str) -> None:
        starts = self.folder / "starts"
        if place == self.place and is_process(1) and len(list(starts.iterdir())) < self.times:
            (starts / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def die(*args: Any, **kwargs: Any) -> Any:
            self.at(self.place)
            return call(*args, **kwargs)

        return die


def train(dying: Dying, **settings: Any) -> TrainedState:
    (dying.folder / "starts").mkdir()

    def own_step(model: nn.Module, batch: Any) -> torch.Tensor:
        dying.at("step")
        return step(model, batch)

    given = {"devices": "cpu,cpu@0.9,cpu", "policy": "balanced", "batch_size": 4, "epochs": 2, **settings}
    return fit(model=dying, optimizer=make_optimizer, step=own_step, dataset=SAMPLES, seed=3, **given)


def assert_as_by_one_process(state: TrainedState, batch_size: int) -> None:
    alone = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=batch_size, epochs=2, seed=3,
        devices="cpu", progress="off",
    )  # fmt: skip
    assert state.finished
    assert state.samples == alone.samples == sum(state.rank_samples)
    for name, value in alone.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "place",
    ["model", "step", *(pytest.param(one, marks=[] if one == "the group" else pytest.mark.soak) for one in PLACES)],
)
def test_the_others_begin_without_it_and_train_all_samples(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = None if place == "step" else (1.0, 5.0, 2.0)  # else nothing is measured, and `step` is the first one
    state = train(Dying(place, tmp_path), shares=shares, out=tmp_path / "out", progress="lines")
    (segment,) = state.segments
    assert segment["devices"] == ["cpu", "cpu"]
    assert segment["why"].startswith("rank 1 (cpu@0.9 on ")
    assert segment["why"].endswith("was ended by SIGKILL before the first step: 2 ranks begin without it")
    assert segment["why"] in capsys.readouterr().err
    assert_as_by_one_process(state, batch_size=12)  # a step keeps its samples
    first, last = state.rank_samples
    assert shares is None or abs(last - 2 * first) <= 2 * state.slot  # its shares follow the devices
    assert state.timeline is not None
    events = [event.fields["why"] for event in state.timeline.events if event.kind == "generation"]
    assert events == [segment["why"]] * 2
    assert state.config["devices"] == "cpu,cpu"


@pytest.mark.parametrize("policy", [pytest.param("cadence", marks=pytest.mark.soak), "async"])
def test_one_that_is_left_trains_alone(policy: str, tmp_path: Path) -> None:
    state = train(Dying("round 0", tmp_path, times=2), policy=policy, progress="off")
    assert state.segments[0]["why"].count("SIGKILL") == 2
    assert_as_by_one_process(state, batch_size=4)


def test_with_too_few_left_the_run_ends_in_words(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"SIGKILL; 1 rank is left, and .* needs 2"):
        train(Dying("step", tmp_path), devices="cpu,cpu", min_ranks=2, progress="off")
    assert len(list((tmp_path / "starts").iterdir())) == 1


def test_with_on_fault_end_it_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* was ended by SIGKILL"):
        train(Dying("model", tmp_path), devices="cpu,cpu", on_fault="end", progress="off")


@pytest.mark.parametrize("number", [1, None])
def test_an_error_of_the_users_ends_the_run_at_once(number: int | None, tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        if sys.argv[0].endswith("rank.py"):
            (tmp_path / str(os.getpid())).touch()
        if number is None or is_process(number):
            raise LookupError("no such weights")
        return make()

    with pytest.raises(RankError, match="no such weights"):
        fit(
            model=make_model, optimizer=make_optimizer, step=step, dataset=SAMPLES, batch_size=4, epochs=1,
            devices="cpu,cpu", progress="off",
        )  # fmt: skip
    assert len(list(tmp_path.iterdir())) <= 2  # each started once


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from uneven import Ddp, fit

place, starts, out = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def end(where):
    if where == place and Ddp.rank() == 1 and not starts.exists():
        starts.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def own_step(model, batch):
    end("step")
    return step(model, batch)

end("script")
settings = dict(dataset=SAMPLES, batch_size=4, epochs=2, seed=3, progress="off", out=out)
if place == "script":
    settings["memory_cap"] = (8, 16)
if place == "loop":
    end("loop")
    model = make()
    ddp = Ddp.setup(model, make_optimizer, **settings)
    for epoch in range(ddp.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(own_step(model, batch))
    ddp.finish()
else:
    fit(model=make, optimizer=make_optimizer, step=own_step, **settings)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    (tmp_path / "t.py").write_text(SCRIPT)
    return Script(tmp_path / "t.py")


@pytest.mark.parametrize("place", ["script", "step", "loop"])
def test_a_script_is_started_again(
    place: str, script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = (place, str(tmp_path / "died"), str(tmp_path / "out"))
    run_script(Script(script.path, args), {"devices": "cpu,cpu"})
    assert "SIGKILL before the first step: 1 rank begins without it" in capfd.readouterr().err
    state = TrainedState.load(tmp_path / "out")
    assert state.segments[0]["devices"] == ["cpu"]
    assert "before the first step" in state.segments[0]["why"]
    assert_as_by_one_process(state, batch_size=8)


def test_a_script_that_needs_all_of_them_says_so(script: Script, tmp_path: Path) -> None:
    args = ("script", str(tmp_path / "died"), str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"min_ranks=2 .*1: cpu"):
        run_script(Script(script.path, args), {"devices": "cpu,cpu", "min_ranks": 2})
