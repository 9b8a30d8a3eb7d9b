"""ResNet-18 and ResNet-50 for images of 224 x 224 pixels, on random ones; for their speed.

Params have the names and shapes of torchvision's models (tests/bench/models/test_large.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uneven.bench.models.recipe import Recipe

CLASSES = 1000


def conv(channels_in: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, size, stride=stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Convolutions of `sizes` with BatchNorm, added to what came in; the stride is in the first one of size 3."""

    def __init__(self, channels_in: int, sizes: Sequence[int], channels: Sequence[int], stride: int) -> None:
        super().__init__()
        self.depth = len(sizes)
        strided = sizes.index(3)
        before = channels_in
        for place, (size, after) in enumerate(zip(sizes, channels, strict=True)):
            self.add_module(f"conv{place + 1}", conv(before, after, size, stride if place == strided else 1))
            self.add_module(f"bn{place + 1}", nn.BatchNorm2d(after))
            before = after
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != before:
            self.downsample = nn.Sequential(conv(channels_in, before, 1, stride), nn.BatchNorm2d(before))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        for place in range(1, self.depth + 1):
            x = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(x))
            x = F.relu(x + shortcut if place == self.depth else x)
        return x


class ResNet(nn.Module):
    """`blocks` in each of four layers. A bottleneck block is 1x1, 3x3, 1x1 and four times as wide at its end."""

    def __init__(self, blocks: Sequence[int], *, is_bottleneck: bool) -> None:
        super().__init__()
        self.conv1 = conv(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        sizes, wider = ((1, 3, 1), 4) if is_bottleneck else ((3, 3), 1)
        before = 64
        for place, count in enumerate(blocks):
            width = 64 * 2**place
            channels = (*[width] * (len(sizes) - 1), wider * width)
            layer = []
            for number in range(count):
                layer.append(Block(before, sizes, channels, 2 if place > 0 and number == 0 else 1))
                before = channels[-1]
            self.add_module(f"layer{place + 1}", nn.Sequential(*layer))
        self.fc = nn.Linear(before, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)
        for place in range(1, 5):
            x = self.get_submodule(f"layer{place}")(x)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def make_resnet18() -> nn.Module:
    return ResNet((2, 2, 2, 2), is_bottleneck=False)


def make_resnet50() -> nn.Module:
    return ResNet((3, 4, 6, 3), is_bottleneck=True)


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)  # type: ignore[arg-type]


RESNET18 = Recipe(
    name="resnet-18",
    title="ResNet-18 at 224x224",
    data="random-224",
    batch_size=16,
    epochs=1,
    num_params=11_689_512,
    make_model=make_resnet18,
    make_optimizer=sgd,
)

RESNET50 = Recipe(
    name="resnet-50",
    title="ResNet-50 at 224x224",
    data="random-224",
    batch_size=64,
    epochs=1,
    num_params=25_557_032,
    make_model=make_resnet50,
    make_optimizer=sgd,
)
