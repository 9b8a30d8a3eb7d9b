"""A U-Net of diffusers in fit: noise from keys of samples makes unequal shares exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import TensorData
from uneven.config import Task, resolve
from uneven.data.tensors import key_integers, key_normals
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

diffusers = pytest.importorskip("diffusers", reason="make test-frameworks")
SCHEDULER = diffusers.DDPMScheduler(num_train_timesteps=100)


def net() -> nn.Module:
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()
    own = torch.Generator().manual_seed(5)  # threads share torch's global one
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=own) * 0.1)
    return model


def with_noise(rows: tuple[Tensor, ...], keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    assert keys is not None
    noise, times = key_normals(keys, 0, rows[0].shape[1:]).double(), key_integers(keys, 0, 100)
    return SCHEDULER.add_noise(rows[0], noise, times), times, noise


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    noisy, times, noise = batch
    return F.mse_loss(model(noisy, times).sample, noise)


def train(size: int, **changes: Any) -> RankResult:
    images = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    config = resolve({"epochs": 2, "seed": 3, "max_grad_norm": 1.0, "global_batch_size": 8, **changes})
    sgd = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
    task = Task(net, sgd, loss_of, TensorData(images, transform=with_noise))
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    return on_threads(size, rank)[0]


@pytest.mark.parametrize("shares", [(5, 3), (0, 1)])
def test_unequal_shares_are_exact(shares: tuple[int, int]) -> None:
    ours, dense = train(2, batch_size=4, shares=shares), train(1, batch_size=8)
    for name, param in dense.state.params.items():
        torch.testing.assert_close(ours.state.params[name], param, rtol=1e-10, atol=1e-10)
