"""One batch is read and collated before a run starts, so that a data set that cannot be batched is refused there."""

from collections.abc import Sized
from typing import Any

from uneven.config import Loading, RunConfig, Task, is_stream
from uneven.data.batches import Collate
from uneven.data.epoch_order import EpochOrder, PlainOrder, random_states_preserved, seed_generators
from uneven.data.sample_order import sample_keys
from uneven.data.source import ShardedDataset, shard_sizes
from uneven.data.tensors import TensorData, is_gathered
from uneven.errors import InputError

MOST = 8  # samples that are read: enough to see different shapes


def check_batch(task: Task, config: RunConfig, order: EpochOrder) -> None:
    """InputError where the first samples of the training set, or of the test set, do not make a batch."""
    _check("dataset", task.dataset, task.loading, config, order)
    test = task.evaluation
    if test is not None and isinstance(test.dataset, Sized) and hasattr(test.dataset, "__getitem__"):
        samples = PlainOrder(len(test.dataset), config.seed, is_shuffled=False)
        _check("the test set", test.dataset, test.loading, config, samples)


def _check(name: str, dataset: Any, loading: Loading, config: RunConfig, order: EpochOrder) -> None:
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
    many = min(MOST, config.batch_size, order.samples)
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
