"""Forward and backward in a form that is captured, against the eager one: same gradients, counts and losses.

On CPU a stand-in for the graph shows which sizes are captured when, and that whole runs stay exact; the graphs
themselves are tested on CUDA.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import Silent
from tests.step.captures import CPU, CUDA, Pair, UpdateOnCpu
from tests.step.captures import captures as captures
from tests.train.exact_runs import Net, assert_exact, loss_and_count, mean_loss, train
from uneven import InputError, TensorData
from uneven.comm.group import SoloGroup
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.reducer import Reducer
from uneven.policy.exact import Balanced
from uneven.step.captured import GRID, MAX_GRAPHS, CapturedStep
from uneven.step.eager import BeforeUpdate
from uneven.step.finite import OwnCheck
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.prepare import find_cap, measure, warm_up
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker


def count_in_numbers(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """As tokens of a fixed length are counted: no tensor at all."""
    return loss_and_count(model, batch)[0], 2 * len(batch[1])


def check_steps(step: Any, on: torch.device) -> None:
    """Sizes that come and go, micro-batches, slots of other sizes, no samples at all."""
    pair = Pair(step, on)
    for _ in range(4):
        pair.step([8], 16)
        pair.step([8, 8, 3], 32)
        pair.step([8], 8)
        pair.step([], 16)
    pair.check_params()


@pytest.mark.parametrize("step", [mean_loss, loss_and_count, count_in_numbers])
def test_steps_equal_eager_ones(step: Any, captures: list[list[int]]) -> None:
    check_steps(step, CPU)
    assert captures == [[8], [8], [8, 8, 3], []], "the slot's samples make another graph of the same sizes"
    assert UpdateOnCpu.made == 2, "one for all steps, and one where no param has a gradient"


def test_an_update_is_captured_again_when_more_than_the_rate_has_changed(captures: list[list[int]]) -> None:
    """Momentum is a constant in a graph: a scheduler that changes it (OneCycleLR) must not be frozen."""
    pair = Pair(mean_loss, CPU)
    for momentum in (0.9, 0.9, 0.9, 0.8, 0.7, 0.7, 0.7):
        for step in (pair.eager, pair.captured):
            step.optimizer.param_groups[0]["momentum"] = momentum
            step.optimizer.param_groups[0]["lr"] *= 0.5  # this is none
        pair.step([8], 16)
    pair.check_params()
    assert UpdateOnCpu.made == 2


def test_an_update_stays_eager_where_it_must(captures: list[list[int]]) -> None:
    """A function of the user's, or an optimizer that cannot be captured."""
    pair = Pair(mean_loss, CPU)
    pair.captured.before_update = BeforeUpdate(lambda model, optimizer: None)
    assert CapturedStep(pair.captured, pair._open).captured_update is None
    pair.eager.optimizer = torch.optim.Adagrad(pair.eager.model.parameters())
    assert CapturedStep(pair.eager, pair._open).captured_update is None


@pytest.mark.cuda
@pytest.mark.parametrize("step", [mean_loss, loss_and_count, count_in_numbers])
def test_captured_steps_equal_eager_ones(step: Any) -> None:
    check_steps(step, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_captured_half_precisions_equal_eager_ones(precision: str) -> None:
    pair = Pair(mean_loss, CUDA, precision, torch.float32)
    for _ in range(12):  # the scale of fp16 starts too high for some and comes down
        pair.step([8, 5], 16, rtol=2e-2, atol=2e-2)
    pair.check_params(rtol=2e-2, atol=2e-2)


def check_many_sizes(on: torch.device) -> None:
    pair = Pair(mean_loss, on)
    for size in (*range(1, MAX_GRAPHS + 3), *range(1, MAX_GRAPHS + 3), 1, MAX_GRAPHS + 2):
        pair.step([size], 2 * MAX_GRAPHS)
        assert len(pair.captured._graphs) <= MAX_GRAPHS
    pair.check_params()


def test_the_size_used_longest_ago_goes(captures: list[list[int]]) -> None:
    check_many_sizes(CPU)
    # All sizes come twice and are captured the second time; then 1, which had to go, and 10, which is still there.
    assert captures == [[size] for size in (*range(1, MAX_GRAPHS + 3), 1)]


@pytest.mark.cuda
def test_more_sizes_than_graphs_are_kept() -> None:
    check_many_sizes(CUDA)


def test_only_a_replay_says_how_fast_a_rank_is(captures: list[list[int]]) -> None:
    """The first step of a size runs eagerly and the second is captured: neither is like those to come."""
    pair = Pair(mean_loss, CPU)
    seen = []
    for size in (4, 4, 4, 6, 4, 6, 6):
        pair.step([size], 16)
        seen.append(pair.captured.is_replayed)
    assert seen == [False, False, True, False, True, False, True]
    assert captures == [[4], [6]]


def test_a_rehearsal_leaves_no_reducer_and_no_graph(captures: list[list[int]]) -> None:
    pair = Pair(mean_loss, CPU)
    pair.captured.reducer.close()
    pair.captured.reducer = None
    with pair.captured.rehearsal():
        for _ in range(3):
            pair.captured.start_alone([pair._draw(4)], 4)
        assert captures == [[4]]
    assert pair.captured.reducer is None
    assert not pair.captured._graphs
    pair.captured.reducer = Reducer(
        pair.captured.model.parameters(), SoloGroup(), UNLIMITED, overlap=False, num_stats=len(OwnCheck._fields)
    )
    pair.captured.forward_backward([pair._draw(4)], 8, lambda: ())
    assert captures == [[4], [4]], "its kernels are known: captured at once, for the new reducer"


def test_nothing_may_be_sent_while_backward_runs(captures: list[list[int]]) -> None:
    pair = Pair(mean_loss, CPU)
    pair.captured.reducer.close()
    pair.captured.reducer = Reducer(
        pair.captured.model.parameters(), SoloGroup(), UNLIMITED, num_stats=len(OwnCheck._fields)
    )
    with pytest.raises(AssertionError, match="cannot hold what is sent"):
        pair.captured.forward_backward([pair._draw(4)], 4, lambda: ())


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"policy": "balanced"},
        {"shares": (3, 0, 1)},
        {"policy": "sync", "accumulate": 3, "max_grad_norm": 0.1},
        {"shares": (5, 2, 1), "step": loss_and_count},
        {"policy": "balanced", "memory_cap": (6, 7, 9)},
    ],
)
def test_runs_of_three_ranks_equal_one_process(options: dict[str, Any], captures: list[list[int]]) -> None:
    """Tail slots of 70 samples in slots of 24, an unused layer, weight decay, ranks without samples."""
    step = options.get("step", mean_loss)
    dense = train(1, global_batch_size=24, epochs=3, step=step, max_grad_norm=options.get("max_grad_norm"))[0]
    ours = train(3, compile="graph", global_batch_size=24, epochs=3, **options)
    assert_exact(ours, dense, "sgd", torch.float64)
    for mine, reference in zip(ours[2].state.history, dense.state.history, strict=True):
        assert mine["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-9)
    assert len(captures) > 3


def test_balanced_shares_lie_on_the_grid(captures: list[list[int]]) -> None:
    results = train(2, compile="graph", batch_size=30, epochs=4)
    for slot in range(0, 8, 2):  # every other one is a tail
        shares = [next(samples for at, _, samples in result.log if at == slot) for result in results]
        assert sorted(share % GRID for share in shares) == [0, 60 % GRID]


def test_a_cpu_among_cuda_devices_runs_eagerly_on_the_same_grid() -> None:
    results = train(2, compile="graph", batch_size=32, epochs=2)
    assert_exact(results, train(1, batch_size=64, epochs=2)[0], "sgd", torch.float64)
    assert all(samples % GRID == 0 for result in results for slot, _, samples in result.log if slot % 2 == 0)


def test_shares_move_at_the_same_slot_where_only_one_rank_captures(
    captures: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with captured steps tells its policy of a step when the next one is under way, an eager one at once."""
    first = iter([True])
    monkeypatch.setattr("uneven.train.prepare.can_capture", lambda _: next(first, False))
    note = Balanced.note

    slow: list[int] = []

    def third_as_fast(self: Balanced, slot: int, samples: int, busy_ms: Any) -> Any:
        shares = self.shares(slot, samples)
        slow.append(int(shares[0] < shares[1]))  # whoever has more at first: by chance it may be right already
        made_up = [(3.0 if rank == slow[0] else 1.0) * share for rank, share in enumerate(shares)]
        return note(self, slot, samples, made_up if all(busy_ms) else busy_ms)

    monkeypatch.setattr(Balanced, "note", third_as_fast)
    data = TensorData(torch.randn(640, 6).double(), torch.arange(640) % 3)
    results = train(2, compile="graph", batch_size=32, epochs=2, dataset=data)
    dense = train(1, batch_size=64, epochs=2, dataset=data)[0]
    for name, value in dense.state.params.items():  # a fused optimizer rounds in another way
        torch.testing.assert_close(results[0].state.params[name], value, rtol=1e-10, atol=1e-10)
    moves = [[e.fields["slot"] for e in r.timeline.events if e.kind == "share"] for r in results]
    assert moves[0] == moves[1] != []
    assert captures


def test_synchronised_batchnorm_is_refused_in_words(captures: list[list[int]]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    config = resolve({"batch_size": 8, "epochs": 1, "compile": "graph", "sync_batchnorm": True, "policy": "sync"})
    data = TensorData(torch.randn(32, 6), torch.zeros(32, dtype=torch.int64))
    task = Task(make, lambda params: torch.optim.SGD(params, lr=0.1), mean_loss, data)
    worker = Worker(task, config, RankInfo(0, parse_devices("cpu,cpu")), lambda _: Mirror(), Requests(), Silent())
    with pytest.raises(InputError, match=r"sync_batchnorm=True.*use compile='off'"):
        worker.train()


class Mirror(SoloGroup):
    """Rank 0 of two, the other of which tells the same about itself in tables and brings nothing else."""

    world_size = 2

    def all_reduce(self, tensor: Tensor) -> Any:
        if tensor.dim() == 2 and len(tensor) == self.world_size and tensor.device.type == "cpu":
            tensor[1] = tensor[0]
        return super().all_reduce(tensor)


def half_of_a_run(compile: str, **changes: Any) -> RankResult:
    config = resolve({"batch_size": 16, "epochs": 3, "policy": "sync", "compile": compile, **changes})
    data = TensorData(torch.randn(70, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(70) % 3)
    task = Task(lambda: Net(torch.float64), lambda params: torch.optim.AdamW(params, lr=1e-2), loss_and_count, data)
    rank_info = RankInfo(0, parse_devices("cuda:0,cuda:0"))
    return Worker(task, config, rank_info, lambda _: Mirror(), Requests(), Silent()).train()


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "batch_size": 4}, {"shares": (3, 1), "policy": "balanced"}])
def test_a_whole_run_of_one_of_two_ranks_is_the_same_captured(options: dict[str, Any]) -> None:
    captured, eager = half_of_a_run("graph", **options), half_of_a_run("off", **options)
    assert captured.log == eager.log
    for name, value in captured.state.params.items():
        # A captured Adam has its rate and bias corrections as fp32 numbers of the device.
        torch.testing.assert_close(value, eager.state.params[name], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(captured.state.history, eager.state.history, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("compile", ["off", "graph"])
def test_a_rank_measures_its_speed_and_its_memory(compile: str) -> None:
    config = resolve({"batch_size": 16, "epochs": 1, "compile": compile, "policy": "balanced"})
    data = TensorData(torch.randn(70, 6).double(), torch.arange(70) % 3)
    task = Task(lambda: Net(torch.float64), lambda params: torch.optim.SGD(params, lr=0.1), mean_loss, data)
    engine = Engine(task, config, RankInfo(0, parse_devices("cuda:0,cuda:0")), Recorder(0))
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    find_cap(engine)
    warm_up(engine)
    cost = measure(engine)
    assert cost.cap == 32, "the whole slot fits"
    assert cost.fixed_ms >= 0
    assert cost.sample_ms > 0
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())
    assert engine.step.is_captured == (compile == "graph")


@pytest.mark.cuda
def test_a_train_step_that_reads_the_host_is_refused_before_the_group_forms() -> None:
    def reads(model: nn.Module, batch: Any) -> Tensor:
        loss = mean_loss(model, batch)
        return loss if loss.item() < 1e9 else loss * 0

    config = resolve({"batch_size": 16, "epochs": 1, "compile": "graph"})
    data = TensorData(torch.randn(70, 6).double(), torch.arange(70) % 3)
    task = Task(lambda: Net(torch.float64), lambda params: torch.optim.SGD(params, lr=0.1), reads, data)
    engine = Engine(task, config, RankInfo(0, parse_devices("cuda:0,cuda:0")), Recorder(0))
    with pytest.raises(InputError, match="use compile='off'"):
        warm_up(engine)
