"""The user's own loop and the manual tier, on threads: exact whatever the shares, and no wrong use makes others wait.

The same on real processes, from every kind of start, is in test_entry_points.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.api.loops import DATA, SETTINGS, assert_equal, make_loop, on_ranks_catching, run_epochs, train_loop
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss, train
from uneven import Ddp, InputError, TrainedState
from uneven.api.loop import Loop
from uneven.errors import RankError


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{"policy": "sync"}, {"policy": "balanced"}, {"max_grad_norm": 0.1}])
def test_an_own_loop_equals_fit(size: int, options: dict[str, Any]) -> None:
    dense = train(1, **{**SETTINGS, **options})[0].state
    states = train_loop(size, **options)
    assert_equal(states, dense)
    for state in states:
        assert state.finished
        assert len(state.log) == size  # everybody's, on every rank
        assert [e["train_loss"] for e in state.history] == pytest.approx([e["train_loss"] for e in dense.history])


def test_a_rank_without_samples_sees_no_batch_and_ends_equal() -> None:
    dense = train(1, **SETTINGS)[0].state
    seen: list[list[int]] = [[], [], []]

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, shares=(2, 0, 1))
        run_epochs(loop, seen=seen[group.rank])
        return loop.finish()

    assert_equal(on_threads(3, rank), dense)
    assert seen == [[16, 16, 15] * 2, [], [8, 8, 7] * 2]


def test_a_rank_too_slow_for_a_slot_passes_epoch_by_epoch() -> None:
    """With counts of 1000:1 the second rank has no slot in any epoch, and would pass all of them in one call."""
    states = train_loop(2, policy="cadence", shares=(1000.0, 1.0), global_batch_size=None)
    assert all(state.finished and len(state.history) == 2 for state in states)
    assert [sum(samples for _, _, samples in log) for log in states[0].log] == [2 * len(X), 0]


def test_the_schedule_and_the_counted_loss_are_those_of_fit() -> None:
    def scheduler(optimizer: Any) -> StepLR:
        return StepLR(optimizer, 2, gamma=0.5)

    def masked(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mask = batch[1] != 0
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * mask).sum(), mask.sum()

    dense = train(1, **SETTINGS, step=masked, scheduler=scheduler)[0].state

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, scheduler, shares=(3, 1))
        for epoch in range(loop.epochs):
            for batch in loop.batches(epoch):
                loop.step(masked(loop.model, batch))
        return loop.finish()

    assert_equal(on_threads(2, rank), dense)


def test_balanced_starts_even_and_learns() -> None:
    first = train_loop(3, policy="balanced")[0]
    shares = [{slot: samples for slot, _, samples in log}[0] for log in first.log]
    assert shares == [8, 8, 8]


@pytest.mark.parametrize("steps_before", [False, True])
def test_a_break_makes_every_rank_raise(steps_before: bool) -> None:
    """Before or after the batch's step; the one who breaks hears it at the next use."""

    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        if group.rank == 1:
            for x, y in loop.batches(0):
                if steps_before:
                    loop.step(F.cross_entropy(loop(x), y))
                break
            with pytest.raises(RankError, match="rank 1 left epoch 0"):
                loop.batches(1)
        else:
            run_epochs(loop)
        loop.finish()

    errors = on_ranks_catching(3, rank)
    assert all(isinstance(error, RankError) and "rank 1 left" in str(error) for error in errors), errors


def test_all_ranks_may_break_at_once_and_nobody_hangs() -> None:
    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        for x, y in loop.batches(0):
            loop.step(F.cross_entropy(loop(x), y))
            break
        loop.finish()

    assert all(isinstance(error, RankError) for error in on_ranks_catching(2, rank))


def test_a_break_after_the_last_step_of_an_epoch_breaks_nothing() -> None:
    dense = train(1, **SETTINGS)[0].state

    def rank(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group, policy="sync")
        for epoch in range(2):
            for count, (x, y) in enumerate(loop.batches(epoch), start=1):
                loop.step(F.cross_entropy(loop(x), y))
                if count == 3:  # 70 samples in slots of 24
                    break
        return loop.finish()

    assert_equal(on_threads(2, rank), dense)


def test_a_batch_without_its_step_is_named_and_the_others_raise() -> None:
    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        for x, y in loop.batches(0):
            if group.rank == 0:
                loop.step(F.cross_entropy(loop(x), y))

    own, other = on_ranks_catching(2, rank)[1], on_ranks_catching(2, rank)[0]
    assert isinstance(own, InputError)
    assert "a batch was not trained" in str(own)
    assert isinstance(other, RankError)
    assert "rank 1 left" in str(other)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, y: F.cross_entropy(out, y, reduction="none"), r"a tensor of shape"),
        (lambda out, y: F.cross_entropy(out, y).detach(), "without a graph"),
        (lambda out, y: 0.5, "a float"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, words: str) -> None:
    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        for x, y in loop.batches(0):
            loop.step(loss(loop(x), y))

    (error,) = on_ranks_catching(1, rank)
    assert isinstance(error, InputError)
    assert words in str(error)
    assert error.__suppress_context__, "it was shown twice, the first time with frames of ours alone"


def test_a_second_step_for_one_batch_is_refused() -> None:
    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        for x, y in loop.batches(0):
            loop.step(F.cross_entropy(loop(x), y))
            loop.step(F.cross_entropy(loop(x), y))

    for size in (1, 2):
        errors = on_ranks_catching(size, rank)
        assert all("called without a batch" in str(error) for error in errors)
        assert all(error is not None and error.__suppress_context__ for error in errors)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda loop: loop.batches(1), "the next one is 0"),
        (lambda loop: (run_epochs(loop, range(1)), loop.batches(0)), "the next one is 1"),
        (lambda loop: (run_epochs(loop), loop.batches(2)), "all 2 epochs are trained"),
        (lambda loop: (next(loop.batches(0)), loop.batches(0)), "rank 0 left"),
        (lambda loop: [loop.batches(0) for _ in loop.batches(0)], "still being iterated"),
        (lambda loop: [loop.finish() for _ in loop.batches(0)], "inside an epoch"),
        (lambda loop: (run_epochs(loop), loop.finish(), loop.batches(0)), "is finished"),
    ],
)
def test_epochs_are_consecutive_and_whole(use: Callable[[Loop], Any], words: str) -> None:
    def rank(group: ThreadGroup) -> Any:
        with make_loop(group) as loop:  # leaves no thread behind, whatever the wrong use was
            return use(loop)

    (error,) = on_ranks_catching(1, rank)
    assert words in str(error)


def test_finishing_early_is_for_all_ranks_together() -> None:
    def early(group: ThreadGroup) -> TrainedState:
        loop = make_loop(group)
        run_epochs(loop, range(1))
        return loop.finish()

    states = on_threads(2, early)
    assert not states[0].finished
    assert_equal(states, train(1, **{**SETTINGS, "epochs": 1})[0].state)

    def apart(group: ThreadGroup) -> None:
        loop = make_loop(group)
        run_epochs(loop, range(2 if group.rank else 1))
        loop.finish()

    errors = on_ranks_catching(2, apart)
    assert "rank 0 called ddp.finish() while rank 1 still trains" in str(errors[0])
    assert "rank 0 called ddp.finish()" in str(errors[1])


def test_leaving_the_loop_gives_the_model_back() -> None:
    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        run_epochs(loop)
        loop.finish()
        # No hook of ours is left: the user may train on by hand, and alone.
        sent = group.traffic.collectives
        mean_loss(loop.model, (X.double(), Y)).backward()
        weight = dict(loop.model.named_parameters())["first.weight"]
        assert weight.grad is not None
        assert weight.grad._base is None  # not a view of a bucket
        assert group.traffic.collectives == sent > 0

    on_threads(2, rank)


def test_an_exception_in_a_with_block_finishes_nothing() -> None:
    def rank(group: ThreadGroup) -> Loop:
        loop = make_loop(group)
        with pytest.raises(ZeroDivisionError), loop:
            raise ZeroDivisionError
        return loop

    (loop,) = on_threads(1, rank)
    with pytest.raises(RankError, match="left before it finished"):
        loop.finish()


@pytest.mark.parametrize(
    ("epochs", "said"),
    [(1, ["the script ended after 1 of 2 epochs, without ddp.finish(), which saves the result"]), (2, [])],
)
def test_a_script_that_ends_before_its_last_epoch_says_that_it_has_no_result(
    epochs: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several devices such a run was listed as finished, and nobody learnt that nothing was saved."""
    lines: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda self, more: lines.extend(more))

    def rank(group: ThreadGroup) -> None:
        loop = make_loop(group)
        run_epochs(loop, range(epochs))
        lines.clear()
        loop._finish_at_exit()

    on_threads(1, rank)
    assert lines == said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compile": "graph"}, "compile='graph'"),
        ({"devices": "cpu,cpu@0.4"}, "uneven run train.py --devices cpu,cpu@0.4"),
        ({"devices": "cpu,cpu", "sync_batchnorm": True}, "sync_batchnorm=True with Ddp.setup"),
        ({"epohcs": 3}, "did you mean 'epochs'"),
    ],
)
def test_what_an_own_loop_cannot_do_is_refused(changes: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["-c"])
    with pytest.raises(InputError) as caught:
        Ddp.setup(Net(torch.float64), OPTIMIZERS["sgd"], dataset=DATA,
                  **{**SETTINGS, "devices": "cpu", "progress": "off", **changes})  # fmt: skip
    assert words in str(caught.value)


def test_setup_takes_the_model_itself() -> None:
    with pytest.raises(InputError, match="the model itself"):
        Ddp.setup(lambda: Net(torch.float64), OPTIMIZERS["sgd"], dataset=DATA, batch_size=4, epochs=1)  # type: ignore[arg-type]


def test_setup_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {**SETTINGS, "devices": "cpu@0.5", "progress": "lines"}
    with Ddp.setup(Net(torch.float64), OPTIMIZERS["sgd"], dataset=DATA, **options) as loop:
        run_epochs(loop)
    assert capsys.readouterr().err.splitlines()[1] == "  1 device: cpu@0.5"
