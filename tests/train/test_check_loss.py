"""Runs refuse a loss that is a mean over tokens where batches of a step are weighted by samples, and only there.

How such a loss is found is in tests/step/test_token_mean.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.api.starts import BIN, start
from tests.ranks import ROOT
from tests.step.token_models import LENGTHS, Language, contrastive, own_loss, padded, sample_mean
from tests.train.exact_runs import params, train
from uneven import TensorData, fit
from uneven.errors import InputError

MANY = padded(LENGTHS * 6)


def as_batch(rows: tuple[Tensor, ...], keys: Tensor | None) -> dict[str, Tensor]:
    del keys
    return dict(zip(MANY, rows, strict=True))


DATA = TensorData(*MANY.values(), transform=as_batch)


def run(size: int, step: Any = own_loss, **changes: Any) -> Any:
    return train(size, step=step, dataset=DATA, make_model=lambda _: Language(), **{"batch_size": 8, **changes})


def advised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    count = (batch["labels"][:, 1:] != -100).sum()
    return own_loss(model, batch) * count, count


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"policy": "balanced"}),
        (2, {"policy": "sync"}),
        (3, {"shares": (5, 2, 1)}),
        (2, {"strategy": "zero1"}),
        (2, {"strategy": "fsdp"}),
        (1, {"accumulate": 2}),
        (1, {"memory_cap": 3}),
        (2, {"policy": "cadence", "accumulate": 2}),
        (2, {"batch_size": 1}),
    ],
)
def test_a_mean_over_tokens_is_refused_where_batches_of_a_step_are_weighted_by_samples(
    size: int, changes: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"return out\.loss \* count, count.*check_loss=False"):
        run(size, **changes)


class Plain(Language):
    """Without BatchNorm, dropout and attention over padding: one device gives the same params."""

    def __init__(self) -> None:
        super().__init__(is_mapping=True)
        self.norm, self.head[0] = nn.Identity(), nn.Identity()
        self.double()


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"shares": (11, 5)}),
        (3, {"shares": (3, 0, 1)}),
        (2, {"strategy": "zero2", "shares": (2, 1)}),
        (2, {"strategy": "fsdp", "shares": (2, 1)}),
        (1, {"accumulate": 2, "batch_size": 8}),
        (2, {"accumulate": 2, "batch_size": 4, "policy": "sync"}),
    ],
)
def test_a_step_may_return_the_output_itself(size: int, changes: dict[str, Any]) -> None:
    def run(size: int, **changes: Any) -> Any:
        step: Any = lambda model, batch: model(**batch)  # noqa: E731
        return train(size, step=step, dataset=DATA, make_model=lambda _: Plain(), **changes)

    ours = run(size, **{"global_batch_size": 16, **({"batch_size": 16} | changes)})
    dense = run(1, batch_size=16)[0]
    for name, param in params(dense).items():
        torch.testing.assert_close(params(ours[0])[name], param, rtol=1e-10, atol=1e-10)
    assert ours[0].state.history[-1]["train_loss"] == pytest.approx(dense.state.history[-1]["train_loss"])


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"policy": "cadence"}),
        (2, {"policy": "async"}),
        (2, {"check_loss": False}),
        (2, {"step": advised}),
        (2, {"step": sample_mean}),
        (2, {"step": contrastive}),
    ],
)
def test_what_is_right_or_asked_for_trains(size: int, changes: dict[str, Any]) -> None:
    """A step of one whole batch is what it would be in plain PyTorch."""
    run(size, epochs=1, **changes)


def test_what_the_message_says_to_write_is_exact() -> None:
    """A model without dropout and BatchNorm, cut 5 to 3, against one device."""

    class Plain(Language):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.Identity(), nn.Sequential(self.head[1])
            self.double()

    changes: dict[str, Any] = {"step": advised, "dataset": DATA, "make_model": lambda _: Plain(), "epochs": 1}
    alone = params(train(1, batch_size=16, **changes)[0])
    for name, value in params(train(2, batch_size=8, shares=(5, 3), **changes)[0]).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("step", [sample_mean, advised])
def test_a_run_that_is_checked_has_the_bits_of_one_that_is_not(step: Any) -> None:
    """With dropout, whose random numbers would differ, and running statistics."""
    one, other = (run(1, step=step, accumulate=2, check_loss=is_checked)[0].state for is_checked in (True, False))
    for given, expected in ((one.params, other.params), (one.buffers, other.buffers)):
        assert all(torch.equal(value, expected[name]) for name, value in given.items())


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for place in range(len(DATA)):
            yield {name: tensor[place] for name, tensor in MANY.items()}

    def __len__(self) -> int:
        return len(DATA)


@pytest.mark.parametrize(("step", "is_refused"), [(own_loss, True), (sample_mean, False), (advised, False)])
def test_a_stream_is_looked_at_when_its_first_batches_are_trained(step: Any, is_refused: bool) -> None:
    changes: dict[str, Any] = {"dataset": Endless(), "make_model": lambda _: Language(), "shuffle": False, "epochs": 1}
    if not is_refused:
        train(2, step=step, **changes)
        return
    with pytest.raises(InputError, match="mean over tokens"):
        train(2, step=step, **changes)


SCRIPT = """
from tests.train.test_check_loss import DATA, Language, own_loss, sgd
from uneven import Ddp

Ddp.builder(Language, sgd, own_loss).dataset(DATA).batch_size(8).epochs(1).progress("off").run().join()
"""


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_fit_refuses_it_in_the_words_of_rank_0() -> None:
    with pytest.raises(InputError, match=r"rank 0.*out\.loss \* count, count"):
        fit(
            model=Language,
            optimizer=sgd,
            step=own_loss,
            dataset=DATA,
            batch_size=8,
            epochs=1,
            devices="cpu,cpu",
            progress="off",
        )


def test_a_script_of_a_builder_ends_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [BIN / "uneven", "run", "train.py", "--devices", "cpu,cpu", "--shares", "5,3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    refused = start(command, tmp_path, env=environment)
    assert refused.returncode == 2, refused.stderr
    assert "return out.loss * count, count" in refused.stderr
    trained = start([*command, "--no-check-loss"], tmp_path, env=environment)
    assert trained.returncode == 0, trained.stderr
