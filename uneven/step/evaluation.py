"""Evaluation, a collective: each rank evaluates its own range of the data set, and sums and counts are all-reduced."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.config import ENTRY_KEYS, EvalStep
from uneven.data.feed import Feed
from uneven.errors import InputError
from uneven.step.loss import describe, is_number
from uneven.step.precision import Precision

WANTED = "it must return (sums by name, count), as in ({'correct': (scores.argmax(1) == y).sum()}, len(y))"


def evaluate(
    model: nn.Module,
    eval_step: EvalStep,
    feed: Feed,
    precision: Precision,
    group: Group,
    own: tuple[int, int | None] = (0, None),
    stop: threading.Event | None = None,
    least_batches: int = 0,
) -> dict[str, float]:
    """Metrics over a whole data set, of which this rank evaluates the range `own`.

    A metric is its sum over all ranks divided by the count over all ranks. A stop request on any rank ends evaluation
    early, and then there are no metrics. A rank without samples learns the metrics' names from the others.
    `least_batches` is for models with collectives in forward: a rank with fewer batches repeats one, without counting
    it.
    """
    sums: dict[str, Any] = {}
    total = 0
    with _in_eval_mode(model), torch.no_grad(), precision.region():
        batches = 0
        for batch, _ in feed.in_order(*own):
            batches += 1
            parts, count = read_metrics(eval_step(model, batch))
            for name, value in parts.items():
                sums[name] = sums.get(name, 0) + value
            total += count
            if stop is not None and stop.is_set():
                break
        for _ in range(least_batches - batches):
            if not batches:
                batch, batches = next(iter(feed.in_order(0, 1)))[0], 1
            eval_step(model, batch)
    is_stopped = stop is not None and stop.is_set()
    own_sums = {name: float(value) for name, value in sums.items()}
    rows = gather_json(group, [own_sums, float(total), is_stopped])
    if any(was_stopped for _, _, was_stopped in rows):
        return {}
    count = sum(own_count for _, own_count, _ in rows)
    if not count:
        raise InputError(f"the eval step counted no samples: {WANTED}")
    names = sorted({name for named, _, _ in rows for name in named})
    return {name: sum(named.get(name, 0.0) for named, _, _ in rows) / count for name in names}


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module has its own mode again afterwards: a frozen BatchNorm stays in eval mode while others train."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def monitored(metrics: Mapping[str, float], name: str | None) -> str:
    """The metric to follow: `name`, else 'loss' or the only one; InputError, on all ranks, where it is not clear."""
    if name is None:
        name = "loss" if "loss" in metrics else next(iter(metrics)) if len(metrics) == 1 else None
    if name is None or name not in metrics:
        unclear = "a ReduceLROnPlateau, or keep_best=..., needs one metric to follow"
        what = unclear if name is None else f"monitor={name!r}"
        raise InputError(f"{what}: the evaluation has {', '.join(metrics)}; pass monitor='{min(metrics)}', for example")
    return name


def name_clash(names: Iterable[str]) -> InputError:
    """For numbers that the user's loop logs under the names of evaluated metrics: one would replace the other."""
    first = min(names)
    return InputError(f"ddp.log({first}=...): the evaluation has a metric of that name; choose another, or rename it")


def read_metrics(result: Any) -> tuple[Mapping[str, Any], Any]:
    """What an eval step returned: sums by name, and a count; InputError in one line for anything else."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Mapping):
        raise InputError(f"the eval step returned {describe(result)}; {WANTED}")
    sums, count = result
    if not is_number(count):
        raise InputError(f"the eval step returned the count {describe(count)}; {WANTED}")
    for name, value in sums.items():
        if not is_number(value):
            raise InputError(f"the eval step returned {describe(value)} as {name!r}, not one number; {WANTED}")
        if name in ENTRY_KEYS:
            raise InputError(f"the eval step returned a metric {name!r}, which an epoch's entry has already: rename it")
    return sums, count
