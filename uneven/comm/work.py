"""The Work of a collective, the same for every backend: wait, is_completed, get_future; counts bytes and seconds.

torch's own Work objects differ: some Gloo collectives raise on `get_future`, and a finished Work may hold its tensors.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class Traffic:
    """Counts a rank's collectives, the bytes of their tensors, and the seconds it waited for them."""

    collectives: int = 0
    payload_bytes: int = 0
    wait_s: float = 0.0


class TorchWork(Protocol):
    """The part of torch.distributed.Work that every backend has."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class Work:
    """A collective that was started; `wait()` returns when its tensor holds the result, and may be called again."""

    def __init__(self, inner: TorchWork, tensor: torch.Tensor, traffic: Traffic) -> None:
        self._inner: TorchWork | None = inner
        self._tensor = tensor
        self._traffic = traffic
        self._future: torch.futures.Future[torch.Tensor] | None = None
        traffic.collectives += 1
        traffic.payload_bytes += tensor.numel() * tensor.element_size()

    def wait(self) -> torch.Tensor:
        if self._inner is not None:
            began = time.perf_counter()
            self._inner.wait()
            self._traffic.wait_s += time.perf_counter() - began
            self._inner = None
            if self._future is not None and not self._future.done():
                self._future.set_result(self._tensor)
        return self._tensor

    def is_completed(self) -> bool:
        return self._inner is None or self._inner.is_completed()

    def get_future(self) -> "torch.futures.Future[torch.Tensor]":
        """A future of the result, set when the collective completes, at the latest by `wait()`."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._inner is None:
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

    def set_result(_: Any) -> None:
        if not future.done():
            future.set_result(tensor)

    inner_future.add_done_callback(set_result)


class WorkList:
    """Several collectives that were started together."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
