"""Solo training end to end, every parameter against a plain PyTorch loop."""

import contextlib
import doctest
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.forked import ForkedPopen, run_forked
from tests.launch.small_runs import X, Y, eval_step, make_net, momentum, train, train_step
from uneven import Ddp, InputError, MachineError, TensorData, TrainedState
from uneven.data.sample_order import permutation
from uneven.launch.context import ProcessContext

torch.manual_seed(0)


def equal(a: TrainedState, b: TrainedState) -> bool:
    tensors_a, tensors_b = {**a.params, **a.buffers}, {**b.params, **b.buffers}
    return tensors_a.keys() == tensors_b.keys() and all(
        torch.equal(value, tensors_b[name]) for name, value in tensors_a.items()
    )


def test_equals_a_plain_loop_bit_for_bit() -> None:
    """Tail batch, BatchNorm, dropout, momentum, scheduler: nothing is added to plain PyTorch.

    A scheduler counts the tail as a step: by samples StepLR would be late by one after a few epochs.
    """
    state = train(scheduler=lambda optimizer: StepLR(optimizer, 5, gamma=0.5))
    torch.manual_seed(7)
    model = make_net()
    optimizer = momentum(model.parameters())
    scheduler = StepLR(optimizer, 5, gamma=0.5)
    samples = 0
    for epoch in range(3):
        for indices in torch.from_numpy(permutation(7, epoch, 100)).split(16):
            optimizer.zero_grad()
            train_step(model, (X[indices], Y[indices])).backward()
            optimizer.step()
            scheduler.step()
            samples += len(indices)
    assert state.samples == samples == 300
    for name, value in model.state_dict().items():
        assert torch.equal({**state.params, **state.buffers}[name], value), name


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    assert equal(train(), train())
    assert not equal(train(), train(seed=8))


def test_the_data_set_may_be_tensors_or_any_map_style_set() -> None:
    assert equal(train(), train(dataset=list(zip(X, Y, strict=True))))
    assert equal(train(), train(dataset=list(zip(X, Y, strict=True)), num_workers=2))


def test_accumulation_equals_the_big_batch() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    data = TensorData(X.double(), Y)
    big = train(model=net, dataset=data, batch_size=32, max_grad_norm=0.3)
    small = train(model=net, dataset=data, batch_size=8, accumulate=4, max_grad_norm=0.3)
    for name, value in big.params.items():
        torch.testing.assert_close(small.params[name], value, rtol=1e-10, atol=1e-12)


def test_builder_and_fit_are_the_same_road(tmp_path: Path) -> None:
    run = (
        Ddp.builder(make_net, momentum, train_step)
        .dataset(TensorData(X, Y))
        .batch_size(16)
        .num_epochs(3)
        .policy("async")
        .backend("auto")
        .devices("cpu")
        .seed(7)
        .accumulate(1)
        .precision("fp32")
        .compile("off")
        .num_workers(0)
        .max_grad_norm(None)
        .save_every(2)
        .out(tmp_path / "run")
        .progress("off")
        .run()
    )
    assert equal(run.join(), train())
    assert equal(TrainedState.load(tmp_path / "run"), train())
    assert equal(TrainedState.load(tmp_path / "run" / "epoch-2"), train(epochs=2))


def test_history_evaluation_and_accounting() -> None:
    state = train(evaluate=(TensorData(X, Y), eval_step))
    assert [entry["epoch"] for entry in state.history] == [1, 2, 3]
    assert [entry["samples"] for entry in state.history] == [100, 200, 300]
    with torch.no_grad():
        model = state.load_into(make_net()).eval()
        accuracy = (model(X).argmax(1) == Y).float().mean().item()
    assert state.history[-1]["accuracy"] == pytest.approx(accuracy)
    assert state.timeline is not None
    account = state.timeline.accounts[0]
    assert sum(account.shares.values()) == pytest.approx(1)
    assert account.seconds["evaluation"] > 0
    assert state.history[-1]["train_seconds"] <= account.training_s
    assert [event.kind for event in state.timeline.events] == ["ready", *["epoch"] * 3]


def test_evaluation_does_not_disturb_training() -> None:
    assert equal(train(), train(evaluate=(TensorData(X, Y), eval_step)))


def test_evaluate_every_two_epochs_and_always_at_the_end() -> None:
    state = (
        Ddp.builder(make_net, momentum, train_step)
        .dataset(TensorData(X, Y))
        .evaluate(TensorData(X, Y), eval_step, every=2, batch_size=7)
        .settings(batch_size=50, epochs=5, devices="cpu", progress="off")
        .run()
        .join()
    )
    assert ["accuracy" in entry for entry in state.history] == [False, True, False, True, True]


def test_bf16_autocast_trains_params_that_stay_fp32() -> None:
    state = train(precision="bf16")
    assert all(value.dtype == torch.float32 for value in state.params.values())
    assert not equal(state, train())


def test_an_error_in_the_train_step_reaches_the_caller_with_its_traceback() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("in the user's step")

    with pytest.raises(ZeroDivisionError, match="user's step") as caught:
        train(step=broken)
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_stop_ends_after_the_current_step_with_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a run that stops is saved in ./runs
    seen = threading.Event()
    release = threading.Event()

    def slow_step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.set()
        release.wait(100)
        return train_step(model, batch)

    run = (
        Ddp.builder(make_net, momentum, slow_step)
        .dataset(TensorData(X, Y))
        .settings(batch_size=16, epochs=3, devices="cpu", progress="off", seed=7)
        .run()
    )
    assert seen.wait(100)
    run.stop()
    release.set()
    state = run.join()
    assert not state.finished
    assert state.slot == 1
    assert state.samples == 16


SCRIPT = """
import sys, torch
from uneven import fit
def step(model, batch):
    print("step", flush=True)
    sys.stdin.readline()  # the test says when to go on
    return model(batch).mean()
fit(model=lambda: torch.nn.Linear(2, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), step=step,
    dataset=torch.zeros(64, 2), batch_size=4, epochs=9, devices="cpu")
"""


def test_ctrl_c_saves_a_state_that_loads(tmp_path: Path) -> None:
    child = ForkedPopen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline() == "step\n"
        child.stdin.write("\n")
        child.stdin.flush()
    assert child.stdout.readline() == "step\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate("\n" * 50, timeout=150)
    assert child.returncode in (-signal.SIGINT, 130), errors
    (folder,) = (tmp_path / "runs").iterdir()
    state = TrainedState.load(folder)
    assert not state.finished
    assert state.slot >= 4
    name = f"runs/{folder.name}"
    assert f"stopped after {state.slot} steps; the state is in {name}; go on with resume='{name}'" in errors
    assert state.params["weight"].isfinite().all()


def test_a_caller_that_never_joins_ends_cleanly(tmp_path: Path) -> None:
    script = """
import threading, torch
from uneven import Ddp
training = threading.Event()
def step(model, batch):
    training.set()
    return model(batch).mean()
Ddp.builder(lambda: torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), step).dataset(
    torch.zeros(64, 2)).settings(batch_size=4, epochs=10**6, devices="cpu", progress="off").run()
assert training.wait(60)
"""
    done = run_forked([sys.executable, "-c", script], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    child = ForkedPopen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "step\n"
    # The step now waits for stdin and never ends by itself. Signals of one kind merge while pending, so
    # send them until the process is gone: one of the later ones is the second.
    for _ in range(1500):
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
            break
    child.kill()
    child.communicate()
    assert child.returncode == 130


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": "cuda:9"}, ("cuda:9", "uneven devices")),
        ({"devices": "cpu@0"}, ("cpu@0",)),
        ({"devices": "cpu%50"}, ("cpu%50",)),
        ({"devices": "cpu,cpu@0.4", "policy": "async", "shares": (5, 2)}, ("policy='async'", "'cadence'")),
        ({"devices": "cpu,cpu", "policy": "async", "sync_batchnorm": True}, ("sync_batchnorm", "'balanced'")),
        ({"devices": "cpu,cpu", "shares": (1, 2, 3)}, ("3 entries for 2 devices",)),
        ({"devices": "cpu,cpu", "shares": (1, 2), "policy": "sync"}, ("shares=(1.0, 2.0)", "sync shares equally")),
        ({"devices": "cpu,cpu", "min_ranks": 3}, ("min_ranks=3 is above the number of devices, 2", "cpu,cpu")),
        ({"devices": "cpu,cpu", "backend": "nccl"}, ("backend='nccl'", "'auto'")),
        ({"compile": "graph"}, ("compile='graph'", "'off'")),
    ],
)
def test_a_run_that_cannot_start_says_why_before_it_starts(changes: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        train(**changes)
    assert all(word in str(caught.value) for word in words)


def test_an_unwritable_out_folder_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write to"):
        train(out=tmp_path / "file" / "run", step=lambda *_: os.abort())


def test_a_simulated_device_trains_the_same_bits() -> None:
    assert equal(train(epochs=1), train(epochs=1, devices="cpu@0.5"))


def test_one_epoch_is_not_several(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress="lines", epochs=1)
    assert "100 samples, 1 epoch of 7 steps" in capsys.readouterr().err


def test_the_configuration_and_each_epoch_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress="lines")
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0].startswith("uneven ")
    assert "100 samples, 3 epochs of 7 steps" in lines[0]
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1/3", "2/3", "3/3"]
    # A line about interference may follow on a busy machine.
    (trained,) = (at for at, line in enumerate(lines) if line.startswith("trained 300 samples"))
    assert "compute" in lines[trained + 1]


def test_metrics_come_epoch_by_epoch_and_callbacks_hear_the_same() -> None:
    heard: list[dict[str, Any]] = []
    run = (
        Ddp.builder(make_net, momentum, train_step)
        .dataset(TensorData(X, Y))
        .evaluate(TensorData(X, Y), eval_step)
        .on_epoch(heard.append)
        .settings(batch_size=16, epochs=3, devices="cpu", progress="off")
        .run()
    )
    seen = list(run.metrics())
    assert seen == heard == run.join().history
    assert [entry["epoch"] for entry in seen] == [1, 2, 3]


def test_what_a_callback_raises_ends_the_run() -> None:
    def enough(entry: dict[str, Any]) -> None:
        raise ValueError(f"epoch {entry['epoch']} is enough")

    builder = Ddp.builder(make_net, momentum, train_step).dataset(TensorData(X, Y)).on_epoch(enough)
    run = builder.settings(batch_size=16, epochs=3, devices="cpu", progress="off").run()
    assert list(run.metrics()) == []
    with pytest.raises(ValueError, match="epoch 1 is enough"):
        run.join()


@pytest.mark.parametrize("name", ["uneven.api.fit", "uneven.data.tensors", "uneven.graph.flow"])
def test_the_examples_of_the_public_names_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_wish_for_a_checkpoint_reaches_the_worker_and_needs_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[Any] = []
    make = ProcessContext.make_worker

    def note(*given: Any, **named: Any) -> Any:
        workers.append(make(*given, **named))
        return workers[-1]

    monkeypatch.setattr(ProcessContext, "make_worker", note)
    seen, release = threading.Event(), threading.Event()

    def slow_step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.set()
        release.wait(100)
        return train_step(model, batch)

    builder = Ddp.builder(make_net, momentum, slow_step).dataset(TensorData(X, Y))
    builder.settings(batch_size=16, epochs=1, devices="cpu", progress="off")
    run = builder.out(tmp_path / "run").run()
    assert seen.wait(100)
    run.checkpoint()
    assert workers[0].requests.save.is_set()
    release.set()
    run.join()
    run = builder.out(None).run()
    with pytest.raises(InputError, match="needs a folder to write to: add out="):
        run.checkpoint()
    run.join()
