from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from uneven import InputError, TrainedState
from uneven.state import capture_state


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
    with pytest.raises(InputError, match="no trained state"):
        TrainedState.load(tmp_path)
