"""The most bytes of tensors that were alive at once, on a device whose allocator does not tell: the CPU.

PyTorch's MemTracker sorts memory by modules and optimizers; our shards, buckets and optimizers inside optimizers are in
none of its classes. This counts the storages of every operation's tensors for as long as they live, whatever holds
them. The size of a storage is read at every count, because FSDP resizes its buffers.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uneven.bench.strategies.memory import storages_of

PLAIN = (Tensor, nn.Parameter)


class LiveBytes(TorchDispatchMode):
    """`peak` is the most that was alive inside; tensors from before count, too.

    Entered when all buffers are in use by a tensor: one that only C++ holds is not seen before it is used.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):
                self._see(value)
        self.peak = self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor: its operation on the local part comes by here in its turn
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, found)):
            if issubclass(type(value), Tensor):
                self._see(value)
        self.peak = max(self.peak, self._count())
        return found

    def _see(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            known = self._storages.get(storage._cdata)
            if known is None or known() is None:  # addresses come again
                self._storages[storage._cdata] = weakref.ref(storage)

    def _count(self) -> int:
        total = 0
        for address, held in list(self._storages.items()):
            storage = held()
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total
