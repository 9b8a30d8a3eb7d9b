"""A loop of the user's own goes on from a checkpoint: the same bits as one that was not interrupted.

On threads, or in this process by Ddp.setup; the loop's code is the same in every run, as a user's script is.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from tests.api.loops import GAN_DATA, Pair, d_losses, g_loss, make_loop
from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, X, Y
from tests.train.exact_runs import Net as PlainNet
from tests.train.resumed_runs import ASYNC, SAME, assert_same, metrics
from tests.train.resumed_runs import train as train_by_fit
from uneven import Ddp, InputError, TrainedState
from uneven.api.loop import Loop

DATA = TensorDataset(X.double(), Y)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def full_loop(loop: Loop, steps: list[int] | None = None) -> TrainedState:
    """Everything that a loop may do, with what it counts kept in checkpoints; the first epoch is left early."""
    counted = loop.register("counted", {"batches": 0, "rank": loop.rank})
    for epoch in range(loop.epochs):
        for x, y in loop.batches(epoch):
            counted["batches"] += 1
            loss = F.cross_entropy(loop(x), y)
            loop.log(own_loss=loss)
            if steps is not None:
                steps.append(loop.global_step)
            loop.step(loss)
            if epoch == 0 and loop.rank == 0 and loop.samples >= 40:
                loop.skip_rest()
                break
        loop.log(after=epoch + 0.5)
        loop.scheduler_step(1.0 + epoch if loop.rank == 0 else None)
    state = loop.finish()
    assert counted["rank"] == loop.rank
    state.history.append({"batches": counted["batches"]})
    return state


def plain_body(loop: Loop, stop_after: int = 1000) -> TrainedState:
    for epoch in range(loop.epochs):
        for x, y in loop.batches(epoch):
            loop.step(F.cross_entropy(loop(x), y))
            if loop.global_step > stop_after:
                loop.worker.requests.stop.set()
    return loop.finish()


def run_threads(size: int, body: Callable[[Loop], TrainedState] = full_loop, **options: Any) -> TrainedState:
    return on_threads(size, lambda group: body(make_loop(group, **{"epochs": 3, **options})))[0]


@pytest.mark.parametrize("policy", list(SAME))
def test_an_own_loop_goes_on_bit_by_bit(policy: str, tmp_path: Path) -> None:
    options = {**SAME[policy], "scheduler": plateau, "optimizer": OPTIMIZERS["adam"], "global_batch_size": None}
    options |= {"batch_size": 8, "lr_scale": 1.0}
    whole = run_threads(2, save_every="4 steps", out=tmp_path / "whole", **options)
    assert whole.skipped
    assert len(whole.saves) > 1
    for slot in whole.saves:
        again = run_threads(
            2, save_every="4 steps", out=tmp_path / f"{slot}", resume=tmp_path / f"whole/step-{slot}", **options
        )
        assert_same(again, whole)
        assert metrics(again) == metrics(whole)
        assert (again.log, again.skipped, again.samples) == (whole.log, whole.skipped, whole.samples)


def test_async_trains_the_rest_exactly_once(tmp_path: Path) -> None:
    options = {**ASYNC, "global_batch_size": None}
    run_threads(2, plain_body, save_every="4 steps", out=tmp_path, **options)
    again = run_threads(2, plain_body, resume=tmp_path / "step-8", **options)
    assert (again.finished, again.samples) == (True, 3 * 70)


@pytest.mark.parametrize("options", [{"accumulate": 3, "batch_size": 4}, {"strategy": "zero1"}, {"several": True}])
def test_accumulation_sharded_state_and_several_optimizers_go_on(options: dict[str, Any], tmp_path: Path) -> None:
    is_gan = options.pop("several", False)

    def rank(group: ThreadGroup, **more: Any) -> TrainedState:
        given: dict[str, Any] = {"optimizer": OPTIMIZERS["adam"]}
        if is_gan:
            parts = {"g": (g := Pair(6, 1)), "d": (d := Pair(1, 2))}
            made = {name: OPTIMIZERS["adam"](part.parameters()) for name, part in parts.items()}
            given = {"model": parts, "optimizer": made, "dataset": GAN_DATA}
        loop = make_loop(group, **{**given, **options, "shares": (2, 1), **more})
        for epoch in range(loop.epochs):
            for batch in loop.batches(epoch):
                if is_gan:
                    loop.step(sum(d_losses(g, d, *batch)), optimizer="d")
                    loop.step(g_loss(g, d, batch[1]), optimizer="g")
                else:
                    loop.step(F.cross_entropy(loop(batch[0]), batch[1]))
        return loop.finish()

    whole = on_threads(2, lambda group: rank(group, save_every="2 steps", out=tmp_path / "a"))[0]
    again = on_threads(2, lambda group: rank(group, resume=tmp_path / "a/step-4", save_every="2 steps", out=tmp_path))[
        0
    ]
    assert_same(again, whole)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def set_up(out: Path | None, resume: Any = None, **options: Any) -> Loop:
    model = Dropping()
    settings: Any = {"batch_size": 16, "epochs": 3, "seed": 3, "devices": "cpu", "progress": "off", **options}
    return Ddp.setup(
        model, torch.optim.Adam(model.parameters(), lr=0.05), dataset=DATA, out=out, resume=resume, **settings
    )


def train_plainly(ddp: Loop, stop: Callable[[int, int], None] = lambda *_: None) -> tuple[TrainedState, list[int]]:
    """As a DataLoader stood there: one pass per epoch, with random numbers of the user's own between epochs."""
    passes = []
    for epoch in range(ddp.epochs):
        passes.append(0)
        for x, y in ddp:
            ddp.step(F.cross_entropy(ddp(x), y))
            passes[-1] += 1
            stop(epoch, passes[-1])
        torch.rand(3)
        stop(epoch, -1)
    return ddp.finish(), passes


@pytest.mark.parametrize("save_every", ["4 steps", "1 epoch"])
def test_done_epochs_have_no_batches_and_random_numbers_go_on(save_every: str, tmp_path: Path) -> None:
    whole, passes = train_plainly(set_up(tmp_path / "whole", save_every=save_every))
    assert passes == [5, 5, 5]
    name, rest = ("step-8", [0, 2, 5]) if "steps" in save_every else ("epoch-2", [0, 0, 5])
    ddp = set_up(tmp_path / "again", tmp_path / "whole" / name, save_every=save_every)
    assert (ddp.epoch, ddp.global_step) == ((1, 8) if "steps" in save_every else (1, 10))  # its own code is due
    again, passes = train_plainly(ddp)
    assert passes == rest
    assert_same(again, whole)
    assert (ddp.global_step, ddp.samples, ddp.epoch) == (15, 210, 3)


class KilledError(Exception):
    """Where a test ends a loop as a kill would."""


@pytest.mark.parametrize("kill_at", [9, 10, 13, 15])
@pytest.mark.parametrize("save_every", ["1 epoch", "3 steps"])
def test_a_loop_that_begins_with_ddp_epoch_runs_the_code_after_every_epoch_once(
    kill_at: int, save_every: str, tmp_path: Path
) -> None:
    def train(out: Path, kill_at: int = -1) -> tuple[TrainedState, list[int]]:
        seen: list[int] = []
        with set_up(out, "auto", save_every=save_every, scheduler=plateau) as ddp:
            for epoch in range(ddp.epoch, ddp.epochs):
                for x, y in ddp.batches(epoch):
                    ddp.step(F.cross_entropy(ddp(x), y))
                    if ddp.global_step == kill_at:
                        ddp.worker.saves.finish()
                        raise KilledError
                seen.append(epoch)
                assert ddp.epoch == epoch + 1
                ddp.log(val=1.0)
                ddp.scheduler_step(1.0)  # never better: the rate is halved with every epoch
        return ddp.finish(), seen

    whole, _ = train(tmp_path / "whole")
    with pytest.raises(KilledError):
        train(tmp_path / "run", kill_at)
    again, seen = train(tmp_path / "run")
    assert seen[-1] == 2
    assert metrics(again) == metrics(whole)
    assert [entry["val"] for entry in again.history] == [1.0] * 3
    assert_same(again, whole)


@pytest.mark.parametrize("where", [(1, 3), (1, -1)])
def test_ctrl_c_leaves_a_checkpoint_that_goes_on(where: tuple[int, int], tmp_path: Path) -> None:
    whole, _ = train_plainly(set_up(tmp_path / "whole"))

    def interrupt(*now: int) -> None:
        if now == where:
            os.kill(os.getpid(), signal.SIGINT)

    ddp = set_up(tmp_path / "run", "auto")
    with pytest.raises(KeyboardInterrupt), ddp:
        train_plainly(ddp, interrupt)
    (folder,) = (tmp_path / "run").glob("step-*")
    ddp = set_up(tmp_path / "run", "auto")
    assert folder.name == f"step-{ddp.global_step}"
    assert ddp.global_step == 10 if where[1] < 0 else ddp.global_step > 8  # after the step that follows the signal
    again, _ = train_plainly(ddp)
    assert again.finished
    assert again.samples == 210
    assert_same(again, whole)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    whole, _ = train_plainly(set_up(tmp_path, save_every="1 epoch"))
    ddp = set_up(tmp_path, "auto", save_every="1 epoch")
    value = ddp.register("best", 3)
    again, passes = train_plainly(ddp)
    ddp.log(late=1.0)
    assert (value, passes, ddp.epoch, ddp.global_step) == (3, [0, 0, 0], 3, 15)
    assert_same(again, whole)
    for name, param in ddp.model.named_parameters():
        assert torch.equal(param, whole.params[name])
    more, passes = train_plainly(set_up(tmp_path, "auto", save_every="1 epoch", epochs=4))
    assert (more.finished, more.samples, passes) == (True, 280, [0, 0, 0, 5])


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_finished_loop_has_its_registered_values_and_optimizer_state(
    is_kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> tuple[Loop, list[Any]]:
        ddp = set_up(tmp_path, "auto", save_every="1 epoch" if is_kept else None, progress="lines")
        best, total = ddp.register("best", {"epoch": -1}), ddp.register("total", torch.zeros(1))
        count = ddp.register("count", 0)
        for epoch in range(ddp.epoch, ddp.epochs):
            for x, y in ddp.batches(epoch):
                total += 1
                ddp.step(F.cross_entropy(ddp(x), y))
            best["epoch"] = epoch  # after the checkpoint of the epoch's end
            count = ddp.register("count", count + 1)
        ddp.finish()
        return ddp, [best["epoch"], float(total), count]

    first, values = train()
    assert values == [2, 15.0, 3]
    capsys.readouterr()
    again, found = train()
    state, wanted = again.optimizer.state_dict(), first.optimizer.state_dict()
    said = "no checkpoint of the end of" in capsys.readouterr().err
    if is_kept:
        assert (found, said) == (values, False)
        assert all(
            torch.equal(state["state"][place]["exp_avg"], own["exp_avg"]) for place, own in wanted["state"].items()
        )
        assert len(state["state"]) == len(wanted["state"]) > 0
    else:
        assert (found, said, state["state"]) == ([-1, 0.0, 0], True, {})


def test_registered_objects_come_back_in_place(tmp_path: Path) -> None:
    def kept() -> dict[str, Any]:
        return {
            "module": nn.Linear(2, 2),
            "tensor": torch.zeros(3),
            "numbers": [1, 2.5],
            "nested": {"names": ["a"], "table": torch.zeros(2)},
            "best": 0.5,
            "label": "first",
        }

    ddp = set_up(tmp_path)
    before = kept()
    for name, value in before.items():
        assert ddp.register(name, value) is value
    before["tensor"].add_(7)
    before["numbers"].append(9)
    before["nested"]["names"].append("b")
    for epoch in range(3):
        for x, y in ddp.batches(epoch):
            ddp.step(F.cross_entropy(ddp(x), y))
            if ddp.global_step == 2:
                ddp.register("best", 0.25)
                ddp.checkpoint()
    ddp.finish()
    (folder,) = tmp_path.glob("step-*")
    assert folder.name == "step-3"  # after the next step
    ddp, after = set_up(None, folder, epochs=3), kept()
    found = {name: ddp.register(name, value) for name, value in after.items()}
    for name in ("module", "tensor", "numbers", "nested"):
        assert found[name] is after[name]
    assert torch.equal(after["module"].weight, before["module"].weight)
    assert torch.equal(after["tensor"], torch.full((3,), 7.0))
    assert (after["numbers"], after["nested"]["names"]) == ([1, 2.5, 9], ["a", "b"])
    assert (found["best"], found["label"]) == (0.25, "first")
    assert ddp.register("best", 0.1) == 0.1  # the state is given once
    with pytest.raises(InputError, match="handle"):
        ddp.register("handle", {"file": object()})
    train_plainly(ddp)


def test_any_rank_may_ask_for_a_checkpoint(tmp_path: Path) -> None:
    def body(loop: Loop) -> TrainedState:
        for epoch in range(loop.epochs):
            for x, y in loop.batches(epoch):
                loop.step(F.cross_entropy(loop(x), y))
                if loop.rank == 1 and loop.global_step == 2:
                    loop.checkpoint()
        return loop.finish()

    state = run_threads(2, body, out=tmp_path, policy="sync")
    assert state.saves == [3]
    assert (tmp_path / "step-3/state.json").exists()
    with pytest.raises(InputError, match="out="), set_up(None) as ddp:
        ddp.checkpoint()


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_stop_inside_an_epoch_leaves_gaps_that_come_first(policy: str, tmp_path: Path) -> None:
    options = {**ASYNC, "policy": policy, "global_batch_size": None, "out": tmp_path}

    def stopped(group: ThreadGroup) -> list[int]:
        loop = make_loop(group, epochs=3, **options)
        with pytest.raises(KeyboardInterrupt):
            plain_body(loop, stop_after=11)
        return [slot for slot, _, _ in loop.worker.engine.state.log]

    before = [slot for log in on_threads(2, stopped) for slot in log]
    (folder,) = tmp_path.glob("step-*")
    assert folder.name == f"step-{len(before)}"
    again = run_threads(2, plain_body, **options, resume=folder)
    assert (again.finished, again.samples) == (True, 3 * 70)
    assert sorted(slot for log in again.log for slot, _, _ in log) == list(range(27))


def test_another_number_of_ranks_and_fit_go_on_from_one_another(tmp_path: Path) -> None:
    one = run_threads(1, plain_body, save_every="4 steps", out=tmp_path / "one")
    for size in (2, 3):
        several = run_threads(size, plain_body, resume=tmp_path / "one/step-4", policy="sync")
        assert_same(several, one, 1e-10)
    make_model = partial(PlainNet, torch.float64)
    by_fit = train_by_fit(2, save_every="4 steps", out=tmp_path / "fit", make_model=make_model, **SAME["balanced"])
    by_loop = run_threads(2, plain_body, resume=tmp_path / "fit/step-4", **SAME["balanced"])
    assert_same(by_loop, by_fit, 1e-10)
