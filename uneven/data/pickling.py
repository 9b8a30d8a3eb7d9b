"""Pickles for the loader processes of a rank, which do not import the user's script and hold no copy of large data.

Code and classes of the script travel by value (cloudpickle). What a caller takes out (`take`) travels on a way of its
own: tensors of a batch through torch's shared memory, large arrays of a data set as memory that both sides map.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20  # arrays from this size on are mapped instead of copied


def dumps(value: Any, take: Callable[[Any], Any] = lambda _: None) -> bytes:
    """The pickle of `value`; an object for which `take` returns a key is replaced by the key."""
    buffer = io.BytesIO()
    pickler = cloudpickle.Pickler(buffer)
    pickler.persistent_id = take
    pickler.dump(value)
    return buffer.getvalue()


def loads(pickled: bytes, give: Callable[[Any], Any] | None = None) -> Any:
    """What `dumps` pickled; `give(key)` is the object that was taken out."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.give = give
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    give: Callable[[Any], Any] | None = None

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._objects: dict[Any, Any] = {}  # what was one object is one again

    def persistent_load(self, key: Any) -> Any:
        assert self.give is not None, "nothing was taken out of this pickle"
        if key not in self._objects:
            self._objects[key] = self.give(key)
        return self._objects[key]


class MappedArrays:
    """The large tensors and numpy arrays of a data set, for processes of the same machine and user.

    Each lies in one anonymous file, written once; another process maps it through /proc while this object lives. So
    the loader processes of a rank share one copy. Python lists cannot be shared: each process has its own.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # by id: the array, which must live on, and its key

    def take(self, value: Any) -> tuple[Any, ...] | None:
        """For `dumps`: the key of an array that is mapped; None for everything else."""
        if isinstance(value, np.memmap):
            return key_of_memmap(value)
        array = _as_array(value)
        if array is None or array.nbytes < MAPPED_BYTES:
            return None
        if id(value) not in self._files:
            file = os.memfd_create("uneven-data", os.MFD_CLOEXEC)
            with os.fdopen(os.dup(file), "wb") as writer:
                np.ascontiguousarray(array).tofile(writer)
            dtype = value.dtype if isinstance(value, Tensor) else array.dtype.str
            path = f"/proc/{os.getpid()}/fd/{file}"
            self._files[id(value)] = (value, ("array", path, file, dtype, tuple(value.shape)))
        return self._files[id(value)][1]

    def close(self) -> None:
        for _, key in self._files.values():
            os.close(key[2])
        self._files.clear()

    def __del__(self) -> None:
        self.close()


def key_of_memmap(value: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """A file that is mapped already is mapped again; not a piece of it, whose place in the file is not known."""
    base: Any = value.base
    if value.filename is None or not isinstance(base, mmap.mmap) or not value.flags.c_contiguous:
        return None
    return ("file", str(value.filename), value.offset, value.dtype.str, value.shape)


def give_mapped(key: tuple[Any, ...]) -> Any:
    """For `loads`, in the other process: the array of a key."""
    kind, path, place, dtype, shape = key
    if kind == "file":
        return np.memmap(path, dtype=dtype, mode="r", offset=place, shape=shape)
    if isinstance(dtype, torch.dtype):
        count = int(np.prod(shape, dtype=np.int64))
        return torch.from_file(path, shared=False, size=count, dtype=dtype).view(shape)
    return np.memmap(path, dtype=dtype, mode="c", shape=shape).view(np.ndarray)


def _as_array(value: Any) -> Any:
    """The bytes of a plain tensor or array in host memory; None for what cannot be mapped."""
    if type(value) is np.ndarray:
        return None if value.dtype.hasobject else value
    is_plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
    if not is_plain or value.requires_grad or value.is_quantized or not value.numel():
        return None
    return value.contiguous().view(-1).view(torch.uint8).numpy()
