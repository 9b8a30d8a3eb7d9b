"""Forward and backward as CUDA graphs, for steps of several ranks: the sum over ranks and the update stand outside.

The gather, the augmentation, the loss scale and the loss meter are captured with them; gradients are added into the
road's buckets, whose addresses never change. There is one graph per cut: the sizes of the micro-batches and the slot's
samples, since both are numbers inside the kernels' calls. Sizes seen for the first time run eagerly. That step is the
warm-up which a capture needs (cuDNN chooses its kernels, the loss scaler makes its tensors), so no step is computed
twice, nothing has to be put back, and sizes that never come again cost nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from uneven.comm.group import SoloGroup
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.parallel.batchnorm import BatchNormSync
from uneven.parallel.gradients import GradientRoad
from uneven.step.capture import Capture, InputMicros
from uneven.step.eager import EagerStep

MOST = 8  # graphs kept; the one used longest ago goes
GRID = 8  # samples: what shares are multiples of, so that few sizes occur

Cut = tuple[tuple[int, ...], int]  # (sizes of the micro-batches, samples of the slot)


@dataclass(frozen=True)
class _Graph:
    capture: Capture
    used: frozenset[int]  # params that had a gradient, by their places on the road: a replay calls no hooks
    counts: Tensor | None  # where the replay leaves the count


class CapturedBackward:
    """Stands in for `EagerStep.backward`, with inputs in place of batches.

    Invariant: all graphs write into the road that `eager` has. Nothing leaves it while a backward is captured or
    replayed, so it must be one that does not overlap.
    """

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch]) -> None:
        self._eager = eager
        self._open = open_batch
        self._graphs: dict[Cut, _Graph] = {}  # the one used longest ago comes first
        self._seen: set[tuple[int, ...]] = set()  # sizes
        self.is_replayed = False  # whether the last one was a replay and nothing else

    def __call__(self, inputs: InputMicros, slot_samples: int) -> Tensor | None:
        sizes = tuple(samples for _, samples in inputs)
        self.is_replayed = (sizes, slot_samples) in self._graphs
        if not sizes or sizes not in self._seen:
            self._seen.add(sizes)
            return self._run_eagerly(inputs, slot_samples)
        cut = (sizes, slot_samples)
        graph = self._graphs.pop(cut, None) or self._record(inputs, slot_samples)
        self._graphs[cut] = graph
        if len(self._graphs) > MOST:
            del self._graphs[next(iter(self._graphs))]
        graph.capture.replay(inputs)
        self._road.mark(graph.used)
        return graph.counts

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, this rank has a road to itself, so that steps can be captured before the group forms."""
        road = GradientRoad(list(self._eager.model.parameters()), SoloGroup(), 1, overlaps=False)
        self._eager.road = road
        try:
            yield
        finally:
            road.close()
            self._eager.road = None
            self._graphs.clear()  # they write into the road that is gone

    def rehearse(self, inputs: InputMicros, slot_samples: int) -> None:
        """A step of this rank alone, in the form that it will train in."""
        _, counts = self._eager.sum_gradients(inputs, slot_samples, lambda: (), self)
        self._eager.update(counts)

    @property
    def _road(self) -> GradientRoad:
        road = self._eager.road
        assert road is not None, "captured only where gradients are summed"
        assert not road.overlaps, "a graph cannot hold what is sent while backward runs"
        return road

    def _record(self, inputs: InputMicros, slot_samples: int) -> _Graph:
        capture = Capture(inputs)
        beside = next((graph.capture for graph in self._graphs.values()), None)
        counts = capture.record(lambda fixed: self._run_eagerly(fixed, slot_samples), beside)
        return _Graph(capture, self._road.used, counts)

    def _run_eagerly(self, inputs: InputMicros, slot_samples: int) -> Tensor | None:
        return self._eager.backward([(self._open(one), samples) for one, samples in inputs], slot_samples)


def check_capturable(batchnorm_sync: BatchNormSync) -> None:
    """InputError where ranks meet inside forward: a graph holds kernels of one rank, not a meeting of several."""
    if batchnorm_sync.layers:
        raise InputError(
            "compile='graph' with sync_batchnorm=True: on several devices BatchNorm waits for the others in every "
            "layer, which a CUDA graph cannot hold; leave sync_batchnorm out, or use compile='off'"
        )
