"""How long collectives of this process are in flight, and how much of that its threads spend waiting for them.

Used by `uneven bench strategies`, for our strategies and PyTorch's alike: every collective that Python code starts goes
through torch's ProcessGroup, and every wait through its Work. Collectives that torch starts in C++ by itself (those of
DTensor) are not seen. DistributedDataParallel waits in C++, at the end of backward: BackwardTail tells of that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[float, float]  # (start, end) in seconds of one clock

STARTERS = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "all_gather_single",
    "reduce_scatter_single",
    "alltoall_base",
)


@dataclass
class Observed:
    """Spans of a stretch of training: a collective's from its start until its result is there, and those of waits.

    hidden_s + exposed_s is the time in which any collective was in flight: exposed while somebody waited, else hidden
    behind the work that went on.
    """

    flights: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    _started: dict[int, tuple[Any, float]] = field(default_factory=dict)  # works that have no future, until a wait

    @property
    def in_flight_s(self) -> float:
        return _length(_joined(self.flights))

    @property
    def exposed_s(self) -> float:
        return _length(_common(_joined(self.flights), _joined(self.waits)))

    @property
    def hidden_s(self) -> float:
        return self.in_flight_s - self.exposed_s

    def started(self, work: Any, began: float) -> None:
        """A collective was started; its span ends when torch says so, or where it cannot when it was waited for."""
        try:
            work.get_future().add_done_callback(lambda _: self.flights.append((began, time.perf_counter())))
        except RuntimeError:
            self._started[id(work)] = (work, began)

    def waited(self, work: Any, began: float) -> None:
        now = time.perf_counter()
        self.waits.append((began, now))
        if id(work) in self._started and work.is_completed():
            self.flights.append((self._started.pop(id(work))[1], now))


@contextmanager
def observe_collectives() -> Iterator[Observed]:
    """Inside, collectives and waits of this process are recorded; not for two threads at a time."""
    observed = Observed()
    group: Any = dist.ProcessGroup
    work: Any = dist.Work
    places = [(group, name) for name in STARTERS if hasattr(group, name)] + [(work, "wait")]
    before = [owner.__dict__[name] for owner, name in places]  # what getattr gives would not bind when it is put back
    for owner, name in places:
        wrapped = _observed_wait if owner is work else _observed_start
        setattr(owner, name, wrapped(getattr(owner, name), observed))
    try:
        yield observed
    finally:
        for (owner, name), method in zip(places, before, strict=True):
            setattr(owner, name, method)


class BackwardTail:
    """Runs one backward; from its last gradient until it returns counts as a wait, as far as a collective is on."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._began = 0.0

    def __call__(self, loss: Tensor) -> None:
        # Callbacks run in the order in which they are queued, and DDP queues its own with the last gradient.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        handle: Any = loss.register_hook(lambda _: queue_callback(self._mark))
        loss.backward()
        handle.remove()
        self._observed.waits.append((self._began, time.perf_counter()))

    def _mark(self) -> None:
        self._began = time.perf_counter()


def _observed_wait(wait: Callable[..., Any], observed: Observed) -> Callable[..., Any]:
    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return wait(work, *args, **kwargs)
        finally:
            observed.waited(work, began)  # a slice of a wait, too, which raises where it is not the last

    return call


def _observed_start(start: Callable[..., Any], observed: Observed) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = start(*args, **kwargs)
        if work is not None:
            observed.started(work, began)
        return work

    return call


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The same moments as spans in order that do not overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The moments that lie in both; each argument as `_joined` returns it."""
    both = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in both if start < end]


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
