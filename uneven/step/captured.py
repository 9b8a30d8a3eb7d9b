"""A step of several ranks as CUDA graphs: forward and backward are one, the update is another (captured_optimizer.py).

The gather, the augmentation, the loss scale, the loss meter, the backup of buffers and the check for numbers that are
not finite are captured with them; gradients are added into the reducer's buckets, whose addresses do not change. There
is one graph for each combination of micro-batch sizes and the slot's samples, since both are constants in the captured
kernels. Sizes seen for the first time run eagerly. That step is the warm-up which a capture needs (cuDNN chooses its
kernels, the loss scaler makes its tensors), so no step is computed twice, nothing has to be restored, and sizes that do
not come again cost nothing. Sizes around the first split are captured before the first step (train/policies.py),
because in a step all ranks would wait for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uneven.average.buffers import HeldBuffers
from uneven.comm.group import SoloGroup
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.parallel.batchnorm import BatchNormSync
from uneven.parallel.buckets import UNLIMITED, Bucket
from uneven.parallel.reducer import Reducer
from uneven.step.capture import Capture, CapturedModel, InputMicros, refuse_assigned
from uneven.step.captured_optimizer import CapturedUpdate, make_captured_update
from uneven.step.eager import DerivedStep, EagerStep, Rows, Stats, split_checks
from uneven.step.finite import OwnCheck, Verdict

MAX_GRAPHS = 16  # kept; the least recently used one is dropped
GRID = 8  # samples: shares are multiples of it, so that few sizes occur

Sizes = tuple[tuple[int, ...], int]  # (of the micro-batches, samples of the slot)


@dataclass(frozen=True)
class _Graph:
    capture: Capture
    model: CapturedModel
    used: frozenset[int]  # params that had a gradient: a replay calls no hooks
    check: Tensor  # this rank's OwnCheck, written by the replay


class CapturedStep(DerivedStep):
    """Life cycle: made before the group forms, with a `rehearsal`; then `prepare` for sizes to come, and steps.

    Invariant: all graphs write into the buckets of `reducer`, which must not overlap: a graph cannot hold collectives
    that are started while backward runs.
    """

    is_captured = True
    untimed_steps = 2  # the first of a size runs eagerly, the second records the graph

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch]) -> None:
        super().__init__(eager)
        self._open_batch = open_batch
        self._graphs: dict[Sizes, _Graph] = {}  # the least recently used first
        self._buckets: list[Bucket] | None = None  # that the graphs add gradients into
        self._seen: set[tuple[int, ...]] = set()  # sizes
        self._held = HeldBuffers(self.model)
        self._update = make_captured_update(self)
        self.is_replayed = False  # whether the last step was a replay and nothing else

    def forward_backward(
        self, inputs: Sequence[tuple[Any, int]], slot_samples: int, stats: Stats
    ) -> tuple[Rows, list[OwnCheck]]:
        check = self._first_half(inputs, slot_samples)
        if (update := self.captured_update) is not None:
            update.read_settings()
        return split_checks(self._sums.finalize(lambda: [*stats(), *OwnCheck()], lambda: check))

    def exchange(self, slot_samples: int, stats: Stats) -> Rows:
        self.cancel()
        rows, _ = super().forward_backward([], slot_samples, stats)
        self.cancel()
        return rows

    def apply(self, counts: Tensor | None) -> None:
        (self.captured_update or super().apply)(counts)

    def start_alone(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> Verdict:
        """In a rehearsal as the steps to come; eagerly on the last rank that is left of a group."""
        if self.reducer is None:
            return super().start_alone(self._open(inputs), slot_samples)
        _, checks = self.forward_backward(inputs, slot_samples, lambda: ())
        fault = self.update(checks)
        return lambda: fault

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, this rank has a reducer of its own, so that steps can be captured before the group forms."""
        params, num_stats = self.model.parameters(), len(OwnCheck._fields)
        self.reducer = Reducer(params, SoloGroup(), UNLIMITED, overlap=False, num_stats=num_stats)
        try:
            yield
        finally:
            self.reducer.close()
            self.reducer = None
            self._graphs.clear()  # they write into buckets that are gone
            if self._update is not None:
                self._update.clear()

    @property
    def captured_update(self) -> CapturedUpdate | None:
        """The second half of the step; None where it stays eager, as a strategy's own optimizer does."""
        return None if self._update is None or self._update.optimizer is not self.optimizer else self._update

    def is_prepared(self, sizes: Sequence[int], slot_samples: int) -> bool:
        return (tuple(sizes), slot_samples) in self._graphs

    def prepare(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> None:
        """Capture both halves of a step before it is needed."""
        self._follow_group()
        check = OwnCheck.from_row(self._run_eagerly(inputs, slot_samples).tolist())
        if (update := self.captured_update) is not None:
            total = torch.ones((), dtype=torch.float64) if check.has_count else None
            update(total)  # the first makes the optimizer's state, the second is captured
            update(total)
        self.cancel()
        self._seen.add(_sizes(inputs))
        self._keep((_sizes(inputs), slot_samples), self._record(inputs, slot_samples))
        self.cancel()

    def _first_half(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        """Everything before the sum over ranks: gradients in the reducer's buckets; returns this rank's OwnCheck."""
        key = _sizes(inputs), slot_samples
        self._follow_group()
        self.is_replayed = key in self._graphs
        if key[0] not in self._seen:
            self._seen.add(key[0])
            return self._run_eagerly(inputs, slot_samples)
        graph = self._graphs.pop(key, None) or self._record(inputs, slot_samples)
        self._keep(key, graph)
        graph.model.check()
        graph.capture.replay(inputs)
        self._has_begun = True  # in the graph, for the device alone
        self._sums.replayed(graph.used)
        return graph.check

    def _follow_group(self) -> None:
        """Forget all graphs if the world size has changed, and the buckets with it."""
        reducer = self._sums
        assert not reducer.overlap, "a graph cannot hold what is sent while backward runs"
        reducer.follow_group()
        if reducer.buckets is not self._buckets:
            self._graphs.clear()
            self._buckets = reducer.buckets

    def _keep(self, key: Sizes, graph: _Graph) -> None:
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _record(self, inputs: InputMicros, slot_samples: int) -> _Graph:
        capture = Capture(inputs)
        self._held.put_back()
        beside = next((graph.capture for graph in self._graphs.values()), None)
        check = capture.record(lambda fixed: self._run_eagerly(fixed, slot_samples), beside)
        refuse_assigned(self._held)
        return _Graph(capture, CapturedModel(self.model), self._sums.used, check)

    def _run_eagerly(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        counts = self._backward_once(self._open(inputs), slot_samples)
        return self.sent_check(counts, self._sums.largest_gradient())

    def _open(self, inputs: InputMicros) -> list[tuple[Batch, int]]:
        return [(self._open_batch(micro), samples) for micro, samples in inputs]


def _sizes(inputs: InputMicros) -> tuple[int, ...]:
    return tuple(samples for _, samples in inputs)


def check_capturable(batchnorm_sync: BatchNormSync) -> None:
    """InputError if forward contains collectives, which a CUDA graph cannot hold here."""
    if batchnorm_sync.layers:
        raise InputError(
            "compile='graph' with sync_batchnorm=True: on several devices BatchNorm waits for the others in every "
            "layer, which a CUDA graph cannot hold; leave sync_batchnorm out, or use compile='off'"
        )
