"""Memory caps in whole runs, on threads: no rank ever holds more than its cap, and the arithmetic stays exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api.loops import make_loop, run_epochs
from tests.ranks import on_threads
from tests.train.exact_runs import X, Y, assert_exact, loss_and_count, mean_loss, train
from uneven import InputError
from uneven.cli.run import run
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.policy.finish import Cost
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.prepare import measure
from uneven.train.rank_info import RankInfo, RankResult


def shares_of(results: list[RankResult], slot: int) -> list[int]:
    return [next(samples for at, _, samples in result.log if at == slot) for result in results]


@pytest.mark.parametrize("step", [mean_loss, loss_and_count])
def test_balanced_gives_no_rank_more_than_it_holds(step: Any) -> None:
    dense = train(1, global_batch_size=24, step=step)[0]
    ours = train(3, global_batch_size=24, step=step, memory_cap=(3, 12, 12))
    assert_exact(ours, dense, "sgd", torch.float64)
    for slot in range(6):
        assert all(share <= cap for share, cap in zip(shares_of(ours, slot), (3, 12, 12), strict=True))


class Watch:
    """A train step that remembers how many samples it was given."""

    def __init__(self, step: Any) -> None:
        self.step, self.sizes = step, set[int]()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.sizes.add(len(batch[1]))
        return self.step(model, batch)


@pytest.mark.parametrize(
    "options", [{}, {"policy": "sync"}, {"shares": (5, 2, 1)}, {"accumulate": 2, "max_grad_norm": 0.1}]
)
def test_caps_that_hold_less_than_a_step_make_micro_batches(options: dict[str, Any]) -> None:
    watch = Watch(mean_loss)
    dense = train(1, global_batch_size=24, max_grad_norm=options.get("max_grad_norm"))[0]
    ours = train(3, global_batch_size=24, memory_cap=5, step=watch, **options)
    assert_exact(ours, dense, "sgd", torch.float64)
    assert max(max(shares_of(ours, slot)) for slot in range(6)) > 5
    assert max(watch.sizes) <= 5


def test_one_device_takes_its_steps_in_micro_batches_too() -> None:
    watch = Watch(mean_loss)
    assert_exact(train(1, batch_size=24, memory_cap=7, step=watch), train(1, batch_size=24)[0], "sgd", torch.float64)
    assert max(watch.sizes) <= 7


def make_engine(size: int = 2, **changes: Any) -> Engine:
    config = resolve({"batch_size": 16, "epochs": 1, **changes})
    task = Task(lambda: nn.Linear(6, 3), lambda params: torch.optim.SGD(params, lr=0.1), mean_loss, TensorData(X, Y))
    return Engine(task, config, RankInfo(0, parse_devices(["cpu"] * size)), Recorder(0))


@pytest.mark.parametrize(
    ("settings", "samples", "batch"),
    [
        ({}, 40, 40),
        ({"accumulate": 4}, 40, 16),
        ({"memory_cap": 40}, 40, 40),
        ({"memory_cap": 16}, 40, 14),  # three about equal ones
        ({"memory_cap": 16}, 17, 9),  # and not one of 16 and one of 1, on which BatchNorm could not train
        ({"memory_cap": 8}, 5, 16),  # as without it: all of them are one
        ({"memory_cap": 8}, 0, 16),
        ({"memory_cap": (8, 4)}, 8, 16),
    ],
)
def test_micro_batches_are_few_and_about_equal(settings: dict[str, Any], samples: int, batch: int) -> None:
    assert make_engine(**settings).micro_batch_size(samples) == batch


def test_every_rank_knows_the_micro_batches_of_the_others() -> None:
    engine = make_engine(memory_cap=(8, 4))
    assert engine.micro_batch_size(8, rank=0) == 16
    assert engine.micro_batch_size(8, rank=1) == 4


def test_on_a_cpu_nothing_is_probed() -> None:
    assert measure(make_engine()).cap == float("inf")


def test_a_cap_goes_along_when_a_cost_is_scaled() -> None:
    assert Cost(1.0, 2.0, 8.0).scaled(2.0) == Cost(2.0, 4.0, 8.0)


def test_a_list_of_another_length_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="has 3 entries for 2 devices"):
        make_engine(memory_cap=(8, 8, 8))


@pytest.mark.parametrize(("text", "cap"), [("64", 64), ("64,16", (64, 16))])
def test_the_command_line_takes_one_or_several(text: str, cap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("uneven.launch.script.run_script", lambda script, given: seen.update(given))
    run(Path("train.py"), memory_cap=text)
    assert seen == {"memory_cap": cap}


def test_an_own_loop_has_shares_within_the_caps() -> None:
    def rank(group: Any) -> list[int]:
        seen: list[int] = []
        with make_loop(group, memory_cap=(20, 6)) as loop:
            run_epochs(loop, seen=seen)
        return seen

    seen = on_threads(2, rank)
    assert max(seen[0]) <= 20
    assert max(seen[1]) == 6


@pytest.mark.parametrize(
    ("size", "settings", "words"),
    [
        (1, {"memory_cap": 24}, "would be ignored"),
        (2, {"memory_cap": 24, "policy": "sync"}, "would be ignored"),
        (2, {"memory_cap": 24, "shares": (2, 1)}, "would be ignored"),
        (2, {"memory_cap": 11}, "holds 22 of the 24 samples of a step"),
    ],
)
def test_an_own_loop_refuses_what_it_cannot_obey(size: int, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        on_threads(size, lambda group: make_loop(group, **settings))
