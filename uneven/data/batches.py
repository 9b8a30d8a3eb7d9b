"""Batches of any shape: collated from samples, pinned, moved to a device.

A batch is what the user's collate_fn returns: tensors, or tuples, lists, dicts, named tuples and dataclasses of them,
or an object with a `.to(device)` of its own. Used by the feeds, in loader processes and in the process that trains.
`check_batch` reads and collates one before a run starts, so that a data set that cannot be batched is refused there.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from uneven.config import Loading, RunConfig, Task, is_stream
from uneven.data.epoch_order import EpochOrder, PlainOrder, random_states_preserved, seed_generators
from uneven.data.pickling import dumps, loads
from uneven.data.sample_order import sample_keys
from uneven.data.source import ShardedDataset, shard_sizes
from uneven.data.tensors import TensorData, is_gathered
from uneven.errors import InputError, MachineError

CHECKED = 8  # samples that are read before a run: enough to see different shapes
# Docker gives a container 64 MB unless it is told otherwise.
NO_ROOM = (
    "no room in /dev/shm for the batches of the loader processes: give it more (docker run --shm-size=8g, or "
    "--ipc=host), make num_workers or prefetch_factor smaller, or use num_workers=0"
)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device; copies from pinned memory run in the background."""
    return _map(batch, "to", lambda tensor: tensor.to(device, non_blocking=True), lambda own: own.to(device))


def pin(batch: Any) -> Any:
    """The batch in pinned memory."""
    return _map(batch, "pin_memory", Tensor.pin_memory, lambda own: own.pin_memory())


def rows_of(batch: Any, rows: Tensor, samples: int) -> Any:
    """The batch of these rows alone. What has no row for each of its samples is taken as it is."""

    def of_tensor(tensor: Tensor) -> Tensor:
        return tensor[rows.to(tensor.device)] if tensor.ndim and len(tensor) == samples else tensor

    def of_texts(texts: Any) -> Any:
        return type(texts)(texts[row] for row in rows.tolist()) if len(texts) == samples else texts

    return _map(batch, "tolist", of_tensor, lambda own: own, of_texts)


def _map(
    batch: Any,
    method: str,
    of_tensor: Callable[[Tensor], Any],
    of_object: Callable[[Any], Any],
    of_texts: Callable[[Any], Any] = lambda texts: texts,
) -> Any:
    """The batch with every tensor in it replaced, and objects that have the method themselves by its result."""

    def is_leaf(value: Any) -> bool:
        return _has(value, method) or _is_record(value) or _is_foreign_mapping(value) or _is_texts(value)

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return of_tensor(value)
        if _has(value, method):
            result = of_object(value)
            return value if result is None else result  # a method that works in place
        if _is_texts(value):
            return of_texts(value)
        if _is_record(value):
            twin = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(twin, field.name, whole(getattr(value, field.name)))
            return twin
        if _is_foreign_mapping(value):
            twin = copy.copy(value)
            for key, part in value.items():
                twin[key] = whole(part)
            return twin
        return value

    def whole(value: Any) -> Any:
        return pytree.tree_map(replaced, value, is_leaf=is_leaf)

    return whole(batch)


def _has(value: Any, method: str) -> bool:
    return not isinstance(value, type) and callable(getattr(value, method, None))


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(text, str | bytes) for text in value)


def _is_foreign_mapping(value: Any) -> bool:
    """A mapping that torch's pytrees do not look into, as a UserDict; one that can be filled."""
    return isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES and hasattr(value, "__setitem__")


class Loaded:
    """A collated batch on its way from a DataLoader, which pins it by calling `pin_memory`.

    From a loader process that was not forked, a batch of a class of the user's script travels as cloudpickle takes it:
    the class has no importable name there (test_batches_of_the_scripts_own_classes_come_from_loader_processes).
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> "Loaded":
        return Loaded(pin(self.batch))

    def __reduce__(self) -> tuple[Any, ...]:
        if _is_plain(self.batch):
            return Loaded, (self.batch,)
        tensors: list[Tensor] = []

        def take(value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return len(tensors) - 1

        return _unpickle_loaded, (dumps(self.batch, take), tensors)  # tensors go through shared memory


def _unpickle_loaded(pickled: bytes, tensors: list[Tensor]) -> Loaded:
    return Loaded(loads(pickled, tensors.__getitem__))


def _is_plain(batch: Any) -> bool:
    """Whether it holds only tensors and types of Python's own, which every process knows."""
    if isinstance(batch, dict):
        return type(batch) is dict and all(_is_plain(part) for part in batch.values())
    if isinstance(batch, tuple | list):
        return type(batch) in (tuple, list) and all(_is_plain(part) for part in batch)
    return type(batch) is Tensor or type(batch).__module__ == "builtins"


class Collate:
    """A DataLoader's collate_fn: the user's, or torch's with an error that says what to do."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Loaded:
        return Loaded(self.batch(samples) if samples else None)

    def batch(self, samples: list[Any]) -> Any:
        if self._collate_fn is not None and self._collate_fn is not default_collate:
            return self._collate_fn(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError) as error:
            if "shared memory" in str(error):
                raise MachineError(f"{NO_ROOM} ({_first_line(error)})") from error
            raise InputError(_collate_advice(error)) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # As with the data set: the function may be one of the user's script.
        return _unpickle_collate, (dumps(self._collate_fn),)


def _unpickle_collate(pickled: bytes) -> Collate:
    return Collate(loads(pickled))


def _collate_advice(error: Exception) -> str:
    what = "samples of different shapes" if isinstance(error, RuntimeError) else "samples that cannot be stacked"
    return f"{what}: pass collate_fn=, a function that makes a batch of a list of samples (torch: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_batch(task: Task, config: RunConfig, order: EpochOrder) -> None:
    """InputError where the first samples of the training set, or of the test set, do not make a batch."""
    _check_first("dataset", task.dataset, task.loading, config, order)
    test = task.evaluation
    if test is not None and isinstance(test.dataset, Sized) and hasattr(test.dataset, "__getitem__"):
        samples = PlainOrder(len(test.dataset), config.seed, is_shuffled=False)
        _check_first("the test set", test.dataset, test.loading, config, samples)


def _check_first(name: str, dataset: Any, loading: Loading, config: RunConfig, order: EpochOrder) -> None:
    if isinstance(dataset, TensorData) and loading.collate_fn is not None and dataset.transform is not None:
        raise InputError(
            f"collate_fn= with {name}=TensorData(..., transform=...): the transform makes the batch; leave one out"
        )
    if is_gathered(dataset) and loading.collate_fn is None:
        return
    if is_stream(dataset):
        if shard_sizes(dataset) is None:
            return  # a sample that was read cannot be put back
        dataset = ShardedDataset(dataset)
    many = min(CHECKED, config.batch_size, order.samples)
    keys = sample_keys(config.seed, 0, many).tolist()
    with random_states_preserved():
        samples = []
        for index, key in zip(order.indices(0)[:many].tolist(), keys, strict=True):
            seed_generators(key)
            try:
                samples.append(dataset[index])
            except Exception as error:
                raise InputError(f"{name}[{index}] failed with {_in_a_line(error)}") from error
        try:
            Collate(loading.collate_fn).batch(samples)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        except Exception as error:
            raise InputError(
                f"collate_fn failed on {many} samples of {name} with {_in_a_line(error)}; it gets a list of samples "
                "and returns a batch"
            ) from error


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
