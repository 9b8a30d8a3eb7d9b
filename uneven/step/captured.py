"""Forward and backward as CUDA graphs, for steps of several ranks; the update is another graph (captured_update.py).

The gather, the augmentation, the loss scale, the loss meter, the backup of buffers and the check for numbers that are
not finite are captured with them; gradients are added into the reducer's buckets, whose addresses do not change. There
is one graph for each combination of micro-batch sizes and the slot's samples, since both are constants in the captured
kernels. Sizes seen for the first time run eagerly. That step is the warm-up which a capture needs (cuDNN chooses its
kernels, the loss scaler makes its tensors), so no step is computed twice, nothing has to be restored, and sizes that do
not come again cost nothing. Sizes around the first split are captured before the first step (train/capture_ahead.py),
because in a step all ranks would wait for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
from uneven.step.capture import Capture, InputMicros, refuse_assigned
from uneven.step.captured_model import CapturedModel
from uneven.step.captured_update import CapturedUpdate, make_captured_update
from uneven.step.eager import EagerStep
from uneven.step.finite import Fault, OwnCheck

MAX_GRAPHS = 16  # kept; the least recently used one is dropped
GRID = 8  # samples: shares are multiples of it, so that few sizes occur

Sizes = tuple[tuple[int, ...], int]  # (of the micro-batches, samples of the slot)


@dataclass(frozen=True)
class _Graph:
    capture: Capture
    model: CapturedModel
    used: frozenset[int]  # params that had a gradient: a replay calls no hooks
    check: Tensor  # this rank's OwnCheck, written by the replay


class CapturedBackward:
    """Stands in for `EagerStep.first_half`, with inputs in place of batches.

    Invariant: all graphs write into the buckets of `eager.reducer`, which must not overlap: a graph cannot hold
    collectives that are started while backward runs.
    """

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch]) -> None:
        self._eager = eager
        self._open_batch = open_batch
        self._graphs: dict[Sizes, _Graph] = {}  # the least recently used first
        self._buckets: list[Bucket] | None = None  # that the graphs add gradients into
        self._seen: set[tuple[int, ...]] = set()  # sizes
        self._held = HeldBuffers(eager.model)
        self._update = make_captured_update(eager, eager.precision.device)
        self.is_replayed = False  # whether the last call was a replay and nothing else

    def __call__(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        sizes = tuple(samples for _, samples in inputs)
        self._follow_group()
        self.is_replayed = (sizes, slot_samples) in self._graphs
        if sizes not in self._seen:
            self._seen.add(sizes)
            check = self._run_eagerly(inputs, slot_samples)
        else:
            check = self._replay(inputs, sizes, slot_samples)
        if (update := self.update) is not None:
            update.read_settings()
        return check

    def _replay(self, inputs: InputMicros, sizes: tuple[int, ...], slot_samples: int) -> Tensor:
        graph = self._graphs.pop((sizes, slot_samples), None) or self._record(inputs, slot_samples)
        self._keep(sizes, slot_samples, graph)
        graph.model.check()
        graph.capture.replay(inputs)
        self._eager.mark_begun()
        self._reducer.replayed(graph.used)
        return graph.check

    @property
    def update(self) -> CapturedUpdate | None:
        """The second half of the step; None where it stays eager, as a strategy's own optimizer does."""
        return None if self._update is None or self._update.optimizer is not self._eager.optimizer else self._update

    def has(self, sizes: Sequence[int], slot_samples: int) -> bool:
        """Whether a step of these micro-batches is captured."""
        return (tuple(sizes), slot_samples) in self._graphs

    def capture_ahead(self, inputs: InputMicros, slot_samples: int) -> None:
        """Capture both halves of a step before it is needed; inside `no_trace(..., keep_optimizer_tensors=True)`."""
        self._follow_group()
        sizes = tuple(samples for _, samples in inputs)
        check = OwnCheck(*self._run_eagerly(inputs, slot_samples).tolist())
        if self.update is not None:
            total = torch.ones((), dtype=torch.float64) if check.has_count else None
            self.update(total)  # the first makes the optimizer's state, the second is captured
            self.update(total)
        self._eager.cancel()
        self._seen.add(sizes)
        self._keep(sizes, slot_samples, self._record(inputs, slot_samples))
        self._eager.cancel()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, this rank has a reducer of its own, so that steps can be captured before the group forms."""
        params, num_stats = self._eager.model.parameters(), len(OwnCheck._fields)
        reducer = Reducer(params, SoloGroup(), UNLIMITED, overlap=False, num_stats=num_stats)
        self._eager.reducer = reducer
        try:
            yield
        finally:
            reducer.close()
            self._eager.reducer = None
            self._graphs.clear()  # they write into buckets that are gone
            if self._update is not None:
                self._update.clear()

    def rehearse(self, inputs: InputMicros, slot_samples: int) -> Fault | None:
        """A step of this rank alone, captured as the steps to come."""
        _, checks = self._eager.sum_gradients(inputs, slot_samples, lambda: (), self)
        return self._eager.finish(checks, self.update)

    @property
    def _reducer(self) -> Reducer:
        reducer = self._eager.reducer
        assert reducer is not None, "captured only where gradients are summed over ranks"
        assert not reducer.overlap, "a graph cannot hold what is sent while backward runs"
        return reducer

    def _follow_group(self) -> None:
        """Forget all graphs if the world size has changed, and the buckets with it."""
        reducer = self._reducer
        reducer.follow_group()
        if reducer.buckets is not self._buckets:
            self._graphs.clear()
            self._buckets = reducer.buckets

    def _keep(self, sizes: tuple[int, ...], slot_samples: int, graph: _Graph) -> None:
        self._graphs[sizes, slot_samples] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _record(self, inputs: InputMicros, slot_samples: int) -> _Graph:
        capture = Capture(inputs)
        self._held.settle()
        beside = next((graph.capture for graph in self._graphs.values()), None)
        check = capture.record(lambda fixed: self._run_eagerly(fixed, slot_samples), beside)
        refuse_assigned(self._held)
        return _Graph(capture, CapturedModel(self._eager.model), self._reducer.used, check)

    def _run_eagerly(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        return self._eager.first_half([(self._open_batch(micro), samples) for micro, samples in inputs], slot_samples)


def check_capturable(batchnorm_sync: BatchNormSync) -> None:
    """InputError if forward contains collectives, which a CUDA graph cannot hold here."""
    if batchnorm_sync.layers:
        raise InputError(
            "compile='graph' with sync_batchnorm=True: on several devices BatchNorm waits for the others in every "
            "layer, which a CUDA graph cannot hold; leave sync_batchnorm out, or use compile='off'"
        )
