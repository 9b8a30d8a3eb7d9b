"""The Work of a collective, the same for every backend: wait and is_completed; counts bytes and seconds.

A finished Work of torch's own may hold its tensors. A peer that is gone, and a group that was aborted, are a
GroupLostError whoever waits.
"""

import time
from collections.abc import Sequence
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

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
