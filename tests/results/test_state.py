import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.results.checkpoints import write_checkpoint
from uneven import InputError, TensorData, TrainedState, fit
from uneven.config import Task, resolve
from uneven.graph.flow import FlowBuilder
from uneven.graph.graph import Graph
from uneven.hardware.device import parse_devices
from uneven.results.record import encode, read_record
from uneven.results.state import capture_state
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker


class Tied(nn.Module):
    """What breaks naive saving: a tied weight, channels_last, an integer buffer, a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.bn = nn.BatchNorm2d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x)).mean() + self.head(self.embedding(torch.arange(5))).mean()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(2, 3, 5, 5)).backward()
        optimizer.step()
    return model, optimizer


def test_a_saved_state_loads_bit_equal_into_a_fresh_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = TrainedState(**capture_state(model, optimizer), history=[{"epoch": 1}], slot=3, samples=6)
    state.save(tmp_path / "s")
    loaded = TrainedState.load(tmp_path / "s")
    torch.manual_seed(9)
    fresh = loaded.load_into(Tied())
    for (name, ours), (_, theirs) in zip(fresh.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    assert fresh.head.weight is fresh.embedding.weight
    assert loaded.history == [{"epoch": 1}]
    assert (loaded.slot, loaded.samples, loaded.finished) == (3, 6, True)


def test_params_stay_in_the_models_order(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = TrainedState(**capture_state(model, optimizer))
    order = [name for name, _ in model.named_parameters()]
    assert order != sorted(order)
    assert list(state.params) == order
    assert list(TrainedState.load(state.save(tmp_path)).params) == order


def test_the_optimizer_is_saved_by_param_name(tmp_path: Path) -> None:
    model, optimizer = trained()
    TrainedState(**capture_state(model, optimizer)).save(tmp_path)
    loaded = TrainedState.load(tmp_path)
    names = dict(model.named_parameters())
    assert loaded.param_groups[0]["params"] == list(names)
    assert loaded.param_groups[0]["betas"] == [0.8, 0.9]
    for name, param in names.items():
        for key, value in optimizer.state[param].items():
            assert torch.equal(loaded.optimizer[f"{name}.{key}"], value)
    assert torch.equal(loaded.optimizer["random.cpu"], torch.get_rng_state())


def test_the_file_is_plain_safetensors_under_the_models_own_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    TrainedState(**capture_state(model, optimizer)).save(tmp_path)
    plain = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert set(plain) == set(model.state_dict()) - {"head.weight"}


def test_another_model_is_refused(tmp_path: Path) -> None:
    state = TrainedState(**capture_state(*trained()))
    with pytest.raises(InputError, match="does not fit Linear"):
        state.load_into(nn.Linear(2, 2))


def test_a_folder_without_a_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no trained state .*was the run finished"):
        TrainedState.load(tmp_path)
    newest = write_checkpoint(tmp_path / "step-4")
    with pytest.raises(InputError, match=rf"its newest checkpoint is {newest}\)$"):
        TrainedState.load(tmp_path)


def make_graph(activation: nn.Module) -> Graph:
    first = FlowBuilder.from_(nn.Linear(3, 4)).tag("first").through(nn.BatchNorm1d(4)).tag("norm")
    return first.through(activation).tag("middle").through(nn.Linear(4, 1)).tag("last").build()


class Plain(nn.Module):
    """The same names and shapes as the graph's, and no structure to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def fitted(make_model: Any, out: Path, **settings: Any) -> TrainedState:
    fit(
        model=make_model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch[0]).square().mean(),
        dataset=TensorData(torch.arange(48.0).view(16, 3), torch.zeros(16)),
        **{"batch_size": 8, "epochs": 1, "devices": "cpu", "progress": "off", "out": out, **settings},
    )
    return TrainedState.load(out)


def test_a_graphs_state_is_refused_by_another_graph_of_the_same_names_and_shapes(tmp_path: Path) -> None:
    state = fitted(lambda: make_graph(nn.ReLU()), tmp_path / "s")
    assert state.structure == make_graph(nn.ReLU()).structure
    own = state.load_into(make_graph(nn.ReLU()))
    assert torch.equal(own.state_dict()["last.weight"], state.params["last.weight"])
    other = make_graph(nn.GELU())
    before = other.state_dict()["last.weight"].clone()
    with pytest.raises(InputError) as caught:
        state.load_into(other)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the state belongs to another graph:"
    assert any(line.startswith("-") and "ReLU" in line for line in lines)
    assert any(line.startswith("+") and "GELU" in line for line in lines)
    assert torch.equal(other.state_dict()["last.weight"], before)


def test_graphs_and_plain_modules_of_the_same_names_load_each_others_states(tmp_path: Path) -> None:
    of_graph = fitted(lambda: make_graph(nn.ReLU()), tmp_path / "graph")
    of_module = fitted(Plain, tmp_path / "module")
    assert of_module.structure is None
    for state, model in ((of_graph, Plain()), (of_module, make_graph(nn.GELU()))):
        state.load_into(model)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.params.items())


def test_a_state_without_a_structure_loads_as_before(tmp_path: Path) -> None:
    fitted(lambda: make_graph(nn.ReLU()), tmp_path)
    record = read_record(tmp_path)
    del record["structure"]
    (tmp_path / "state.json").write_bytes(encode(record))
    old = TrainedState.load(tmp_path)
    assert old.structure is None
    old.load_into(make_graph(nn.GELU()))


def test_a_structure_that_is_no_text_is_nobodys(tmp_path: Path) -> None:
    class Own(nn.Linear):
        structure = ("mine",)

    assert fitted(lambda: Own(3, 1), tmp_path).structure is None


def test_synchronised_batchnorm_leaves_the_structure_that_was_asked_for() -> None:
    data = TensorData(torch.arange(48.0).view(16, 3), torch.zeros(16))
    task = Task(lambda: make_graph(nn.ReLU()), torch.optim.SGD, lambda model, batch: model(batch[0]).mean(), data)
    config = resolve({"batch_size": 4, "epochs": 1, "policy": "sync", "sync_batchnorm": True})
    devices = parse_devices(["cpu", "cpu"])

    def rank(group: ThreadGroup) -> TrainedState:
        rank_info = RankInfo(group.rank, devices)
        return Worker(task, config, rank_info, lambda _: group, Requests(), Silent()).train().state

    state = on_threads(2, rank)[0]
    assert state.structure == make_graph(nn.ReLU()).structure
    state.load_into(make_graph(nn.ReLU()))


def test_a_results_files_are_verified(tmp_path: Path) -> None:
    state = TrainedState(**capture_state(*trained()), log=[[(0, 0, 6)]], dataset_samples=6, slot=1)
    state.save(tmp_path)
    record = json.loads((tmp_path / "state.json").read_text())
    assert (record["version"], record["kind"]) == (2, "result")
    assert set(record["versions"]) == {"uneven", "torch", "python"}
    for name in ("state.safetensors", "optimizer.safetensors", "log.json"):
        content = (tmp_path / name).read_bytes()
        assert record["files"][name]["bytes"] == len(content)
        (tmp_path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(
            InputError, match=rf"^state {tmp_path}: {name} is damaged: its crc32 is \w+ instead of \w+$"
        ):
            TrainedState.load(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=rf"^state {tmp_path}: {name} is missing$"):
            TrainedState.load(tmp_path)
        (tmp_path / name).write_bytes(content)
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text.replace('"slot": 1', '"slot": 7'))
    with pytest.raises(InputError, match=r"state\.json is damaged: its crc32 is \w+ instead of \w+$"):
        TrainedState.load(tmp_path)
    state.save(tmp_path)  # over the old one
    assert TrainedState.load(tmp_path).slot == 1
    assert {path.name for path in tmp_path.iterdir()} == {*record["files"], "state.json"}
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match=r"state\.json is damaged: [^\n]+$"):
        TrainedState.load(tmp_path)


def test_a_loaded_result_knows_who_trained_what_and_can_be_saved_elsewhere(tmp_path: Path) -> None:
    """Else its `rank_samples` and `segments` are empty, and a copy of it cannot be replayed."""
    task: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "step": lambda model, batch: model(batch[0]).square().mean(),
        "dataset": TensorData(torch.randn(20, 3)),
        "batch_size": 4, "epochs": 2, "devices": "cpu", "progress": "off",
    }  # fmt: skip
    state = fit(**task, out=tmp_path / "run", save_every="3 steps")
    loaded = TrainedState.load(tmp_path / "run")
    for name in ("log", "rounds", "saves", "stop_rounds", "segments", "members", "rank_samples"):
        assert getattr(loaded, name) == getattr(state, name), name
    assert loaded.rank_samples == [40]
    assert TrainedState.load(tmp_path / "run" / "step-3").segments == state.segments
    loaded.save(tmp_path / "copy")
    again = fit(**task, replay=tmp_path / "copy")
    assert all(torch.equal(again.params[name], state.params[name]) for name in state.params)
    resumed = fit(**task, out=tmp_path / "run", save_every="3 steps", resume="auto")  # all is trained
    assert resumed.rank_samples == [40]
