"""`ddp.skip_rest()` and `ddp.log()`: agreed by all ranks, whoever calls them, and recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from tests.api.loops import (
    DATA,
    GAN_DATA,
    Pair,
    assert_params,
    g_loss,
    make_loop,
    on_ranks_catching,
    plain_batches,
    step_each,
)
from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y
from tests.train.stream_runs import SizedPlain
from uneven import Ddp, InputError, TrainedState
from uneven.api.loop import Loop
from uneven.api.loop_progress import EpochLog
from uneven.config import ENTRY_KEYS
from uneven.data.replay import read_log
from uneven.data.sample_order import prove_exactly_once
from uneven.policy.axis import Axis


def plain_with_break(epochs: int, after: int) -> dict[str, torch.Tensor]:
    """A plain loop that leaves every epoch after so many batches, with a schedule that counts its steps."""
    model = Net(torch.float64)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for epoch in range(epochs):
        for count, (x, y) in enumerate(plain_batches(epoch), start=1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if count == after:
                break
    return {name: param.detach() for name, param in model.named_parameters()}


def schedule(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


@pytest.mark.parametrize("caller", [0, 1, None])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_rest_of_an_epoch_is_left_out_on_every_rank(size: int, caller: int | None) -> None:
    """Two of three steps an epoch; called by one rank alone, or by all; with a break and without."""
    caller = None if caller is not None and caller >= size else caller

    def rank(group: ThreadGroup) -> TrainedState:
        shares = (2.0, 0.0, 1.0) if size == 3 and caller != 1 else None
        loop = make_loop(group, schedule, epochs=3, shares=shares)
        for epoch in range(3):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
                if loop.global_step == 2 * (epoch + 1) and caller in (None, group.rank):
                    loop.skip_rest()
                    if epoch:
                        break
            assert (loop.global_step, loop.samples) == (2 * (epoch + 1), 48 * (epoch + 1))
        return loop.finish()

    states = on_threads(size, rank)
    assert_params(states, plain_with_break(3, 2))
    for state in states:
        assert state.finished
        assert (state.samples, state.skipped) == (144, [(0, 22), (1, 22), (2, 22)])
        assert [(entry["samples"], entry["skipped"]) for entry in state.history] == [(48, 22), (96, 22), (144, 22)]


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("options", [{"policy": "sync"}, {"shares": (2.0, 1.0)}, {"shares": (0.0, 1.0)}])
def test_after_the_rest_of_a_streams_epoch_its_next_one_follows(options: dict[str, Any], after: int) -> None:
    """Samples are asked for ahead: those of the rest must not come in place of the next epoch's, nor be kept."""
    kept: list[int] = []

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, dataset=SizedPlain(), epochs=3, **options)
        for epoch in range(3):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
                if loop.global_step == after * (epoch + 1):
                    loop.skip_rest()
        if group.rank == 0:
            reader = loop.worker.engine.reader
            assert reader is not None
            assert reader._reader is not None
            kept.extend(epoch for epoch, _ in reader._reader._ready if epoch < 2)
        return loop.finish()

    model = Net(torch.float64)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for first in [*range(0, 24 * after, 24)] * 3:
        optimizer.zero_grad()
        F.cross_entropy(model(X[first : first + 24].double()), Y[first : first + 24]).backward()
        optimizer.step()
    assert_params(on_threads(2, rank), {name: param.detach() for name, param in model.named_parameters()})
    assert not kept, "what nobody trains is in memory"


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("caller", [0, 1])
def test_local_policies_agree_in_a_round(policy: str, caller: int) -> None:
    """Which slots were trained depends on the ranks' speeds; that both agree and none is trained twice does not."""

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, policy=policy, global_batch_size=None, batch_size=4, epochs=3, anchor=2)
        for epoch in range(3):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
                if epoch < 2 and group.rank == caller:
                    loop.skip_rest()
                    break
        return loop.finish()

    states = on_threads(2, rank)
    for state in states:
        assert state.finished
        assert len(state.history) == 3
        assert {epoch for epoch, _ in state.skipped} <= {0, 1}
        assert state.samples == 210 - sum(samples for _, samples in state.skipped)
        assert all(torch.equal(value, states[0].params[name]) for name, value in state.params.items())
    own = [slot for slot, _, _ in states[0].log[caller]]
    assert sum(slot < 18 for slot in own) <= 1  # left the epoch after its first batch


def test_several_optimizers_leave_out_the_rest_too() -> None:
    def rank(group: ThreadGroup) -> TrainedState:
        g, d = Pair(6, 1), Pair(1, 2)
        made = {name: OPTIMIZERS["sgd"](part.parameters()) for name, part in (("g", g), ("d", d))}
        loop = make_loop(group, model={"g": g, "d": d}, optimizer=made, dataset=GAN_DATA)
        for epoch in range(2):
            for _, noise in loop.batches(epoch):
                loop.step(g_loss(g, d, noise), optimizer="g")
                loop.step(g_loss(g, d, noise), optimizer="d")
                if group.rank == 1:
                    loop.skip_rest()
        return loop.finish()

    for state in on_threads(2, rank):
        assert (state.samples, state.skipped) == (48, [(0, 46), (1, 46)])


def test_what_was_left_out_is_checked_and_not_repeated(tmp_path: Path) -> None:
    axis = Axis(70, 24, 2)
    log = [[(0, 0, 24), (3, 0, 24), (4, 24, 24), (5, 48, 22)]]
    assert prove_exactly_once(axis, log, 6, [(0, 46)]) == 6
    for skipped in ([], [(0, 22)], [(1, 46)]):
        with pytest.raises(RuntimeError, match="left out"):
            prove_exactly_once(axis, log, 6, skipped)
    with pytest.raises(RuntimeError, match="left out"):  # in part: not the user's doing
        prove_exactly_once(axis, [[(0, 0, 20), *log[0][1:]]], 6, [(0, 46)])

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group)
        for epoch in range(2):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
                loop.skip_rest()
        return loop.finish()

    (state,) = on_threads(1, rank)
    state.save(tmp_path)
    assert TrainedState.load(tmp_path).skipped == state.skipped == [(0, 46), (1, 46)]
    assert json.loads((tmp_path / "log.json").read_text())["skipped"] == [[0, 46], [1, 46]]
    with pytest.raises(InputError, match="left out parts of epochs"):
        read_log(tmp_path, axis, 1, state.config, is_local=False)


def test_wrong_uses_of_skip_rest_and_scheduler_step() -> None:
    def outside(group: ThreadGroup) -> None:
        with make_loop(group) as loop:
            loop.skip_rest()

    def inside(group: ThreadGroup) -> None:
        with make_loop(group) as loop:
            for _ in loop.batches(0):
                loop.scheduler_step(1.0)

    assert "belongs inside the loop" in str(on_ranks_catching(1, outside)[0])
    assert "belongs between epochs" in str(on_ranks_catching(1, inside)[0])


@pytest.mark.parametrize(("policy", "shares"), [("balanced", (2.0, 0.0, 1.0)), ("cadence", (1.0, 2.0, 1.0))])
def test_logged_numbers_are_means_over_all_samples(policy: str, shares: tuple[float, ...]) -> None:
    def rank(group: ThreadGroup) -> TrainedState:
        size = 24 if policy == "balanced" else None
        loop = make_loop(group, policy=policy, global_batch_size=size, batch_size=8, shares=shares)
        for epoch in range(2):
            for x, y in loop.batches(epoch):
                loop.log(ones=(y == 1).double().mean())
                loop.step(F.cross_entropy(loop(x), y))
                loop.log(first=float(x[:, 0].mean()))
            if group.rank < 2:
                loop.log(test_accuracy=0.5 + group.rank / 4 + epoch)
        return loop.finish()

    def expected(epoch: int) -> dict[str, float]:
        x, y = (torch.cat(parts) for parts in zip(*plain_batches(epoch), strict=True))
        return {"ones": float((y == 1).double().mean()), "first": float(x[:, 0].mean()), "test_accuracy": 0.625 + epoch}

    for state in on_threads(3, rank):
        for epoch, entry in enumerate(state.history):
            assert {name: entry[name] for name in expected(epoch)} == pytest.approx(expected(epoch))


@pytest.mark.parametrize("value", [{"x": "text"}, {"x": torch.ones(2)}, *({name: 1.0} for name in ENTRY_KEYS)])
def test_what_cannot_be_logged_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        EpochLog().add(0, value, 1.0)


def test_an_entry_has_no_key_that_could_be_logged() -> None:
    """ENTRY_KEYS lists what the run itself writes; an entry of every kind is made here."""

    def rank(group: ThreadGroup) -> set[str]:
        loop = make_loop(group, epochs=3, policy="cadence", batch_size=8, global_batch_size=None, anchor=40)
        loop.worker.engine.state.dropped.count(1)
        for epoch in range(3):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
                loop.skip_rest()
        return {name for entry in loop.finish().history for name in entry}

    keys = on_threads(2, rank)[0]
    assert {"skipped", "dropped"} < keys <= set(ENTRY_KEYS)


@pytest.mark.parametrize("where", ["inside", "between"])
def test_an_evaluated_metric_is_not_replaced_by_a_logged_number(where: str) -> None:
    """Both would stand in the epoch's entry under one name; it is refused as soon as the name is known."""
    x, y = torch.ones(8, 2), torch.ones(8, 1)
    data, model = TensorDataset(x, y), torch.nn.Linear(2, 1)
    evaluate = (data, lambda model, batch: ({"loss": F.mse_loss(model(batch[0]), batch[1], reduction="sum")}, 8))
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 2, "devices": "cpu", "progress": "off"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with Ddp.setup(model, optimizer, dataset=data, evaluate=evaluate, **settings) as ddp:
            for bx, by in ddp.batches(0):
                ddp.step(F.mse_loss(ddp(bx), by))
                if where == "inside":
                    ddp.log(loss=1.0)
            ddp.log(loss=1.0)

    with pytest.raises(InputError, match=r"ddp\.log\(loss=\.\.\.\): the evaluation has a metric of that name"):
        loop()


def test_an_evaluation_of_ones_own_changes_nothing() -> None:
    def rank(group: ThreadGroup) -> tuple[TrainedState, list[dict[str, float]]]:
        loop, seen = make_loop(group), []

        def right(model: Any, batch: Any) -> tuple[dict[str, float], int]:
            assert not model.training
            return {"right": float((model(batch[0]).argmax(1) == batch[1]).sum())}, len(batch[1])

        for epoch in range(2):
            for batch in loop.batches(epoch):
                if group.rank == 0:
                    seen.append(loop.evaluate(loop.worker.task.dataset, right))
                step_each(loop, batch)
                assert loop.model.training
        return loop.finish(), seen

    results = on_threads(2, rank)
    assert all(0.0 <= entry["right"] <= 1.0 for entry in results[0][1])

    def plain(group: ThreadGroup) -> Loop:
        loop = make_loop(group)
        for epoch in range(2):
            for batch in loop.batches(epoch):
                step_each(loop, batch)
        return loop

    assert_params([state for state, _ in results], on_threads(1, plain)[0].finish().params)


def test_epochs_after_max_steps_have_no_batches() -> None:
    """So that the ordinary loop over epochs needs no condition."""
    model = Net(torch.float64)
    loop = Ddp.setup(
        *(model, OPTIMIZERS["sgd"](model.parameters())),
        dataset=DATA,
        batch_size=24,
        epochs=3,
        max_steps=4,
        devices="cpu",
        progress="off",
    )
    counts = []
    for epoch in range(3):
        before = loop.global_step
        for batch in loop.batches(epoch):
            step_each(loop, batch)
        counts.append(loop.global_step - before)
    assert counts == [3, 1, 0]
    assert loop.finish().slot == 4
