"""What a DataLoader of ours reads: the user's data set, each sample after seeding; and how a loader process starts."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from uneven.data.changed_settings import refuse_changed_settings
from uneven.data.epoch_order import seed_generators
from uneven.data.loader_context import end_with_parent, outlive_sigterm
from uneven.data.pickling import MappedArrays, dumps, give_mapped, loads
from uneven.data.torch_modes import TorchModes


class KeyedDataset(Dataset[Any]):
    """Reads sample `index` after seeding every random generator with `key` (None: not seeded).

    Pickled for a loader process that is not forked, it shares its large arrays with that process.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._arrays = MappedArrays()

    def __getitem__(self, pick: tuple[int, int | None]) -> Any:
        index, key = pick
        if key is not None:
            seed_generators(key)
        return self.dataset[index]

    def __reduce__(self) -> tuple[Any, ...]:
        # The data set's class may be defined in the user's script, which a loader process does not import.
        return _unpickle_keyed, (dumps(self.dataset, self._arrays.take),)


def _unpickle_keyed(pickled: bytes) -> KeyedDataset:
    return KeyedDataset(loads(pickled, give_mapped))


class WorkerStart:
    """The worker_init_fn of our DataLoaders: `ends_with_rank`, for a process not forked; then the user's own function.

    `torch.utils.data.get_worker_info().dataset` is the user's data set there, as in any DataLoader.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, ends_with_rank: bool) -> None:
        self._worker_init_fn, self._ends_with_rank = worker_init_fn, ends_with_rank

    def __call__(self, worker: int) -> None:
        outlive_sigterm()
        if self._ends_with_rank:
            end_with_parent(worker)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        refuse_changed_settings("loader processes", "pass it to the data set as an argument, or use num_workers=0")
        return _unpickle_start, (TorchModes.read(), dumps(self._worker_init_fn), self._ends_with_rank)


def _unpickle_start(modes: TorchModes, pickled: bytes, ends_with_rank: bool) -> WorkerStart:
    """In a loader process that was not forked: nothing has set torch's modes yet."""
    modes.set()
    return WorkerStart(loads(pickled), ends_with_rank)
