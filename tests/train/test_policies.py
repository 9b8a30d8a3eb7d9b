"""global_batch_size="auto": chosen once on all ranks alike, recorded, exact, and refused where nothing is measured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss, params
from tests.train.exact_runs import train as train_exactly
from uneven import TensorData, fit
from uneven.config import Task, resolve
from uneven.errors import InputError
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker


def train(size: int, scheduler: Any = None, **changes: Any) -> list[tuple[RankResult, Worker]]:
    config = resolve({"batch_size": 8, "epochs": 2, "seed": 3, "global_batch_size": "auto", **changes})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS["sgd"], mean_loss, TensorData(X.double(), Y), scheduler, None)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> tuple[RankResult, Worker]:
        info = RankInfo(group.rank, devices)
        worker = Worker(task, config, info, lambda _: group, Requests(), Silent())
        return worker.train(), worker

    return on_threads(size, rank)


@pytest.mark.parametrize(("limit", "factor"), [(None, 4), (40, 2), (16, 1)])
def test_a_slow_sum_makes_steps_larger_and_the_result_is_that_of_one_device(
    limit: int | None, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate follows the steps that there really are."""
    monkeypatch.setattr("uneven.train.policies.measure_sum_ms", lambda group, model: 1e6)
    lengths: list[int] = []

    def decays(optimizer: Any, total_steps: int) -> Any:
        lengths.append(total_steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / (2 * total_steps))

    found = train(2, decays, max_global_batch_size=limit)
    size = 16 * factor
    dense = train_exactly(1, global_batch_size=size, scheduler=decays)[0]
    assert lengths == [2 * -(-len(X) // size)] * 3, "made once on each rank, when the steps are known"
    for result, worker in found:
        assert worker.config.global_batch_size == result.state.config["global_batch_size"] == size
        assert (worker.config.accumulate, worker.config.max_global_batch_size) == (factor, None)
        assert worker.engine.micro_batch_size(size // 2) == 8, "a device holds no more than before"
        for name, value in params(result).items():
            torch.testing.assert_close(value, params(dense)[name], rtol=0, atol=1e-10)
    (event,) = [event for event in found[0][0].timeline.events if event.kind == "global batch"]
    assert event.fields["samples"] == size
    synchronizer = found[0][1].synchronizer
    assert synchronizer is not None
    assert synchronizer.notes[0].startswith(f"  global batch {size} (")
    assert f"max_global_batch_size={limit or 64} allows no more" in synchronizer.notes[0]


def test_a_cheap_sum_leaves_the_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.train.policies.measure_sum_ms", lambda group, model: 1e-9)
    ((_, worker), _) = train(2)
    assert (worker.config.global_batch_size, worker.config.accumulate) == (16, 1)
    assert worker.synchronizer is not None
    assert "allows no more" not in worker.synchronizer.notes[0]


def test_on_one_device_there_is_nothing_to_sum() -> None:
    ((result, worker),) = train(1)
    assert (worker.config.global_batch_size, result.state.config["accumulate"]) == (8, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "sync"}, "global_batch_size='auto' with policy='sync': pass a number, or use 'balanced'"),
        ({"policy": "cadence"}, "global_batch_size='auto' with policy='cadence'"),
        ({"shares": (2.0, 1.0)}, "global_batch_size='auto' with shares"),
        ({"strategy": "fsdp"}, "global_batch_size='auto' with strategy='fsdp'"),
        ({"global_batch_size": 64, "max_global_batch_size": 128}, "max_global_batch_size=128 limits"),
        ({"global_batch_size": "most"}, "must be a whole number of at least 1 or one of auto"),
        ({"max_global_batch_size": 0}, "max_global_batch_size=0 must be a whole number of at least 1"),
    ],
)
def test_where_nothing_can_be_chosen_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 8, "epochs": 1, "global_batch_size": "auto", **changes})
    assert words in str(caught.value)


def run(**changes: Any) -> Any:
    settings: dict[str, Any] = {"epochs": 1, "devices": "cpu", "progress": "off", **changes}
    return fit(
        model=lambda: nn.Linear(4, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch).square().mean(),
        dataset=TensorData(torch.linspace(-1, 1, 128).view(32, 4)),
        batch_size=4,
        global_batch_size="auto",
        **settings,
    )


def test_a_limit_below_a_plain_step_is_refused_before_ranks_start() -> None:
    with pytest.raises(InputError, match="max_global_batch_size=6 is below 8, the samples of a plain step"):
        run(devices="cpu,cpu", max_global_batch_size=6)


def test_resume_and_replay_keep_what_was_chosen(tmp_path: Path) -> None:
    """On two devices, whatever was chosen; the replay has the same bits, and the resumed run the same steps."""
    out = tmp_path / "run"
    first = run(devices="cpu,cpu@0.4", max_global_batch_size=16, out=out, epochs=2, save_every=1)
    size, accumulate = first.config["global_batch_size"], first.config["accumulate"]
    assert (size, accumulate) in ((8, 1), (16, 2))
    again = run(devices="cpu,cpu@0.4", max_global_batch_size=16, replay=out, epochs=2)
    assert (again.config["global_batch_size"], again.config["accumulate"]) == (size, accumulate)
    assert all(torch.equal(value, first.params[name]) for name, value in again.params.items())
    longer = run(resume=out / "epoch-1", epochs=2)
    assert (longer.config["global_batch_size"], longer.config["accumulate"]) == (size, accumulate)
    assert longer.slot == first.slot
