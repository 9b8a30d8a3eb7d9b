"""ResNet-20 built with FlowBuilder: same names, initial params and arithmetic as resnet20.py, bit by bit.

tests/bench/models/test_resnet_graph.py compares the two.
"""

from dataclasses import replace

from torch import Tensor, nn

from uneven.bench.models.resnet20 import RECIPE as MODULE_RECIPE
from uneven.bench.models.resnet20 import conv, initialise, shortcut
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph


def _pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def _block(number: int, channels_in: int, channels: int, stride: int) -> FlowBuilder:
    body = (
        FlowBuilder.from_(conv(channels_in, channels, 3, stride)).tag("conv1")
        .through(nn.BatchNorm2d(channels)).tag("bn1")
        .through(nn.ReLU())
        .through(conv(channels, channels, 3, 1)).tag("conv2")
        .through(nn.BatchNorm2d(channels)).tag("bn2")
    )  # fmt: skip
    skip = FlowBuilder.from_(shortcut(channels_in, channels, stride)).tag("shortcut")
    return FlowBuilder(str(number)).also_with(skip, body).through(nn.ReLU())


def make_graph() -> Graph:
    flow = (
        FlowBuilder("resnet-20")
        .through(conv(3, 16, 3, 1)).tag("conv")
        .through(nn.BatchNorm2d(16)).tag("bn")
        .through(nn.ReLU())
    )  # fmt: skip
    blocks = FlowBuilder("blocks")
    channels_in = 16
    for number, (channels, stride) in enumerate([(16, 1)] * 3 + [(32, 2)] + [(32, 1)] * 2 + [(64, 2)] + [(64, 1)] * 2):
        blocks.through(_block(number, channels_in, channels, stride))
        channels_in = channels
    graph = flow.through(blocks).through(_pooled).through(nn.Linear(64, 10)).tag("head").build()
    initialise(graph)
    return graph


RECIPE = replace(
    MODULE_RECIPE,
    name="resnet-graph",
    title="ResNet-20 as a graph",
    make_model=make_graph,
)
