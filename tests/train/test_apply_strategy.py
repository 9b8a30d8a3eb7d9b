"""Strategies inside the core: whoever holds what, a run ends with the params, state and metrics of one process."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.api.loops import train_loop
from tests.ranks import on_threads
from tests.train.exact_runs import (
    OPTIMIZERS,
    Net,
    X,
    Y,
    assert_exact,
    loss_and_count,
    params,
    train,
)
from tests.train.strategy_tasks import WORDS, Reader, assert_same_optimizer, next_token
from uneven import fit
from uneven.config import REPLICATED, SHARDED, STRATEGIES, Evaluation, resolve
from uneven.data.tensors import TensorData
from uneven.errors import InputError
from uneven.hardware.device import parse_devices
from uneven.launch.checks.preflight import resolve_auto
from uneven.parallel.catalog import make_strategy
from uneven.parallel.reducer import Reducer
from uneven.results.state import TrainedState

BY_SAMPLES = [name for name in STRATEGIES if name not in ("tensor", "sequence")]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"max_grad_norm": 0.1}, "accumulated": {"accumulate": 3},
    "counted": {"step": loss_and_count},
}  # fmt: skip
ADAMW: dict[str, Any] = {
    "optimizer": "adamw",
    "global_batch_size": 24,
    "scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5),
}


@cache
def dense_run(variant: str) -> Any:
    return train(1, **ADAMW, **VARIANTS[variant])[0]


@pytest.mark.parametrize(("size", "variant"), [(2, "plain"), (2, "accumulated"), *((3, name) for name in VARIANTS)])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "sequence"])
def test_equals_one_process(name: str, size: int, variant: str) -> None:
    """Samples by one ratio, bytes by another, a zero in both; a schedule, an unused layer and a tail slot."""
    common = {**ADAMW, **VARIANTS[variant]}
    dense = dense_run(variant)
    if name in BY_SAMPLES:
        common["shares"] = (5, 0, 2)[:size] if size == 3 else (5, 2)
    if name in SHARDED:
        common["memory_shares"] = (1, 3, 0)[:size]
    ours = train(size, strategy=name, **common)
    assert_exact(ours, dense, "adamw", torch.float64)
    assert_same_optimizer(ours[0].state, dense.state)
    assert ours[0].state.history[-1]["train_loss"] == pytest.approx(dense.state.history[-1]["train_loss"], rel=1e-9)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "sequence"])
def test_gradients_outside_the_optimizer_count_in_the_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's clip_grad_norm_ over the model's params does; each step's own, not the sum of all before it."""

    def part(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for param in params if param.shape[0] == 3], lr=0.1, momentum=0.9)

    monkeypatch.setitem(OPTIMIZERS, "part", part)
    common: dict[str, Any] = {"optimizer": "part", "global_batch_size": 24, "max_grad_norm": 0.05}
    dense, ours = train(1, **common)[0], train(2, strategy=name, **common)
    for key, value in dense.state.params.items():
        torch.testing.assert_close(ours[0].state.params[key], value, rtol=1e-10, atol=1e-10)


@cache
def sgd_run() -> Any:
    return train(1, global_batch_size=24, optimizer="sgd")[0]


@pytest.mark.parametrize("policy", ["sync", "balanced"])
@pytest.mark.parametrize("name", BY_SAMPLES)
def test_goes_with_both_exact_policies(name: str, policy: str) -> None:
    """Without shares: bytes go by memory, samples equally or by what is measured as it trains."""
    dense = sgd_run()
    ours = train(3, strategy=name, policy=policy, global_batch_size=24, optimizer="sgd")
    assert_exact(ours, dense, "sgd", torch.float64)


@pytest.mark.parametrize("name", ["fsdp", "tensor", "sequence"])
def test_a_sequence_model_in_pieces(name: str) -> None:
    data = TensorData(torch.randint(0, WORDS, (40, 7), generator=torch.Generator().manual_seed(1)))
    common = {"dataset": data, "step": next_token, "make_model": Reader, "global_batch_size": 12, "optimizer": "sgd"}
    dense = train(1, **common)[0]  # type: ignore[arg-type]
    for result in train(2, strategy=name, memory_shares=(5, 2), **common):  # type: ignore[arg-type]
        for key, value in params(dense).items():
            torch.testing.assert_close(params(result)[key], value, rtol=1e-10, atol=1e-10)


def count_right(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    scores = model(batch[0])
    loss = F.cross_entropy(scores, batch[1], reduction="sum")
    return {"loss": loss, "accuracy": (scores.argmax(1) == batch[1]).sum()}, len(batch[1])


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp", "tensor"])
def test_evaluation_and_checkpoints(name: str, tmp_path: Path) -> None:
    """Ranks have unequal numbers of test batches; a checkpoint is a whole model."""
    test = Evaluation(TensorData(X[:37].double(), Y[:37]), count_right, batch_size=4)
    common: dict[str, Any] = {"global_batch_size": 24, "evaluation": test, "save_every": 1}
    dense = train(1, out=tmp_path / "dense", **common)[0].state
    shares = {} if name == "tensor" else {"shares": (5, 0, 2)}
    ours = train(3, strategy=name, out=tmp_path / "ours", **shares, **common)[0].state
    for mine, theirs in zip(ours.history, dense.history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"])
    saved, expected = (TrainedState.load(tmp_path / one / "epoch-1") for one in ("ours", "dense"))
    for key, value in expected.params.items():
        torch.testing.assert_close(saved.params[key], value, rtol=1e-10, atol=1e-10)
    assert_same_optimizer(saved, expected)


def test_on_processes() -> None:
    """One process each, over Gloo, from `fit` to its state."""

    def trained(**changes: Any) -> TrainedState:
        make_model, data = partial(Net, torch.float64), TensorData(X.double(), Y)
        settings = {"epochs": 2, "seed": 3, "progress": "off", **changes}
        return fit(model=make_model, optimizer=OPTIMIZERS["adamw"], step=loss_and_count, dataset=data, **settings)

    alone = trained(batch_size=24, devices="cpu")
    ours = trained(batch_size=12, devices="cpu,cpu", strategy="fsdp", memory_shares=(5, 2))
    for key, value in alone.params.items():
        torch.testing.assert_close(ours.params[key], value, rtol=1e-10, atol=1e-10)
    assert_same_optimizer(ours, alone)


class Deep(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = Net(dtype)
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for _ in range(8))
        with torch.no_grad():
            for number, param in enumerate(self.blocks.parameters()):
                param.fill_(0.3).mul_(torch.arange(3) + number % 3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"global_batch_size": 8, "shares": (1, 0)}], ids=str)
@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_a_deep_model_trains_where_a_rank_has_no_samples_in_a_step(name: str, settings: dict[str, Any]) -> None:
    """Four steps of 8 samples and one of 1 an epoch, as with a device that never has any."""
    common: dict[str, Any] = {"make_model": Deep, "dataset": TensorData(X[:33].double(), Y[:33])}
    dense = train(1, batch_size=8, **common)[0]
    for result in train(2, strategy=name, policy="sync", **settings, **common):
        for key, value in params(dense).items():
            torch.testing.assert_close(params(result)[key], value, rtol=1e-10, atol=1e-10)


def test_a_device_alone_trains_plainly() -> None:
    assert_exact(train(1, strategy="fsdp", batch_size=24), train(1, batch_size=24)[0], "sgd", torch.float64)


@pytest.mark.parametrize("name", REPLICATED)
def test_a_loop_of_ones_own_takes_what_is_replicated(name: str) -> None:
    dense = train_loop(1, batch_size=24)[0]
    for state in train_loop(2, batch_size=12, strategy=name):
        for key, value in dense.params.items():
            torch.testing.assert_close(state.params[key], value, rtol=1e-10, atol=1e-10)
        assert_same_optimizer(state, dense)


def test_a_loop_of_ones_own_refuses_pieces() -> None:
    with pytest.raises(InputError, match=r"use fit or Ddp\.builder, or one of ddp-flat"):
        train_loop(2, strategy="fsdp")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "zero3"}, "must be one of ddp-flat, ddp-bucketed"),
        ({"strategy": "fsdp", "policy": "async"}, "every device trains a replica of its own"),
        ({"memory_shares": (1, 2)}, "nothing to divide"),
        ({"strategy": "ddp-flat", "memory_shares": (1, 2)}, "nothing to divide"),
        ({"strategy": "fsdp", "memory_shares": (0, 0)}, "not all 0"),
        ({"strategy": "fsdp", "memory_shares": (1, 2, 3)}, "3 entries for 2 devices"),
        ({"redundancy": 1}, "redundancy=1 keeps copies of shards, and strategy=None shards nothing"),
        ({"strategy": "tensor", "redundancy": 1}, "use one of zero1, zero1-flat, zero2, fsdp, or leave it out"),
        ({"strategy": "fsdp", "redundancy": 2}, "redundancy=2"),
        ({"strategy": "zero1", "redundancy": 1, "memory_shares": (1, 0)}, "a second device"),
        ({"strategy": "fsdp", "precision": "fp16"}, "use 'bf16'"),
        ({"strategy": "zero2", "sync_batchnorm": True}, "use 'zero1'"),
        ({"strategy": "fsdp", "compile": "default"}, "use 'off'"),
        ({"strategy": "zero1", "compile": "graph"}, "whole params"),
        ({"strategy": "tensor", "shares": (1, 2)}, "the same samples"),
        ({"strategy": "tensor", "memory_cap": 3}, "the same samples"),
    ],
)
def test_what_does_not_go_together_is_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve_auto(resolve({"batch_size": 8, "epochs": 1, **settings}), parse_devices("cpu,cpu"))


class Dropping(Reader):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.drop = nn.Dropout(0.1)


def test_dropout_and_a_missing_plan_are_told() -> None:
    with pytest.raises(InputError, match="drop drops elements at random"):
        train(2, strategy="tensor", make_model=Dropping)
    with pytest.raises(InputError, match="tensor_plan"):
        train(2, strategy="tensor", make_model=lambda dtype: nn.Linear(6, 3).to(dtype))


def test_every_name_has_its_place() -> None:
    assert set(REPLICATED) | set(SHARDED) == set(STRATEGIES)


@pytest.mark.parametrize("name", [None, *REPLICATED])
def test_fit_runs_the_reducer_that_the_benchmarks_measure(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both make it by one function: the same buckets, sent in the same way; once it was 4 MB here and 25 MB there."""
    made: list[tuple[list[list[int]], bool]] = []
    build = Reducer._build_buckets

    def listen(self: Reducer) -> None:
        build(self)
        made.append(([[param.numel() for param in bucket.params] for bucket in self.buckets], self.overlap))

    monkeypatch.setattr(Reducer, "_build_buckets", listen)
    on_threads(2, lambda group: make_strategy(name or "ddp-bucketed", Net(torch.float64), OPTIMIZERS["sgd"], group))
    measured, made[:] = list(made), []
    train(2, strategy=name, shares=(1, 1))
    assert made == measured


def test_bucket_mb_reaches_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    build = Reducer._build_buckets

    def listen(self: Reducer) -> None:
        build(self)
        seen.append(len(self.buckets))

    monkeypatch.setattr(Reducer, "_build_buckets", listen)
    one, each = train(2, shares=(1, 1))[0], train(2, shares=(1, 1), bucket_mb=1e-6)[0]
    assert seen == [1, 1, *[len(list(Net(torch.float64).parameters()))] * 2]
    for key, value in params(one).items():
        torch.testing.assert_close(params(each)[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activations": "some"}, "must be one of keep, recompute, offload, auto"),
        ({"activations": "recompute", "compile": "graph"}, "use compile='off'"),
        ({"activations": "auto", "sync_batchnorm": True}, "sync_batchnorm=True"),
        ({"activations": "auto", "strategy": "tensor"}, "use 'recompute'"),
        ({"bucket_mb": -1}, "bucket_mb=-1 must be a number"),
        ({"bucket_mb": 1, "strategy": "ddp-flat"}, "leave it out"),
        ({"bucket_mb": 1, "policy": "async"}, "leave it out"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve({"batch_size": 4, "epochs": 1, **settings})
