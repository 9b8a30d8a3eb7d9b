import json
from pathlib import Path
from typing import Any

import pytest
import torch

from uneven import InputError, TrainedState
from uneven.bench import modes
from uneven.bench.modes import Mode, resolve_mode
from uneven.bench.orders import Order
from uneven.bench.single.run import make_config, run_single


def test_modes_name_devices_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "available_cores", lambda: (0, 1, 2, 3))
    assert resolve_mode("solo-0", None) == Mode("solo-0", "auto")
    assert resolve_mode("solo-0", "cuda:1") == Mode("solo-0", "cuda:1")
    assert resolve_mode("solo-1", None) == Mode("solo-1", "cpu@0.4", cores=(2, 3))
    assert resolve_mode("solo-0", "cpu,cpu@0.4") == Mode("solo-0", "cpu", cores=(0, 1))
    assert resolve_mode("cpu-sync", None) == Mode("cpu-sync", "cpu,cpu@0.4", "sync", "cpu")
    assert resolve_mode("cpu-balanced", "cpu,cpu,cpu") == Mode("cpu-balanced", "cpu,cpu,cpu", "balanced", "cpu")
    pair = "cuda:0,cuda:1"
    assert resolve_mode("nccl-async", pair) == Mode("nccl-async", pair, "async", "nccl")
    for devices in ("cpu", pair):
        assert resolve_mode("sync", devices) == Mode("sync", devices, "sync", is_own_loop=True)
    assert resolve_mode("sync", None).devices == "cpu,cpu@0.4"
    assert resolve_mode("torch-ddp", None) == Mode("torch-ddp", "cpu,cpu@0.4", "sync", is_torch_ddp=True)


@pytest.mark.parametrize(
    ("name", "devices", "words"),
    [
        ("fast", None, "solo-N, sync, cpu-sync, cpu-balanced, cpu-cadence, cpu-async, nccl-sync, .*, torch-ddp"),
        ("solo-2", "cpu,cpu", "needs 3 devices"),
        ("cpu-balanced", "cpu", "at least two devices"),
        ("solo-0", "gpu", "device 'gpu'"),
    ],
)
def test_a_wrong_mode_says_what_there_is(name: str, devices: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve_mode(name, devices)


def test_torch_ddp_and_ours_train_the_same_model(tmp_path: Path) -> None:
    """The thing to beat is in the same harness: same batches, same steps, a short last slot of unequal parts.

    Through Ddp.setup the model is the same bit by bit, and the folder has the same files.
    """
    order: dict[str, Any] = {"model": "mlp", "data": "mnist-mini", "epochs": 1, "samples": 325, "batch_size": 32}
    states, files = [], []
    for mode in ("torch-ddp", "cpu-sync", "sync"):
        summary = run_single(Order(**order, mode=mode, devices="cpu,cpu", out=tmp_path, progress="off", repeat=False))
        assert summary.samples == 325
        assert sum(summary.sample_shares) == pytest.approx(1)
        folder = tmp_path / "mlp" / mode / "seed-0"
        states.append(TrainedState.load(folder))
        files.append({path.name for path in folder.iterdir()})
    # PyTorch's DDP waits inside backward: its lanes show it, or a page could not.
    accounts = json.loads((tmp_path / "mlp" / "torch-ddp" / "seed-0" / "timeline.json").read_text())["accounts"]
    assert all(account["seconds"]["wait"] > 0 for account in accounts)
    for name, value in states[0].params.items():
        torch.testing.assert_close(value, states[1].params[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(states[1].params[name], states[2].params[name])
    assert files[0] == files[1] == files[2]


def test_the_policy_of_an_own_loop_is_the_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modes.OWN_LOOP, "setup-balanced", ("balanced", "cpu"))
    order = Order(model="logistic", data="mnist-mini", mode="setup-balanced", devices="cpu,cpu")
    assert make_config(order, resolve_mode(order.mode, order.devices)).policy == "balanced"
