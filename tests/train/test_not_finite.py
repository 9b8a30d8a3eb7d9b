"""One rule for losses, gradients and counts that are not finite: the step is skipped, its samples are dropped.

Params are compared with a plain loop that leaves out the same global batches, in double precision.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train import exact_runs as exact
from tests.train.bad_steps import BAD, DATA, GLOBAL, INF, NAN, X, assert_same_params, bad_slots, plain, spoiling
from tests.train.exact_runs import OPTIMIZERS, Net, Y, loss_and_count, mean_loss
from uneven import TrainedState
from uneven.config import Task, resolve
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.errors import NotFiniteError
from uneven.hardware.device import parse_devices
from uneven.policy.axis import Axis
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker


class Normed(nn.Module):
    """With running statistics, which a skipped step must not take up."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = Net(torch.float64)
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "one device, clipped": (1, {"max_grad_norm": 0.1, "optimizer": "adam"}),
    "one device, micro-batches": (1, {"accumulate": 3, "batch_size": 8, "optimizer": "adam"}),
    "sync": (2, {"policy": "sync"}),
    "shares": (3, {"shares": (2, 0, 1), "optimizer": "adam"}),
    "clipped": (2, {"max_grad_norm": 0.1}),
    "micro-batches": (3, {"accumulate": 3, "batch_size": 4, "shares": (2, 1, 1), "optimizer": "adam"}),
    "counts": (3, {"step": loss_and_count}),
    "small buckets": (2, {"bucket_mb": 0.0001}),
    "zero1": (2, {"strategy": "zero1", "optimizer": "adam"}),
    "zero2": (3, {"strategy": "zero2", "optimizer": "adam", "max_grad_norm": 0.1}),
    "fsdp": (2, {"strategy": "fsdp", "optimizer": "adam"}),
    "tensor": (2, {"strategy": "tensor", "optimizer": "adam"}),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_policies_equal_a_loop_that_leaves_the_batch_out(case: str) -> None:
    size, options = EXACT[case]
    axis = Axis(len(X), GLOBAL, 2)
    slots = bad_slots(axis)
    assert len(slots) == 2, "one in each epoch"
    results = exact.train(size, dataset=DATA, global_batch_size=GLOBAL, **options)
    model, own = plain(
        axis, slots, optimizer=options.get("optimizer", "sgd"), norm=options.get("max_grad_norm"),
        step=options.get("step", mean_loss),
    )  # fmt: skip
    for result in results:
        assert_same_params(result.state, model)
        assert all(torch.equal(result.state.params[n], v) for n, v in results[0].state.params.items())
        dropped = [axis.slot(index).samples for index in sorted(slots)]
        assert [entry["dropped"] for entry in result.state.history] == dropped
        assert all(math.isfinite(entry["train_loss"]) for entry in result.state.history)
        assert result.state.samples == 2 * len(X) - sum(dropped)
    lost = {(slot, first, samples) for result in results for slot, first, samples in result.dropped}
    assert {slot for slot, _, _ in lost} == set(slots)
    assert sum(samples for _, _, samples in lost) == sum(axis.slot(index).samples for index in slots)
    _assert_same_optimizer(results[0].state, model, own)
    _assert_cause(case, results, slots)


def _assert_same_optimizer(state: TrainedState, model: nn.Module, own: torch.optim.Optimizer) -> None:
    for name, param in model.named_parameters():
        for key, value in own.state[param].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(state.optimizer[f"{name}.{key}"], value, rtol=1e-9, atol=1e-10)


def _assert_cause(case: str, results: list[RankResult], slots: dict[int, int]) -> None:
    for result in results:
        events = [event.fields for event in result.timeline.events if event.kind == "dropped"]
        assert [fields["slot"] for fields in events] == sorted(slots)
        for fields in events:
            assert "nan" in fields["cause"]
            position = slots[fields["slot"]]
            owners = [
                rank
                for rank, other in enumerate(results)
                for slot, first, samples in other.dropped
                if slot == fields["slot"] and first <= position < first + samples
            ]
            assert [fields["by"]] == owners, "the rank that had the sample"


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {"policy": "sync"}), (2, {"sync_batchnorm": True})])
def test_running_statistics_do_not_take_a_skipped_step_up(size: int, options: dict[str, Any]) -> None:
    axis = Axis(len(X), GLOBAL, 2)
    result = exact.train(size, dataset=DATA, make_model=Normed, global_batch_size=GLOBAL, **options)[0]
    buffers = result.state.buffers
    assert all(value.isfinite().all() for value in buffers.values())
    assert int(buffers["norm.num_batches_tracked"]) == axis.total - 2
    if size == 1 or "sync_batchnorm" in options:
        model, _ = plain(axis, bad_slots(axis), make_model=Normed)
        assert_same_params(result.state, model)
        for name, value in model.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-10, atol=1e-10)


def counting(of_bad: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    """(loss_sum, count), with another count in a batch that holds the sample BAD."""

    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        is_bad = (batch[0] == X[BAD]).all(1).any()
        count = torch.tensor(float(len(batch[1])))
        return loss, of_bad(count) if is_bad else count

    return step


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("value", [NAN, -3.0, INF])
def test_a_count_that_is_none_is_the_same_rule(size: int, value: float) -> None:
    axis = Axis(len(X), GLOBAL, 2)
    results = exact.train(size, step=counting(lambda _: value), global_batch_size=GLOBAL)
    assert_same_params(results[0].state, plain(axis, bad_slots(axis))[0])
    causes = [event.fields["cause"] for event in results[0].timeline.events if event.kind == "dropped"]
    assert len(causes) == 2
    assert all("count" in cause for cause in causes)


def test_counts_that_add_up_to_zero_are_too_but_one_rank_may_have_none() -> None:
    axis = Axis(len(X), GLOBAL, 2)
    slots = bad_slots(axis)

    def masks_all(model: nn.Module, batch: Any) -> Any:
        """No sample of the slots with BAD counts, as in a batch whose tokens are all padding."""
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (loss * _masked(batch)).sum(), _masked(batch).sum()

    members = torch.cat(
        [torch.from_numpy(permutation(3, axis.slot(i).epoch, len(X)))[axis.slot(i).first : axis.slot(i).stop]
         for i in sorted(slots)[:1]]
    )  # fmt: skip

    def _masked(batch: Any) -> torch.Tensor:
        return torch.tensor([float(not bool((row == X[members]).all(1).any())) for row in batch[0]]).double()

    for size in (1, 2):
        results = exact.train(size, step=masks_all, global_batch_size=GLOBAL, epochs=1)
        slot = min(slots)
        # Of all ranks: a rank that was slow at the start has no sample of the slot.
        assert {part[0] for result in results for part in result.dropped} == {slot}
        assert_same_params(results[0].state, plain(Axis(len(X), GLOBAL, 1), {slot})[0])
        (event,) = [event for event in results[0].timeline.events if event.kind == "dropped"]
        assert "add up to 0" in event.fields["cause"]
    # A rank whose own samples are all masked is none of this.
    half = exact.train(2, step=counting(lambda count: count * 0), global_batch_size=GLOBAL, policy="sync")
    assert not any(result.dropped for result in half)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("nan loss", "loss of rank {} is nan"), ("inf loss", "loss of rank {} is infinite"), ("gradient", "gradient of")],
)
def test_the_run_ends_after_three_in_a_row(size: int, kind: str, words: str) -> None:
    """The last rank's steps are all bad: every rank ends in slot 2, with the same words."""
    rank = size - 1
    messages = []

    def run(group: ThreadGroup) -> None:
        config = resolve({"batch_size": 8, "epochs": 9, "seed": 3, "shares": (1,) * size})
        step = spoiling(lambda _: group.rank == rank, kind)
        task = Task(lambda: Net(torch.float64), OPTIMIZERS["adam"], step, TensorData(X, Y))
        info = RankInfo(group.rank, parse_devices(["cpu"] * size))
        with pytest.raises(NotFiniteError) as caught:
            Worker(task, config, info, lambda _: group, Requests(), Silent()).train()
        messages.append(str(caught.value))

    on_threads(size, run)
    assert len(set(messages)) == 1, "all ranks alike"
    assert messages[0].startswith(f"slot 2, rank {rank}: the ")
    assert words.format(rank) in messages[0]
    assert "3 steps in a row" in messages[0]
    assert "max_bad_steps=3" in messages[0]


def test_a_good_step_in_between_starts_the_count_again() -> None:
    """Two of three slots in a row are bad, for nine slots: never three."""
    seen: list[int] = []

    def is_bad(x: torch.Tensor) -> bool:
        seen.append(len(x))
        return len(seen) % 3 != 0

    result = exact.train(1, step=spoiling(is_bad), global_batch_size=GLOBAL, epochs=3)[0]
    assert [slot for slot, _, _ in result.dropped] == [0, 1, 3, 4, 6, 7]
    seen.clear()
    with pytest.raises(NotFiniteError, match=r"slot 1, rank 0: the loss of rank 0 is nan; 2 steps in a row"):
        exact.train(1, step=spoiling(is_bad), global_batch_size=GLOBAL, epochs=3, max_bad_steps=2)
