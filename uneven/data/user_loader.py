"""The user's own data pipeline: what `dataset=`, `collate_fn=`, `sampler=` and `batch_sampler=` mean together.

A DataLoader is taken apart: its data set, collate_fn, order and workers are used, and its batch size, drop_last,
shuffle and num_workers become settings. Called by the entry points before the settings are resolved. What cannot be
kept is refused in one line.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from uneven.config import LOCAL_POLICIES, EvalStep, Evaluation, Loading
from uneven.data.epoch_order import DrawnOrder, random_states_preserved
from uneven.data.tensors import TensorData, is_gathered
from uneven.errors import InputError


class Pipeline(NamedTuple):
    """A data set, how it is read, and the settings with those that came with a DataLoader."""

    dataset: Any
    loading: Loading
    settings: dict[str, Any]


def take_apart(
    dataset: Any, loading: Loading, settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Pipeline:
    """The pipeline of a training set. `overrides` come from the command line: they replace what a DataLoader says."""
    found = {**settings}
    if isinstance(dataset, DataLoader):
        dataset, loading, found = _from_loader(dataset, loading, found)
    for name, sampler in (("sampler", loading.sampler), ("batch_sampler", loading.batch_sampler)):
        _check_sampler(name, sampler)
    if loading.collate_fn is not None and not callable(loading.collate_fn):
        raise InputError(
            f"collate_fn={loading.collate_fn!r} must be a function that makes a batch of a list of samples"
        )
    if loading.sampler is not None and loading.batch_sampler is not None:
        raise InputError("sampler= and batch_sampler= are both given: each decides the order alone; leave one out")
    if loading.batch_sampler is not None:
        found = _settings_of_batches(dataset, loading, found, overrides or {})
    elif loading.sampler is not None:
        if found.get("shuffle"):
            raise InputError("shuffle=True with sampler=: the sampler decides the order; leave shuffle out")
        found["shuffle"] = False
    return Pipeline(dataset, loading, found)


def take_test_set(
    test_set: Any,
    eval_step: EvalStep,
    every: int | str,
    batch_size: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    train_collate_fn: Callable[[list[Any]], Any] | None,
) -> Evaluation:
    """The evaluation of a data set or DataLoader.

    `train_collate_fn`, as given for the training set, serves a test set without any; never a DataLoader, which says
    itself how it is collated: the function may augment (test_a_loaders_collate_is_its_own).
    Sums over a test set do not depend on the order, so it is read in the data set's own; a sampler decides which
    samples belong to it.
    """
    if not isinstance(test_set, DataLoader):
        collate_fn = collate_fn or (None if isinstance(test_set, TensorData) else train_collate_fn)
        return Evaluation(test_set, eval_step, every, batch_size, Loading(collate_fn=collate_fn))
    own_size = {} if batch_size is None else {"batch_size": batch_size}
    dataset, found, settings = _from_loader(test_set, Loading(collate_fn=collate_fn), own_size)
    size: int = settings.get("batch_size", 1)
    indices: Any = None
    if found.sampler is not None or found.batch_sampler is not None:
        order = DrawnOrder(found, _length(dataset), seed=0)
        indices = order.indices(0).tolist()
        if order.is_batches:
            size = max(stop - first for first, stop in pairwise(order.offsets(0)))
    if settings.get("drop_last"):
        indices = range(len(dataset)) if indices is None else indices
        indices = list(indices[: len(indices) // size * size])
    if indices is not None:
        dataset = _subset(dataset, indices)
    own = replace(found, sampler=None, batch_sampler=None)
    return Evaluation(dataset, eval_step, every, size, own, settings.get("num_workers", 0))


def _from_loader(loader: "DataLoader[Any]", loading: Loading, settings: dict[str, Any]) -> Pipeline:
    dataset: Any = loader.dataset
    _check_reading(loader)
    if loader.multiprocessing_context is not None:
        raise InputError(
            "DataLoader(multiprocessing_context=...): uneven starts loader processes itself, in a rank from a process "
            "without threads; leave it out"
        )
    if not getattr(loader, "in_order", True):
        raise InputError("DataLoader(in_order=False): batches are trained in the order of the epoch; leave it out")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if collate is not None and loading.collate_fn is not None and collate is not loading.collate_fn:
        raise InputError("collate_fn= is given beside a DataLoader that has its own collate_fn; leave one out")
    for name in ("sampler", "batch_sampler"):
        if getattr(loading, name) is not None:
            raise InputError(f"{name}= is given beside a DataLoader: give it to the DataLoader, or pass its data set")
    own = Loading(
        collate_fn=collate or loading.collate_fn,
        generator=loader.generator,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        timeout=float(loader.timeout),
    )
    # A BatchSampler that the user has written out says no more than batch_size, sampler and drop_last do.
    is_written_out = loader.batch_size is None and type(loader.batch_sampler) is BatchSampler
    source: Any = loader.batch_sampler if is_written_out else loader
    sampler = source.sampler
    batch_size: int | None = source.batch_size
    _take_setting(settings, "num_workers", loader.num_workers or None)
    if batch_size is None and loader.batch_sampler is not None:
        return Pipeline(dataset, replace(own, batch_sampler=loader.batch_sampler), settings)
    if batch_size is None:
        raise InputError(
            "DataLoader(batch_size=None): there the data set makes whole batches, which cannot be shared out over "
            "devices; let it return single samples and give a batch_size"
        )
    _take_setting(settings, "batch_size", batch_size)
    _take_setting(settings, "drop_last", source.drop_last or None)
    if isinstance(dataset, IterableDataset):
        return Pipeline(dataset, own, settings)
    if type(sampler) is SequentialSampler and getattr(sampler, "data_source", None) is dataset:
        _take_setting(settings, "shuffle", False)
    elif _is_plain_shuffle(sampler, dataset):
        _take_setting(settings, "shuffle", True)
    else:
        own = replace(own, sampler=sampler)
    return Pipeline(dataset, own, settings)


def _check_reading(loader: "DataLoader[Any]") -> None:
    """InputError for a subclass that makes its batches itself: that part of it would be left out in silence."""
    kind = type(loader)
    is_own = kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
    if is_own and not kind.__module__.startswith("torchdata."):  # its StatefulDataLoader gives the same batches
        raise InputError(
            f"{kind.__name__} is a DataLoader that iterates in its own way, which would be left out: change batches in "
            "the data set or in collate_fn, and pass a DataLoader"
        )
    dataset: Any = loader.dataset
    if loader.batch_sampler is not None and callable(getattr(dataset, "__getitems__", None)) and _length(dataset):
        with random_states_preserved():
            found = dataset.__getitems__([0])
        if not isinstance(found, list | tuple) or len(found) != 1:
            raise InputError(
                f"{type(dataset).__name__}.__getitems__ makes whole batches ({type(found).__name__}), and samples are "
                "read one by one here, so that what each draws depends on its place alone: pass the data set itself, "
                "batch_size, and a collate_fn that makes a batch of a list of samples"
            )


def _take_setting(settings: dict[str, Any], name: str, value: Any) -> None:
    """Take a setting from the DataLoader; InputError where the caller gave another value."""
    if value is None:
        return
    if settings.setdefault(name, value) != value:
        raise InputError(
            f"{name}={settings[name]!r} and DataLoader({name}={value!r}): two values for one setting; leave {name}= "
            "out, or make them equal"
        )


def _is_plain_shuffle(sampler: Any, dataset: Any) -> bool:
    """Whether it is DataLoader(shuffle=True) without a generator: then the order is ours, by (seed, epoch)."""
    if type(sampler) is not RandomSampler or sampler.generator is not None or sampler.data_source is not dataset:
        return False
    return not sampler.replacement and sampler.num_samples == len(dataset)


def _check_sampler(name: str, sampler: Any) -> None:
    if sampler is None:
        return
    for one in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if any(
            hasattr(one, a) and hasattr(one, b)
            for a, b in (("num_replicas", "rank"), ("num_processes", "process_index"))
        ):
            raise InputError(
                f"{name} {type(one).__name__} divides the samples over ranks, and uneven does that itself, by speed; "
                "leave it out (use shuffle=True), or pass the sampler that it wraps"
            )
    if isinstance(sampler, Iterator):
        raise InputError(
            f"{name}={sampler!r} ends after one pass, and every epoch needs one: pass a list, or a Sampler"
        )
    if not hasattr(sampler, "__iter__"):
        raise InputError(f"{name}={sampler!r} must be iterable: the samples' numbers in the order of an epoch")


def _settings_of_batches(
    dataset: Any, loading: Loading, settings: dict[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings for a batch sampler, each of whose batches is one optimizer step, of all ranks or of one."""
    wanted = {**settings, **overrides}
    for name in ("batch_size", "global_batch_size", "accumulate", "drop_last", "shuffle"):
        if wanted.get(name) not in (None, False) and (name, wanted[name]) != ("accumulate", 1):
            raise InputError(
                f"{name}={wanted[name]!r} with batch_sampler=: each of its batches is one step, as it is; leave {name} "
                "out"
            )
    offsets = DrawnOrder(loading, _length(dataset), seed=0).offsets(0)
    largest = max(stop - first for first, stop in pairwise(offsets))
    sizes = {"batch_size": largest, "shuffle": False}
    if wanted.get("policy", "balanced") not in LOCAL_POLICIES:
        sizes["global_batch_size"] = largest
    return {**settings, **sizes}


def _length(dataset: Any) -> int:
    if not isinstance(dataset, Sized):
        raise InputError(f"a sampler needs a data set with len() and indexing, got {type(dataset).__name__}")
    return len(dataset)


def _subset(dataset: Any, indices: list[int]) -> Any:
    if isinstance(dataset, TensorDataset) and is_gathered(dataset):
        return torch.utils.data.TensorDataset(*(tensor[indices] for tensor in dataset.tensors))
    return Subset(dataset, indices)
