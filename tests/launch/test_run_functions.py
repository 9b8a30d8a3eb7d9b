"""What the user's functions find in a run of `fit`: random numbers, the modes of the model and of torch, their rank."""

import importlib
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.launch.small_runs import X, Y, eval_step, make_net, train, train_step
from uneven import Ddp, InputError, TensorData
from uneven.data.loader_process import WorkerStart


def mixing_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """With random numbers of all three kinds, as mixup has."""
    weight = random.random() + float(np.random.rand()) + torch.rand(())
    return weight * train_step(model, batch)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_the_same_seed_gives_the_same_bits_whatever_the_step_draws_from(devices: str) -> None:
    settings: dict[str, Any] = {"step": mixing_step, "devices": devices, "policy": "sync", "epochs": 1}
    first, second = (train(**settings).params for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_the_callers_random_numbers_go_on_as_if_nothing_was_trained() -> None:
    seed_all()
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    seed_all()
    train(step=mixing_step, epochs=1)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def test_a_part_of_the_model_in_eval_mode_stays_so() -> None:
    def frozen() -> nn.Module:
        model = make_net()
        model[1].eval()
        return model

    assert train(model=frozen, evaluate=(TensorData(X, Y), eval_step)).buffers["1.num_batches_tracked"] == 0
    assert train(model=lambda: make_net().eval(), epochs=1).buffers["1.num_batches_tracked"] == 7


def test_the_ranks_of_fit_know_their_number(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        (tmp_path / f"rank {Ddp.rank()}").touch()
        return train_step(model, batch)

    train(step=step, devices="cpu,cpu", epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 1"]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False
    torch.set_default_dtype(torch.float32)


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples of the default dtype, wherever they are made."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        assert torch.backends.cudnn.deterministic
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 2)


@pytest.mark.usefixtures("double")
def test_what_the_script_has_set_for_all_of_torch_holds_in_ranks_and_loader_processes() -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(6, 2), "dataset": Drawn(), "epochs": 1}
    expected = train(**settings).params
    found = train(**settings, devices="cpu,cpu", global_batch_size=16, num_workers=1).params
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)  # of the same dtype, too


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's, which the script imports and then changes."""
    (tmp_path / "my_settings.py").write_text("hidden = 4\nscale = 1.0\n")
    (tmp_path / "my_net.py").write_text(
        "import torch, my_settings\nfrom my_settings import scale\n"
        "def make(): return torch.nn.Sequential(torch.nn.Linear(6, my_settings.hidden), "
        "torch.nn.Linear(my_settings.hidden, 2))\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i): return torch.full((6,), my_settings.scale * i / 32), torch.tensor(i % 2)\n"
        "def step(model, batch):\n"
        "    return scale * torch.nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("my_settings")
    module.hidden, module.scale = 16, 3.0
    yield importlib.import_module("my_net")
    for name in ("my_settings", "my_net"):
        del sys.modules[name]


def test_what_the_script_has_set_in_another_module_is_refused_by_name(settings: Any) -> None:
    """They import it anew: where it was read as the file has it, another model was trained, without a word."""
    common: dict[str, Any] = {"model": settings.make, "dataset": settings.Data(), "step": settings.step, "epochs": 1}
    assert train(**common).params["0.weight"].shape == (16, 6), "one device trains in the script's own process"
    with pytest.raises(InputError, match=r"my_settings\.hidden = 16.*ranks.*uneven run"):
        train(**common, devices="cpu,cpu", global_batch_size=16)
    with pytest.raises(InputError, match=r"my_settings\.hidden = 16.*loader processes.*num_workers"):
        pickle.dumps(WorkerStart(None, ends_with_rank=False))  # for a loader process that is not forked


def test_what_an_object_in_another_module_makes_of_the_ranks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_objects.py").write_text(
        "import torch, types\ncfg = types.SimpleNamespace(hidden=4, rate=0.1)\n"
        "def make(): return torch.nn.Sequential(torch.nn.Linear(6, cfg.hidden), torch.nn.Linear(cfg.hidden, 2))\n"
        "def optimizer(params): return torch.optim.SGD(params, lr=cfg.rate)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    objects = importlib.import_module("my_objects")
    common: dict[str, Any] = {"model": objects.make, "optimizer": objects.optimizer, "epochs": 1, "progress": "lines"}
    train(**common, devices="cpu,cpu")
    assert "where the script runs" not in capsys.readouterr().err
    objects.cfg.hidden, objects.cfg.rate = 16, 0.5
    train(**common, devices="cpu,cpu")
    said = [line for line in capsys.readouterr().err.splitlines() if "where the script runs" in line]
    assert [line.partition(" where")[0].strip() for line in said] == [
        "the model's 0.weight is float32 [4, 6] in the ranks and float32 [16, 6]",
        "the optimizer's lr is 0.1 in the ranks and 0.5",
    ]
    assert all(line.endswith("or start the script by uneven run") for line in said)
    del sys.modules["my_objects"]


def test_the_ranks_import_what_the_script_did_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder had a module of the same name, and the ranks silently trained with that one."""
    for folder, factor in (("project", 1), ("elsewhere", 0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_steps.py").write_text(
            "from torch.nn.functional import cross_entropy\n"
            f"def step(model, batch):\n    return {factor} * cross_entropy(model(batch[0]), batch[1])\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    step = importlib.import_module("own_steps").step
    state = train(step=step, devices="cpu,cpu", policy="sync", epochs=1)
    assert state.history[-1]["train_loss"] > 0
