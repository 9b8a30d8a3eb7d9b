"""A step of several ranks as one CUDA graph on each, with NCCL's sum of the gradients inside.

Between the sum and the update the host cannot look at anything. So the device decides whether the step is finite, by
the checks of all ranks that ride in the sum, and what a rank tells the others about itself is written before the
launch. The last node of a graph counts the steps that were applied, which the host compares with its own count.

[Note: captured together] NCCL wants a collective to be captured on all ranks or on none, and launched from graphs that
were captured together. Hence each decision (replay or not, which graph, what to capture or to drop) depends only on
what all ranks know alike: every rank's samples, the slot's, and the optimizer's settings. What was not captured runs as
two graphs with the sum between them (captured.py). Graphs must be gone before NCCL's communicator: `close`.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from uneven.comm.host_copy import copy_to_host_async
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.errors import RankError
from uneven.parallel.buckets import Bucket
from uneven.parallel.reducer import Reducer
from uneven.step.capture import Capture, InputMicros
from uneven.step.captured_model import CapturedModel
from uneven.step.eager import EagerStep, split_checks
from uneven.step.finite import Fault, OwnCheck, judge, total_count
from uneven.step.on_device import update_where
from uneven.step.optimizer_capture import CapturedSettings

MAX_GRAPHS = 16  # kept; the least recently used one is dropped

Key = tuple[tuple[int, ...], int]  # (every rank's samples, the slot's)


class Times(NamedTuple):
    """What the device did in a step, in ms."""

    own_ms: float  # until this rank's gradients were there
    sum_ms: float  # the sum, and the wait for other ranks
    update_ms: float


class Moments:
    """Takes the time inside a graph, where the host sees nothing."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # external: the graph records them in every replay.
        self._own, self._summed = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

    def began(self) -> None:
        self._began.record()

    def own_done(self) -> None:
        self._own.record()

    def summed(self) -> None:
        self._summed.record()

    def ended(self) -> None:
        self._ended.record()

    def read(self) -> Times:
        """Of the last step, which the device has done."""
        return Times(
            self._began.elapsed_time(self._own),
            self._own.elapsed_time(self._summed),
            self._summed.elapsed_time(self._ended),
        )


def can_time_graphs() -> bool:
    """Whether this torch has events that a graph records."""
    return "external" in inspect.signature(torch.cuda.Event.__new__).parameters


class _Graph(NamedTuple):
    capture: Capture
    model: CapturedModel
    unused: tuple[nn.Parameter, ...]  # by all ranks: they have no gradient


class WholeStep:
    """Life cycle: made on all ranks when the group has formed and the reducer is there; `capture`, then call; `close`.

    The optimizer is in its capturable form (`prepare_optimizer`).
    """

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch]) -> None:
        self._eager, self._open_batch = eager, open_batch
        device = eager.precision.device
        self._settings = CapturedSettings(eager.optimizer, device)
        self._graphs: dict[tuple[Key, Hashable], _Graph] = {}  # the least recently used first
        self._buckets: list[Bucket] = self._reducer.buckets  # whose addresses the graphs hold
        self._generation = self._reducer.generation  # of the communicator that they hold
        rows = self._reducer.rows
        self._row = rows.new_zeros(rows.shape[1] - len(OwnCheck._fields))  # what this rank says about itself
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._expected = 0  # steps applied, as the host knows it
        self._moments = Moments()

    def has(self, key: Key) -> bool:
        """Whether such a step is captured; the same on all ranks."""
        self._reducer.follow_group()
        if self._reducer.buckets is not self._buckets or self._reducer.generation != self._generation:
            self.close()
        return (key, self._settings.constants()) in self._graphs

    def __call__(self, key: Key, inputs: InputMicros, row: Sequence[float]) -> tuple[list[list[float]], Fault | None]:
        """Replay a step that is captured, on all ranks; waits until it is done.

        Returns every rank's row, and why the step was skipped, if it was.
        """
        place = (key, self._settings.constants())
        graph = self._graphs.pop(place)
        self._graphs[place] = graph
        graph.model.check()
        self._settings.write_rates()
        self._row.copy_(torch.tensor(row, dtype=self._row.dtype))
        self._moments.began()
        graph.capture.replay(inputs)
        self._moments.ended()
        self._reducer.sum_replayed(graph.unused)
        rows, applied = copy_to_host_async(self._reducer.rows), copy_to_host_async(self._applied)
        others, checks = split_checks(rows().tolist())
        fault = self._eager.fault_of(checks)
        self._expected += fault is None
        if (found := int(applied())) != self._expected:
            raise RankError(
                f"{found} steps were applied on the device, but by the ranks' checks it should be {self._expected}"
            )
        return others, fault

    @property
    def times(self) -> Times:
        """Of the last step."""
        return self._moments.read()

    def capture(self, key: Key, inputs: InputMicros, slot_samples: int) -> None:
        """Capture such a step; a collective, inside `no_trace(..., keep_optimizer_tensors=True)`.

        InputError where it cannot be captured: then another rank may have captured it, so none may use it.
        """
        unused, has_count = self._run_once(inputs, slot_samples)
        capture, beside = Capture(inputs), next((graph.capture for graph in self._graphs.values()), None)
        self._eager.cancel()
        try:
            with self._settings.rates_in_tensors():
                capture.record(lambda fixed: self._run(fixed, slot_samples, unused, has_count), beside)
        finally:
            self._eager.cancel()
        self._graphs[key, self._settings.constants()] = _Graph(capture, CapturedModel(self._eager.model), unused)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.pop(next(iter(self._graphs))).capture.close()

    def close(self) -> None:
        """Destroy the graphs. NCCL waits for that before it destroys a communicator that they use."""
        for graph in self._graphs.values():
            graph.capture.close()
        self._graphs.clear()
        self._buckets, self._generation = self._reducer.buckets, self._reducer.generation

    @property
    def _reducer(self) -> Reducer:
        reducer = self._eager.reducer
        assert reducer is not None, "captured only where gradients are summed over ranks"
        return reducer

    def _run_once(self, inputs: InputMicros, slot_samples: int) -> tuple[tuple[nn.Parameter, ...], bool]:
        """The step operation by operation: cuDNN chooses kernels, NCCL connects, the optimizer makes its state.

        Returns the params that no rank uses, and whether losses are sums with a count.
        """
        eager = self._eager
        _, checks = eager.sum_gradients(self._opened(inputs), slot_samples, lambda: [0.0] * len(self._row))
        unused = tuple(param for param in eager.model.parameters() if param.requires_grad and param.grad is None)
        has_count = total_count(checks) is not None
        for param in unused:
            param.grad = torch.zeros_like(param)  # a fused SGD wants the state of all params, or of none
        eager.update(torch.ones((), dtype=torch.float64) if has_count else None)  # also of a step that is not finite
        return unused, has_count

    def _run(self, inputs: InputMicros, slot_samples: int, unused: Sequence[nn.Parameter], has_count: bool) -> None:
        eager = self._eager
        check = eager.first_half(self._opened(inputs), slot_samples)
        self._moments.own_done()
        self._reducer.sum_on_device(self._row, check)
        self._moments.summed()
        is_good, total = judge(self._reducer.rows[:, -len(check) :], eager.limit)
        for param in unused:
            param.grad = None
        update_where(eager, is_good, total if has_count else None)
        self._applied.add_(is_good)  # the last node

    def _opened(self, inputs: InputMicros) -> list[tuple[Batch, int]]:
        return [(self._open_batch(micro), samples) for micro, samples in inputs]
