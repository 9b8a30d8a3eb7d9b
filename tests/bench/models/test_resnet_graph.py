"""ResNet-20 as a graph and as a module are one model: the same names, the same bits, alone and among ranks."""

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import TensorData, TrainedState, fit
from uneven.bench.models.recipe import classify
from uneven.bench.models.resnet20 import ResNet20
from uneven.bench.models.resnet_graph import make_graph
from uneven.config import Task, resolve
from uneven.graph.graph import Graph
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

BIN = Path(sys.executable).parent
generator = torch.Generator().manual_seed(1)
IMAGES = torch.randn(48, 3, 8, 8, generator=generator)
LABELS = torch.randint(0, 10, (48,), generator=generator)
DATA = TensorData(IMAGES, LABELS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)


def seeded(make_model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make_model()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_graph_and_module_start_compute_and_train_the_same_bits() -> None:
    models = [seeded(make) for make in (ResNet20, make_graph)]
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert [name for name, _ in models[0].named_parameters()] == [name for name, _ in models[1].named_parameters()]
    outputs = [model(IMAGES[:4]) for model in models]
    assert torch.equal(*outputs)
    for output in outputs:
        nn.functional.cross_entropy(output, LABELS[:4]).backward()
    gradients = [{name: param.grad for name, param in model.named_parameters()} for model in models]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients[0].values())
    assert_same(*gradients)  # type: ignore[arg-type]
    optimizers = [sgd(model.parameters()) for model in models]
    start = models[0].state_dict()["head.weight"].clone()
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            batch = torch.arange(4) + 2 * step
            classify(model, (IMAGES[batch], LABELS[batch])).backward()
            optimizer.step()
    assert not torch.equal(start, models[0].state_dict()["head.weight"])
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert torch.equal(*(model.eval()(IMAGES[:4]) for model in models))


@pytest.mark.parametrize("settings", [{"policy": "sync"}, {"policy": "balanced", "shares": (5, 3)}])
def test_graph_and_module_train_the_same_bits_on_two_ranks(settings: dict[str, Any]) -> None:
    """Shares that are measured differ from run to run, so those of balanced are given."""
    config = resolve({"batch_size": 4, "epochs": 1, "seed": 3, "max_grad_norm": 1.0, **settings})
    devices = parse_devices(["cpu", "cpu"])

    def trained(model: nn.Module) -> TrainedState:
        # Copies, not the factory: ranks that are threads share torch's random state.
        task = Task(partial(copy.deepcopy, model), sgd, classify, DATA)

        def rank(group: ThreadGroup) -> TrainedState:
            rank_info = RankInfo(group.rank, devices)
            return Worker(task, config, rank_info, lambda _: group, Requests(), Silent()).train().state

        return on_threads(2, rank)[0]

    states = [trained(seeded(make)) for make in (ResNet20, make_graph)]
    assert states[0].finished
    assert_same(states[0].params, states[1].params)
    assert_same(states[0].buffers, states[1].buffers)
    assert not torch.equal(states[0].params["conv.weight"], seeded(ResNet20).state_dict()["conv.weight"])


@pytest.mark.parametrize("policy", ["async", pytest.param("cadence", marks=pytest.mark.soak)])
def test_a_pickled_graph_trains_on_rank_processes(policy: str) -> None:
    """The run itself proves that every sample was trained once. The module takes the state, and so does the graph."""
    graph = seeded(make_graph)
    assert isinstance(graph, Graph)
    state = fit(
        model=partial(copy.deepcopy, graph),
        optimizer=sgd,
        step=classify,
        dataset=DATA,
        batch_size=4,
        epochs=1,
        devices="cpu,cpu",
        policy=policy,
        progress="off",
    )
    assert state.finished
    assert state.samples == len(DATA)
    assert state.structure == graph.structure
    fresh, module = state.load_into(make_graph()), state.load_into(ResNet20())
    assert torch.equal(*(model.eval()(IMAGES[:4]) for model in (fresh, module)))
    assert not torch.equal(state.params["head.weight"], graph.state_dict()["head.weight"])


SCRIPT = """
import sys, torch
from tests.bench.models.test_resnet_graph import DATA, sgd
from uneven import Ddp
from uneven.bench.models.recipe import classify
from uneven.bench.models.resnet_graph import make_graph

for policy in ("sync", "balanced", "cadence", "async"):
    torch.manual_seed(3)
    settings = {"policy": policy, "out": f"{sys.argv[1]}/{policy}", "progress": "off"}
    with Ddp.setup(make_graph(), sgd, dataset=DATA, batch_size=4, epochs=2, **settings) as ddp:
        for epoch in range(2):
            for batch in ddp.batches(epoch):
                ddp.step(classify(ddp, batch))
"""


@pytest.mark.soak
def test_an_own_loop_trains_the_graph_in_every_policy_on_devices_that_do_not_match(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = Path(__file__).parent.parent.parent.parent
    command = [sys.executable, "-m", "uneven", "run", "--devices", "cpu,cpu@0.4", tmp_path / "train.py", tmp_path]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    structure = make_graph().structure
    for policy in ("sync", "balanced", "cadence", "async"):
        state = TrainedState.load(tmp_path / policy)
        assert (state.finished, state.samples, state.config["policy"]) == (True, 2 * len(DATA), policy)
        assert state.structure == structure
        state.load_into(ResNet20())
