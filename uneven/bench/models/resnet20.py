"""ResNet-20 on CIFAR-10: depth, BatchNorm, augmentation, SGD with momentum; the benchmark's long run.

Shortcuts across a stride are 1x1 convolutions (option B); the paper's own are zero-padded identities (option A).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from uneven.bench.models.recipe import Published, Recipe


def conv(channels_in: int, channels: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, size, stride=stride, padding=size // 2, bias=False)


def shortcut(channels_in: int, channels: int, stride: int) -> nn.Module:
    if stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, 16, 3, 1)
        self.bn = nn.BatchNorm2d(16)
        blocks = []
        channels_in = 16
        for channels, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                blocks.append(BasicBlock(channels_in, channels, stride))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, 10)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.bn(self.conv(x))))
        scores: Tensor = self.head(out.mean((2, 3)))
        return scores


def make_scheduler(optimizer: Optimizer, total_steps: int) -> MultiStepLR:
    return MultiStepLR(optimizer, [total_steps // 2, 3 * total_steps // 4], gamma=0.1)


RECIPE = Recipe(
    name="resnet-20",
    title="ResNet-20",
    data="cifar10",
    batch_size=128,
    epochs=200,
    num_params=272_474,
    make_model=ResNet20,
    make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
    make_scheduler=make_scheduler,
    published=Published(0.9125, "He et al. 2015, table 6 (option A, 45k/5k split, 64k steps)", worst=0.9125),
)
