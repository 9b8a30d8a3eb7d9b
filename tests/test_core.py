"""Shares in loops that are not ours: what every rank trains, and params equal to those of one process."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import uneven.core
from tests.api.starts import BIN, start
from tests.core_ranks import CASES, MEASURED_EPOCHS, STEP, train_dense
from tests.ranks import ThreadGroup, on_processes, on_threads
from uneven.core import StepSampler, StepShares, loss_uses_count
from uneven.errors import InputError, RankError


def take(shares: StepShares, sampler: StepSampler, seconds_per_sample: float, epochs: Sequence[int]) -> list[Any]:
    """Steps without a model: (step, this rank's batches). A sample takes a scripted time, far above a test's."""
    steps: dict[int, list[list[int]]] = {}
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in sampler:
            step = shares.step
            found = steps.setdefault(step, [])
            found.append(batch if sampler.own[step, len(found)] else [])
            if len(found) == sampler.pieces:
                shares.start(before_s=seconds_per_sample * shares.of(step)[shares.rank])
                shares.stop()
                shares.note(step)
    return list(steps.items())


def outcome(function: Callable[[ThreadGroup], Any]) -> Callable[[ThreadGroup], str]:
    """The message of the error that a rank raises."""

    def run(group: ThreadGroup) -> str:
        try:
            function(group)
        except (InputError, RankError) as error:
            return str(error)
        return ""

    return run


# What every rank trains.


@pytest.mark.parametrize("settings", [{}, {"shares": "sync"}, {"shares": (5, 0, 2)}, {"caps": (4, 20, 20)}], ids=str)
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_ranks_together_train_the_samples_of_each_step_once(
    settings: dict[str, Any], pieces: int, drop_last: bool
) -> None:
    def run(group: ThreadGroup) -> list[Any]:
        shares = StepShares(12, group=group, **settings)
        order = DistributedSampler(range(64), num_replicas=1, rank=0)  # type: ignore[arg-type]
        sampler = StepSampler(order, shares, pieces=pieces, drop_last=drop_last)
        assert (sampler.steps, len(sampler)) == ((5, 5 * pieces) if drop_last else (6, 6 * pieces))
        return take(shares, sampler, (1e3, 3e3, 2e3)[group.rank], range(4))

    by_rank = on_threads(3, run)
    numbers = [[step for step, _ in found] for found in by_rank]
    assert numbers == [list(range(20 if drop_last else 24))] * 3
    orders = []
    for epoch in range(4):
        order = DistributedSampler(range(64), num_replicas=1, rank=0)  # type: ignore[arg-type]
        order.set_epoch(epoch)
        whole = list(order)
        orders += [whole[at : at + 12] for at in range(0, 60 if drop_last else 64, 12)]
    for step, expected in enumerate(orders):
        batches = [found[step][1] for found in by_rank]
        assert {len(pieces_of) for pieces_of in batches} == {pieces}
        assert [sample for pieces_of in batches for batch in pieces_of for sample in batch] == expected


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_slower_rank_gets_fewer_samples(lookahead: int) -> None:
    def run(group: ThreadGroup) -> tuple[int, ...]:
        shares = StepShares(40, group=group, lookahead=lookahead)
        assert shares.of(0) == (20, 20)
        take(shares, StepSampler(range(400), shares), (1e3, 3e3)[group.rank], range(3))
        return shares.of(shares.step)

    assert on_threads(2, run) == [(30, 10)] * 2


def test_a_rank_that_becomes_slower_gives_samples_away() -> None:
    def run(group: ThreadGroup) -> list[tuple[int, ...]]:
        shares = StepShares(40, group=group)
        sampler = StepSampler(range(400), shares)
        seen = []
        for epoch, seconds in enumerate((1e3, 1e3, 4e3, 4e3)):
            take(shares, sampler, seconds if group.rank else 1e3, [epoch])
            seen.append(shares.of(shares.step))
        return seen

    for seen in on_threads(2, run):
        assert seen[1] == (20, 20)
        assert seen[3] == (32, 8)


def test_caps_and_least_bound_measured_shares_and_no_rank_that_may_train_is_left_out() -> None:
    """Its filler would take as long as a sample."""

    def run(group: ThreadGroup) -> tuple[int, ...]:
        shares = StepShares(40, group=group, caps=(24, 30, 30, 0), least=2)
        take(shares, StepSampler(range(400), shares), (1e3, 4e3, 500e3, 1e3)[group.rank], range(3))
        return shares.of(shares.step)

    assert on_threads(4, run) == [(22, 16, 2, 0)] * 4  # the two samples are the largest share's


def test_least_bounds_fixed_shares_too() -> None:
    assert on_threads(2, lambda group: StepShares(9, group=group, shares=(15, 1), least=2).of(0)) == [(9, 0)] * 2


def test_a_filler_weighs_nothing_and_every_piece_has_a_batch() -> None:
    def run(group: ThreadGroup) -> list[tuple[list[int], float]]:
        shares = StepShares(5, group=group, shares=(4, 1))
        sampler = StepSampler([7, 8, 9, 5, 6], shares, pieces=2)
        return [(batch, shares.factor(0, sampler.own[0, piece])) for piece, batch in enumerate(sampler)]

    assert on_threads(2, run) == [[([7, 8], 2 * 2 / 5), ([9, 5], 2 * 2 / 5)], [([7], 0.0), ([6], 2 * 1 / 5)]]


def test_a_filler_has_as_many_samples_as_a_batch_has_at_least() -> None:
    def run(group: ThreadGroup) -> list[list[int]]:
        shares = StepShares(5, group=group, shares=(1, 0), least=4)
        return list(StepSampler([7, 8, 9, 5, 6, 4], shares, pieces=2))

    assert on_threads(2, run) == [[[7, 8], [9, 5, 6], [4], [4]], [[7, 8], [7, 8], [4], [4]]]


def test_factors_of_a_step_add_up_to_one_global_mean() -> None:
    def run(group: ThreadGroup) -> tuple[float, float]:
        shares = StepShares(10, group=group, shares=(3, 1, 1))
        own = shares.of(0)[group.rank]
        return shares.factor(0, own), shares.factor(0, own, reduce="sum")

    averaged, summed = zip(*on_threads(3, run), strict=True)
    assert sum(averaged) / 3 == pytest.approx(1.0)
    assert sum(summed) == pytest.approx(1.0)


# The clock.


def test_a_rank_tells_its_own_work_without_what_is_left_out() -> None:
    shares = StepShares(4)
    shares.of(0)
    shares.start(before_s=5e3)
    shares.leave_out(2e3)
    shares.note(0)  # one rank alone needs no stop
    assert shares.busy_ms[0] == pytest.approx(3e6, rel=0.05)


def test_reading_the_batch_is_work_of_the_step() -> None:
    shares = StepShares(4)
    (batch,) = StepSampler([0, 1, 2, 3], shares)
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        assert batch
    shares.start()
    shares.note(0)
    assert shares.busy_ms[0] >= 20.0


def test_a_rank_that_is_slowed_down_takes_longer() -> None:
    shares = StepShares(4)
    shares.slow_down(0.5)
    shares.of(0)
    shares.start(before_s=0.02)
    shares.note(0)
    assert shares.busy_ms[0] >= 40.0
    with pytest.raises(InputError, match="speed"):
        shares.slow_down(1.5)


# Resuming.


def test_a_run_that_is_resumed_goes_on_with_the_shares_it_had() -> None:
    def run(group: ThreadGroup) -> tuple[list[Any], list[Any]]:
        seconds = (1e3, 3.1e3, 2.3e3)[group.rank]  # no two divisions end at the same time
        shares = StepShares(12, group=group)
        sampler = StepSampler(range(64), shares)
        whole = take(shares, sampler, seconds, range(4))
        begun = StepShares(12, group=group)
        parts = take(begun, StepSampler(range(64), begun), seconds, range(2))
        state = begun.state_dict()
        again = StepShares(12, group=group)
        again.load_state_dict({**state, "step": state["step"] + 2})  # as if two more steps had been trained
        sampler = StepSampler(range(64), again)
        epoch, sampler.skip = divmod(again.step, sampler.steps)
        assert (epoch, sampler.skip) == (2, 2)
        return whole, parts + whole[12:14] + take(again, sampler, seconds, range(epoch, 4))

    for whole, parts in on_threads(3, run):
        assert [step for step, _ in parts] == list(range(24))
        assert [sum(map(len, own)) for _, own in parts] == [sum(map(len, own)) for _, own in whole]


def test_a_loader_that_passes_over_what_was_trained_comes_to_the_same_step() -> None:
    """As accelerate and transformers resume: they read and drop batches."""

    def run(group: ThreadGroup) -> None:
        begun = StepShares(12, group=group)
        take(begun, StepSampler(range(64), begun), 1e3, range(3))
        again = StepShares(12, group=group)
        again.load_state_dict({**begun.state_dict(), "step": 16})
        sampler = StepSampler(range(64), again, pieces=2)
        sampler.set_epoch(2)
        batches = iter(sampler)
        for _ in range(4 * 2):
            next(batches)
            with pytest.raises(InputError, match="ask of"):
                again.factor(16, 1)
        assert (next(batches)[0], again.step) == (48 + 6 * group.rank, 16)
        assert again.factor(16, sampler.own[16, 0]) == 3 * 2 / 12
        with pytest.raises(InputError, match="samples"):
            StepShares(10, group=group).load_state_dict(begun.state_dict())

    on_threads(2, run)


def test_a_run_that_is_resumed_on_other_ranks_measures_anew() -> None:
    def begin(group: ThreadGroup) -> dict[str, Any]:
        shares = StepShares(12, group=group)
        take(shares, StepSampler(range(64), shares), 1e3, range(3))
        return shares.state_dict()

    def go_on(group: ThreadGroup) -> list[tuple[int, ...]]:
        shares = StepShares(12, group=group)
        shares.load_state_dict(state)
        assert shares.step == 18
        take(shares, StepSampler(range(64), shares), (1e3, 2e3)[group.rank], range(3, 6))
        return [shares.of(shares.step)]

    state = on_threads(3, begin)[0]
    assert on_threads(2, go_on) == [[(8, 4)]] * 2


def test_an_epoch_left_in_the_middle_of_the_first_measurements_begins_them_again() -> None:
    def run(group: ThreadGroup) -> tuple[int, ...]:
        shares = StepShares(12, group=group)
        sampler = StepSampler(range(120), shares)
        for batch in sampler:
            assert batch
            shares.start(before_s=7e3)
            shares.stop()
            shares.note(shares.step)
            if shares.step == 5:
                break
        take(shares, sampler, (1e3, 3e3)[group.rank], range(1, 4))
        return shares.of(shares.step)

    assert on_threads(2, run) == [(9, 3)] * 2


def test_a_stop_reaches_all_ranks_after_the_same_step() -> None:
    def run(group: ThreadGroup) -> list[bool]:
        shares, seen = StepShares(4, group=group), []
        for step in range(5):
            shares.of(step)
            if (step, group.rank) == (2, 1):
                shares.request_stop()
            shares.start()
            shares.stop()
            if (step, group.rank) == (3, 0):
                shares.request_stop()  # too late for this step
            shares.note(step)
            seen.append(shares.stop_requested)
        return seen

    assert on_threads(3, run) == [[False, False, True, True, True]] * 3


# Ranks that disagree are all told.


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"samples": 12}, "samples=12"),
        ({"shares": "sync"}, "'sync'"),
        ({"shares": (1, 2)}, r"\[1.0, 2.0\]"),
        ({"caps": (8, 9)}, "caps="),
        ({"least": 2}, "least=2"),
        ({"lookahead": 1}, "lookahead=1"),
    ],
)
def test_other_settings_are_named(settings: dict[str, Any], word: str) -> None:
    def run(group: ThreadGroup) -> None:
        StepShares(**({"samples": 10} | (settings if group.rank else {})), group=group)

    said = on_threads(2, outcome(run))
    assert said[0] == said[1]
    assert re.search(word, said[0])
    assert "rank 1" in said[0]


def test_another_order_of_samples_is_named() -> None:
    def run(group: ThreadGroup) -> None:
        shares = StepShares(10, group=group)
        seed = torch.Generator().manual_seed(group.rank)
        take(shares, StepSampler(RandomSampler(range(30), generator=seed), shares), 1.0, [0])

    said = on_threads(2, outcome(run))
    assert said[0] == said[1]
    assert "order" in said[0]
    assert "seed" in said[0]


@pytest.mark.parametrize("what", ["step", "samples", "state"])
def test_other_shares_are_named(what: str) -> None:
    def run(group: ThreadGroup) -> None:
        shares = StepShares(10, group=group)
        if what == "state" and group.rank:
            other = StepShares(10, shares="balanced")
            other.begin(4)
            shares.load_state_dict(other.state_dict())
        step = 1 if what == "step" and group.rank else shares.step
        shares.begin(step)
        shares.of(step, 5 if what == "samples" and group.rank else None)
        shares.start()
        shares.stop()
        shares.note(step)

    said = on_threads(2, outcome(run))
    assert said[0].split(":")[1] == said[1].split(":")[1]
    assert all("rank 1 differs" in words for words in said)


# Wrong input.


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 2.5}, "samples"),
        ({"least": 0}, "least"),
        ({"lookahead": -1}, "lookahead"),
        ({"shares": "async"}, "async"),
        ({"shares": (1, 2, 3)}, "3 numbers for 2"),
        ({"shares": (0, 0)}, "at least 0"),
        ({"shares": (-1, 2)}, "at least 0"),
        ({"shares": (float("nan"), 2)}, "at least 0"),
        ({"caps": (4, 4)}, "caps"),
        ({"caps": (40,)}, "caps"),
        ({"caps": (40, 40), "shares": "sync"}, "caps"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    said = on_threads(2, outcome(lambda group: StepShares(**({"samples": 10} | settings), group=group)))
    assert all(word in words for words in said)


def test_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="init_process_group"):
        StepShares(4)


def test_a_loader_that_reads_farther_ahead_than_lookahead_is_refused() -> None:
    def run(group: ThreadGroup) -> None:
        shares = StepShares(4, group=group, lookahead=2)
        batches = iter(StepSampler(range(40), shares))
        for _ in range(3):
            next(batches)
        with pytest.raises(InputError, match="lookahead"):
            next(batches)

    on_threads(2, run)


def test_steps_out_of_their_order_are_refused() -> None:
    shares = StepShares(4)
    shares.begin(3)
    with pytest.raises(InputError, match="samples"):
        shares.of(3, 0)
    with pytest.raises(InputError, match="ask of"):
        shares.factor(3, 1)
    with pytest.raises(InputError, match="under way"):
        shares.note(4)


@pytest.mark.parametrize(
    ("options", "word"), [({"pieces": 0}, "pieces"), ({"drop_last": True}, "drop_last")], ids=["pieces", "drop_last"]
)
def test_wrong_options_of_the_sampler_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        StepSampler(range(6), StepShares(8), **options)


# Losses of Hugging Face's models.


class HfModel(nn.Module):
    """As transformers' models: a dict with the loss, and any further arguments."""

    def __init__(self, uses_count: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 2), nn.Dropout(0.5)
        self.uses_count = uses_count

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.linear(self.dropout(x))
        if self.uses_count:
            return {"loss": F.cross_entropy(logits, labels, reduction="sum") / kwargs["num_items_in_batch"]}
        return {"loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("uses_count", [True, False])
def test_a_loss_that_follows_the_count_is_told_from_one_that_does_not(uses_count: bool) -> None:
    model = HfModel(uses_count)
    model.linear.eval()  # a part that is frozen stays so
    assert loss_uses_count(model, {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 0, -100])}) is uses_count
    assert [module.training for module in (model, model.linear, model.dropout)] == [True, False, True]
    with pytest.raises(InputError, match="labels"):
        loss_uses_count(model, {"x": torch.randn(4, 3), "labels": torch.full((4,), -100)})


def test_a_model_without_the_argument_does_not_use_it() -> None:
    assert loss_uses_count(nn.Linear(2, 2), {}) is False


# On processes, with torch's DDP.


def test_params_are_those_of_one_process(tmp_path: Path) -> None:
    by_rank = on_processes(3, "tests.core_ranks:all_cases", tmp_path, "gloo", limit_s=150)
    assert [len(found) for found in by_rank] == [len(CASES) + 3, len(CASES) + 2, len(CASES) + 3]
    for found in by_rank:
        for name, (params, divisions) in found.items():
            epochs, drop_last = (CASES[name].epochs, CASES[name].drop_last) if name in CASES else (2, False)
            expected = train_dense(MEASURED_EPOCHS if name == "resumed" else epochs, drop_last)
            for key, param in params.items():
                assert torch.allclose(param, expected[key], rtol=1e-12, atol=1e-13), f"{name}: {key}"
            assert divisions == by_rank[0].get(name, (None, divisions))[1]
        assert found["measured"][1] == found["resumed"][1]
        for name in CASES:
            if name.startswith("measured"):
                first, *_, last = [division for division in found[name][1] if sum(division) == STEP]
                assert first[1] > last[1] < last[2] < last[0], name


EXAMPLE = dedent("".join(re.findall(r"^(?:    .*)?\n", uneven.core.__doc__ or "", flags=re.MULTILINE))).strip()


def test_the_example_runs_as_it_stands_under_torchrun(tmp_path: Path) -> None:
    tail = "torch.save(ddp.module.state_dict(), f'{dist.get_rank()}.pt')\n"
    (tmp_path / "example.py").write_text(f"{EXAMPLE}\n{tail}".replace("dist.init", "torch.manual_seed(3); dist.init"))
    done = start([BIN / "torchrun", "--standalone", "--nproc-per-node", "2", tmp_path / "example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(100, 6, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 3)
    model = nn.Linear(6, 3)
    order = DistributedSampler(data, num_replicas=1, rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        order.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=order):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), model.state_dict(), rtol=1e-4, atol=1e-5)


def test_the_script_of_the_examples_goes_on_where_it_was(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "examples" / "torchrun_ddp.py"
    options = ("--checkpoint", tmp_path / "c.pt", "--batch-size", "500", "--epochs")
    for epochs, starter in enumerate(
        ([BIN / "torchrun", "--standalone", "--nproc-per-node", "2"], [sys.executable]), 1
    ):
        done = start([*starter, script, *options, str(epochs)], tmp_path)
        assert done.returncode == 0, done.stderr
        assert torch.load(tmp_path / "c.pt")["shares"]["step"] == 20 * epochs
        (line,) = done.stdout.splitlines()
        assert sum(map(int, re.findall(r"\d+", line.split(", accuracy")[0]))) == 500
    assert float(line.split()[-1]) > 0.5


def test_the_page_shows_the_example() -> None:
    page = (Path(__file__).parent.parent / "docs" / "core.md").read_text()
    assert f"```python\n{EXAMPLE}\n```" in page
