"""The example of a diffusion model: its noise and its moving average do not depend on who trains which sample."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.api.starts import BIN, start
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS
from uneven.config import Task, resolve
from uneven.data.sample_order import permutation, sample_keys
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion.py"
COUNT, STEP, SEED, DECAY = 20, 8, 3, 0.9  # so that the last step of an epoch has 4


@cache
def example() -> dict[str, Any]:
    threads = torch.get_num_threads()
    names = runpy.run_path(str(EXAMPLE))
    torch.set_num_threads(threads)
    return names


def data() -> Any:
    made = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (COUNT, 1, 28, 28), generator=made, dtype=torch.uint8)
    return example()["data_of"](images.numpy(), (torch.arange(COUNT) % 10).numpy())


def net() -> nn.Module:
    """Filled from a generator of its own: threads share torch's global one."""
    model: nn.Module = example()["UNet"](width=8).double()
    own = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=own) * 0.1)
    return model


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    images, times, digits, way = batch
    return example()["loss_of"](model, (images.double(), times, digits, way.double()))  # type: ignore[no-any-return]


@cache
def dense(epochs: int) -> tuple[list[Tensor], list[Tensor]]:
    """A plain loop with torch's own average; params and averages."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(SEED, epoch, COUNT))
        keys = torch.from_numpy(sample_keys(SEED, epoch, COUNT))
        for at in range(0, COUNT, STEP):
            optimizer.zero_grad()
            loss_of(model, data().take(order[at : at + STEP], keys[at : at + STEP])).backward()
            average.update_parameters(model)
            optimizer.step()
    return [p.detach() for p in model.parameters()], [p.detach() for p in average.module.parameters()]


def train(size: int, **changes: Any) -> list[RankResult]:
    config = resolve({"epochs": 2, "seed": SEED, "policy": "balanced", **changes})
    update = example()["Averaged"].update
    task = Task(lambda: example()["Averaged"](net(), DECAY), OPTIMIZERS["sgd"], loss_of, data(), before_step=update)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    return on_threads(size, rank)


@pytest.mark.parametrize("changes", [{"shares": (5, 3)}, {"shares": (0, 1)}, {"policy": "sync", "accumulate": 2}])
def test_params_and_their_average_are_those_of_one_process(changes: dict[str, Any]) -> None:
    params, averages = dense(2)
    for result in train(2, batch_size=STEP // 2 // changes.get("accumulate", 1), **changes):
        for found, expected in zip(result.state.params.values(), params, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        buffers = [result.state.buffers[f"average_{place}"] for place in range(len(averages))]
        for found, expected in zip(buffers, averages, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_the_average_is_the_same_on_all_ranks_of_a_local_policy(policy: str) -> None:
    first, second = train(2, batch_size=2, policy=policy)
    for name, value in first.state.buffers.items():
        assert torch.equal(value, second.state.buffers[name])
    assert first.state.buffers["updates"] > 0


def test_evaluation_computes_with_the_average() -> None:
    torch.manual_seed(0)
    model = example()["Averaged"](nn.Linear(2, 1), 0.5)
    before = [param.detach().clone() for param in model.model.parameters()]
    model.update()
    with torch.no_grad():
        for param in model.model.parameters():
            param.add_(1)
    model.update()
    x = torch.ones(1, 2)
    assert torch.equal(model.train()(x), nn.functional.linear(x, *model.model.parameters()))
    expected = [param + 0.5 for param in before]
    torch.testing.assert_close(model.eval()(x), nn.functional.linear(x, *expected))


def test_the_script_draws_digits_after_training_on_two_devices(tmp_path: Path) -> None:
    options = ["--samples", "256", "--epochs", "1", "--image", tmp_path / "digits.pgm"]
    done = start([BIN / "uneven", "run", EXAMPLE, "--devices", "cpu,cpu@0.4", "--", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "three rows" in done.stdout
    assert len((tmp_path / "digits.pgm").read_bytes()) == 140 * 42 + len(b"P5 140 42 255\n")
