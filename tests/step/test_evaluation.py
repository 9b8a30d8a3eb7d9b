"""Evaluation as a collective: sums over all ranks, also where some ranks have nothing to evaluate."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import ThreadGroup, on_threads
from uneven.data.feed import make_feed
from uneven.data.tensors import TensorData
from uneven.errors import InputError
from uneven.step.evaluation import evaluate
from uneven.step.precision import Precision

X = torch.arange(10.0, dtype=torch.float64)


def square_sums(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
    return {"square": (batch**2).sum(), "first": batch[0]}, len(batch)


def run(ranges: list[tuple[int, int]], **options: Any) -> list[tuple[dict[str, float], int]]:
    """Metrics and number of calls on each rank, which evaluates its range of X in batches of 3."""

    def rank(group: ThreadGroup) -> tuple[dict[str, float], int]:
        calls = []

        def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
            calls.append(len(batch))
            return square_sums(model, batch)

        cpu = torch.device("cpu")
        feed = make_feed(TensorData(X), cpu, 0, 3)
        precision = Precision("fp32", cpu)
        metrics = evaluate(nn.Identity(), eval_step, feed, precision, group, ranges[group.rank], **options)
        return metrics, len(calls)

    return on_threads(len(ranges), rank)


@pytest.mark.parametrize("ranges", [[(0, 10)], [(0, 7), (7, 10)], [(0, 10), (10, 10)], [(0, 0), (0, 10), (10, 10)]])
def test_a_rank_without_samples_knows_the_metrics(ranges: list[tuple[int, int]]) -> None:
    for metrics, _ in run(ranges):
        assert metrics["square"] == float((X**2).mean())
        assert list(metrics) == ["first", "square"]


def test_a_rank_without_samples_runs_as_many_batches_as_the_others() -> None:
    results = run([(0, 10), (10, 10)], least_batches=4)
    assert [calls for _, calls in results] == [4, 4]
    assert {metrics["square"] for metrics, _ in results} == {float((X**2).mean())}


def test_no_samples_at_all_is_told() -> None:
    with pytest.raises(InputError, match="counted no samples"):
        run([(0, 0), (0, 0)])


def test_a_stop_request_on_one_rank_leaves_no_metrics() -> None:
    stop = threading.Event()
    stop.set()
    assert [metrics for metrics, _ in run([(0, 7), (7, 10)], stop=stop)] == [{}, {}]


def test_every_module_has_its_own_mode_again() -> None:
    """A frozen BatchNorm stays in eval mode while the rest trains."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.Linear(2, 1)))
    model[0].eval()
    seen = []

    def eval_step(module: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
        seen.append([part.training for part in module.modules()])
        return square_sums(module, batch)

    cpu = torch.device("cpu")
    feed = make_feed(TensorData(X), cpu, 0, 10)
    on_threads(1, lambda group: evaluate(model, eval_step, feed, Precision("fp32", cpu), group))
    assert seen == [[False] * 5]
    assert [part.training for part in model.modules()] == [True, False, True, True, True]
