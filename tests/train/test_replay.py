"""A run repeated from its log: bit-equal on CPU whatever the speeds were, and refused where it is another run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from uneven import Ddp, InputError, TensorData, TrainedState, fit
from uneven.policy.axis import Axis
from uneven.policy.exact import Balanced, Move
from uneven.policy.recorded import RecordedShares

generator = torch.Generator().manual_seed(0)
X = torch.randn(150, 6, generator=generator)
Y = torch.randint(0, 3, (150,), generator=generator)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_model_on_changing_devices() -> nn.Module:
    """In a rank: from slot 14 on the policy is shown times in which rank 1 needs eight times as long per sample.

    Not a rank that is slow in truth: on a busy machine nobody knows who is.
    """
    true_note = Balanced.note

    def note(policy: Balanced, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        slow = 8.0 if slot >= 14 else 1.0
        shares = policy.shares(slot, samples)
        return true_note(policy, slot, samples, [1.0 + shares[0], 1.0 + slow * shares[1]])

    Balanced.note = note  # type: ignore[method-assign]
    return make_model()


def train(**changes: Any) -> TrainedState:
    settings: dict[str, Any] = {
        "model": make_model,
        "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2),
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "dataset": TensorData(X, Y),
        "batch_size": 16,
        "epochs": 5,
        "seed": 4,
        "progress": "off",
    }
    return fit(**{**settings, **changes})


def test_a_replay_of_moving_shares_is_bit_equal(tmp_path: Path) -> None:
    first = train(model=make_model_on_changing_devices, devices="cpu,cpu", out=tmp_path / "run")
    shares = list(zip(*([part[2] for part in log] for log in first.log), strict=True))
    assert len({pair for pair in shares if sum(pair) == 32}) > 1, f"the shares never moved: {shares}"
    again = train(devices="cpu,cpu", replay=tmp_path / "run", out=tmp_path / "again")
    assert again.log == first.log
    for name, value in {**first.params, **first.buffers}.items():
        assert torch.equal({**again.params, **again.buffers}[name], value), name
    assert (tmp_path / "again" / "log.json").read_bytes() == (tmp_path / "run" / "log.json").read_bytes()
    assert json.loads((tmp_path / "again" / "state.json").read_text())["config"]["replay"] == str(tmp_path / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    train(devices="cpu", out=folder)
    return folder


def test_one_device_replays_too(run: Path) -> None:
    again = train(devices="cpu", replay=run)
    first = TrainedState.load(run)
    assert all(torch.equal(again.params[name], value) for name, value in first.params.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": "cpu,cpu"}, ("devices 1", "this one 2")),
        ({"epochs": 4}, ("epochs 5", "this one 4", "pass epochs=5")),
        ({"seed": 5}, ("seed 4", "this one 5")),
        ({"batch_size": 8}, ("batch_size 16", "pass batch_size=16")),
        ({"accumulate": 2}, ("accumulate 1",)),
        ({"global_batch_size": 20}, ("global_batch_size None", "this one 20")),
        ({"memory_cap": 8}, ("memory_cap None", "this one 8")),
        ({"max_grad_norm": 1.0}, ("max_grad_norm None",)),
        ({"dataset": TensorData(X[:149], Y[:149])}, ("samples in the data set 150", "149")),
        ({"shares": (1,)}, ("leave shares out",)),
    ],
)
def test_another_run_is_refused_before_it_starts(run: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        train(**{"devices": "cpu", "replay": run, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no log.json"),
        ("{", "not the log of a run"),
        ('{"ranks": []}', "not the log of a run"),
    ],
)
def test_a_folder_without_a_log_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "log.json").write_text(content)
    with pytest.raises(InputError, match=words):
        train(devices="cpu", replay=tmp_path)


@pytest.mark.parametrize(("key", "words"), [("slots", "stopped after 49 of 50"), ("ranks", "left out")])
def test_an_unfinished_or_damaged_log_is_refused(run: Path, tmp_path: Path, key: str, words: str) -> None:
    record = json.loads((run / "log.json").read_text())
    if key == "slots":
        record["slots"] -= 1
    else:
        record["ranks"][0].pop(7)
    (tmp_path / "log.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=words):
        train(devices="cpu", replay=tmp_path)


def test_the_run_to_be_replayed_is_not_moved_aside(run: Path) -> None:
    with pytest.raises(InputError, match="would be moved aside"):
        train(devices="cpu", replay=run, out=run)


def test_the_builder_has_it_too(run: Path) -> None:
    builder = Ddp.builder(nn.Identity, torch.optim.SGD, lambda *_: None).dataset(TensorData(X, Y)).replay(run)
    with pytest.raises(InputError, match="epochs 5"):
        builder.settings(batch_size=16, epochs=1, seed=4, devices="cpu", progress="off").run()


def test_the_policy_looks_up_and_never_decides() -> None:
    plan = ((3, 1), (0, 4), (1, 0))
    policy = RecordedShares(plan)
    axis = Axis(samples=9, slot_size=4, epochs=1)
    assert [policy.shares(slot.index, slot.samples) for slot in axis.slots()] == list(plan)
    assert policy.note(0, 4, [1.0, 100.0]) is None
    assert policy.shares(3, 4) == (1, 0)
    assert (
        policy.fingerprint()
        == RecordedShares(plan).fingerprint()
        != RecordedShares(((3, 1), (1, 3), (1, 0))).fingerprint()
    )
