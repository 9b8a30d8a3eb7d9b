"""DataLoaders and their processes: what they read, how they start, and how they end.

A rank's loader processes are never forked from the rank itself. A rank has threads (process group, averaging,
heartbeat). A fork while one of them holds a lock leaves that lock held forever in the child, and the child hangs. So
loader processes come from a fork server, a separate process with a single thread. Unlike the standard fork server it
never runs the user's script again, even without a `__main__` guard
(test_loader_processes_of_a_rank_do_not_run_the_script_again).
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from uneven.config import Loading
from uneven.data.epoch_order import seed_generators
from uneven.data.pickling import MappedArrays, dumps, give_mapped, loads
from uneven.data.script_settings import TorchModes, refuse_changed_settings

READING_S = 5.0  # for a loader process that is inside a function of the user's, before it is killed
AGAIN_S = 0.1
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"  # it removes what a killed rank has left, and would say so


class _LoaderProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802, the name is multiprocessing's
        with _hidden_main(), _sigterm_blocked():
            return ForkServerProcess._Popen(process_obj)


class LoaderContext(ForkServerContext):
    """Like `multiprocessing.get_context("forkserver")`, but hides `__main__`; pass it to a DataLoader."""

    Process = _LoaderProcess

    def __init__(self) -> None:
        super().__init__()
        multiprocessing.set_forkserver_preload(["uneven.data.feed"])  # import torch once, in the server
        if QUIET_TRACKER not in sys.warnoptions:  # which it is started with
            sys.warnoptions.append(QUIET_TRACKER)


class _ForkedProcess(ForkProcess):
    """A loader process of a run in the caller's own process; it has a class of its own to be known by."""


class ForkedContext(ForkContext):
    """For a process that is no rank: a forked process shares the data set's memory and needs no pickling."""

    Process = _ForkedProcess


def end_with_parent(worker: int) -> None:
    """A DataLoader worker_init_fn: start a thread that ends this loader process when its rank has ended in any way.

    torch's own watchdog compares the parent's pid, which is the fork server's here, and the server does not exit before
    its children (test_loader_processes_end_with_their_rank_even_if_it_is_killed).
    """
    del worker
    rank = multiprocessing.parent_process()
    if rank is None:  # called in the rank itself
        return

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, name="uneven-parent", daemon=True).start()


def outlive_sigterm() -> None:
    """In a loader process: a first SIGTERM is not for it, and only a second one ends it.

    A scheduler sends SIGTERM to every process of a job. The run then saves, and for its last step it needs its batches;
    torch would report a loader process that was killed as an error. DataLoader itself terminates loader processes only
    as a last resort, and multiprocessing once more.
    """
    if multiprocessing.parent_process() is None:  # called in the rank itself
        return

    def end(*_: object) -> None:
        os._exit(0)  # killed by the signal, it would make torch raise in the rank, at its exit

    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, end))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@cache
def end_loaders_at_exit() -> None:
    """Let this process end although loader processes are still there, as after an exception or a `break`.

    At its exit multiprocessing sends them one SIGTERM and waits for them, and one is not enough: see `outlive_sigterm`.
    What is registered runs before that, and after a loop's own end, which may still read: it is made later.
    """
    atexit.register(_end_loaders)


def _end_loaders() -> None:
    loaders = [one for one in multiprocessing.active_children() if isinstance(one, _LoaderProcess | _ForkedProcess)]
    end_s = time.monotonic() + READING_S
    while loaders and time.monotonic() < end_s:
        for process in loaders:
            process.terminate()
        loaders[0].join(AGAIN_S)  # two signals at once would be one: a process learns of the second after the first
        loaders = [process for process in loaders if process.is_alive()]
    for process in loaders:
        process.kill()


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """A fork server that is started inside never gets a SIGTERM: without it its loader processes count as dead."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Replace `__main__` by an empty module, because multiprocessing would run its file again in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = empty = ModuleType("__main__")
    empty.__spec__ = None
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass(frozen=True)
class Loaders:
    """How the DataLoaders of a data set are made: they read in this process, or in `num_workers` loader processes."""

    num_workers: int
    loading: Loading
    seed: int
    is_rank: bool  # whose loader processes are not forked

    def __post_init__(self) -> None:
        if self.num_workers:
            end_loaders_at_exit()

    @property
    def ahead(self) -> int:
        """How many batches loader processes read ahead."""
        factor = self.loading.prefetch_factor
        return (2 if factor is None else factor) * self.num_workers

    def open(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        """A DataLoader with these options: batch_size or batch_sampler, collate_fn, pin_memory, persistent_workers."""
        loading, has_workers = self.loading, self.num_workers > 0
        context = None if not has_workers else LoaderContext() if self.is_rank else ForkedContext()
        return DataLoader(
            dataset,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(self.seed),  # otherwise it would draw from the default generator
            multiprocessing_context=context,
            worker_init_fn=WorkerStart(loading.worker_init_fn, self.is_rank),
            prefetch_factor=loading.prefetch_factor if has_workers else None,
            timeout=loading.timeout if has_workers else 0.0,
            **options,
        )


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
