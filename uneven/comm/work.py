"""The Work of a collective, the same for every backend: wait, is_completed, get_future; counts bytes and seconds.

torch's own Work objects differ: some Gloo collectives raise on `get_future`, and a finished Work may hold its tensors.
A peer that is gone, and a group that was aborted, are a GroupLostError whoever waits.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from uneven.comm.lost import OTHER_ORDER, SLICE_S, Lost, as_lost, is_timeout
from uneven.errors import GroupLostError

_SLICE = timedelta(seconds=SLICE_S)


@dataclass
class Traffic:
    """Counts a rank's collectives, the bytes of their tensors, and the seconds it waited for them."""

    collectives: int = 0
    payload_bytes: int = 0
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.awaited: Work | None = None  # what a thread waits for just now; read by the heartbeat


class TorchWork(Protocol):
    """The part of torch.distributed.Work that every backend has."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class Work:
    """A collective that was started; `wait()` returns when its tensor holds the result, and may be called again.

    `lost`: of its group. Where that is aborted the work is completed, and `wait()` raises.
    """

    def __init__(
        self,
        inner: TorchWork,
        tensor: torch.Tensor,
        traffic: Traffic,
        lost: Lost | None = None,
        name: str = "collective",
    ) -> None:
        self._inner: TorchWork | None = inner
        self._name = name
        self._tensor = tensor
        self._traffic = traffic
        self._lost = Lost() if lost is None else lost
        self._future: torch.futures.Future[torch.Tensor] | None = None
        self._why_lost: str | None = None  # what `wait` has raised, and raises again
        traffic.collectives += 1
        self._number = traffic.collectives
        traffic.payload_bytes += tensor.numel() * tensor.element_size()

    def wait(self) -> torch.Tensor:
        if self._inner is not None:
            began = time.perf_counter()
            self._traffic.awaited = self
            try:
                if self._lost.error is not None:
                    self._lost.check()
                self._await(self._inner)
            except RuntimeError as error:
                self._fail(error)
            finally:
                self._traffic.awaited = None
            self._traffic.wait_s += time.perf_counter() - began
            self._inner = None
            if self._future is not None and not self._future.done():
                self._future.set_result(self._tensor)
        if self._why_lost is not None:
            raise GroupLostError(self._why_lost)  # here: from inside it would hold the transport's work
        return self._tensor

    def describe(self) -> str:
        """Which collective it is: ranks that wait for each other's are told apart by it."""
        size = self._tensor.numel() * self._tensor.element_size()
        return f"{self._name} of {size:,} bytes, its collective number {self._number:,}"

    def is_completed(self) -> bool:
        """Also when it has failed, which `wait` raises."""
        return self._inner is None or self._lost.error is not None or self._inner.is_completed()

    def _await(self, inner: Any) -> None:
        inner.wait()

    def _fail(self, error: RuntimeError) -> None:
        """Remember that the group is lost, and let go of the work with its tensors; another error is raised."""
        # An abort cuts connections, of which the transport may tell first: its own words say more.
        lost = self._lost.error if self._lost.is_aborted else as_lost(error)
        if not isinstance(lost, GroupLostError):
            raise error
        self._why_lost, self._lost.has_lost_peer = str(lost), True
        if is_timeout(self._why_lost):
            self._why_lost += f"; this rank waited in {self.describe()}: {OTHER_ORDER}"
        if self._future is not None and not self._future.done():
            self._future.set_exception(GroupLostError(self._why_lost))  # type: ignore[arg-type]  # wrong stubs

    def get_future(self) -> "torch.futures.Future[torch.Tensor]":
        """A future of the result, set when the collective completes, at the latest by `wait()`."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._why_lost is not None:
                self._future.set_exception(GroupLostError(self._why_lost))  # type: ignore[arg-type]  # wrong stubs
            elif self._inner is None:
                self._future.set_result(self._tensor)
            else:
                _link_futures(self._inner, self._future, self._tensor)
        return self._future


def _link_futures(inner: Any, future: "torch.futures.Future[torch.Tensor]", tensor: torch.Tensor) -> None:
    """Set `future` when torch's own is set; a Work without one (Gloo reduce_scatter) has it set by `wait()`."""
    try:
        inner_future = inner.get_future()
    except (RuntimeError, AttributeError):
        return

    def set_result(done: Any) -> None:
        if future.done():
            return
        try:
            done.value()
        except RuntimeError as error:
            future.set_exception(as_lost(error))  # type: ignore[arg-type]  # wrong stubs
        else:
            future.set_result(tensor)

    inner_future.add_done_callback(set_result)


class GlooWork(Work):
    """A collective over Gloo, waited for in slices: a bare wait would end with a stopped peer's timeout alone."""

    def wait_for(self, seconds: float) -> bool:
        """Wait at most so long, in whole milliseconds; whether it is completed. Raises what it has failed with."""
        if self._inner is None or self._lost.error is not None:
            self.wait()
            return True
        try:
            if not _is_over(self._inner, timedelta(milliseconds=max(1, round(1e3 * seconds)))):
                return False
        except RuntimeError as error:
            self._fail(error)
        self.wait()
        return True

    def _await(self, inner: Any) -> None:
        while not _is_over(inner, _SLICE):
            self._lost.check()


def _is_over(inner: Any, slice_: timedelta) -> bool:
    """Wait for a work of Gloo for so long; whether it is completed. Raises what it has failed with."""
    try:
        inner.wait(slice_)
    except RuntimeError:
        if not inner.is_completed():
            return False
        inner.wait()
    return True


class WorkList:
    """Several collectives that were started together."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
