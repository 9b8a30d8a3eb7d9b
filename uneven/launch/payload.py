"""The payload: a task on its way from the launcher to the rank processes of the same machine.

The factories are pickled (by value where they come from `__main__` or a notebook, so that no script is run again);
large tensors and arrays are written once, beside the pickle, and mapped by every rank, so N ranks hold one copy; files
that a data set has mapped itself are mapped again. What the script has set for all of torch, and in other modules,
comes first, and is set in the rank before anything is made there. The folder is private to the user. Nothing that
arrives over a network is ever unpickled.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uneven.data.pickling import MAPPED_BYTES, give_mapped, key_of_memmap
from uneven.data.script_settings import TorchModes
from uneven.errors import MachineError
from uneven.files import why_not_written


def write_payload(content: Any, folder: Path) -> None:
    buffer = io.BytesIO()
    pickle.dump(TorchModes.read(), buffer)
    _Pickler(buffer, folder).dump(content)
    with _writing_to(folder):
        (folder / "payload").write_bytes(buffer.getvalue())


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # numpy knows no reason where a file was cut short.
        why = "no space left" if error.errno is None else why_not_written(error)
        raise MachineError(
            f"model and data cannot be handed to the ranks in {folder.parent}: {why}; make room there or, unless it is "
            "/dev/shm, set TMPDIR to a folder with more"
        ) from error


def read_payload(folder: Path) -> Any:
    """The content, with torch's modes set to those of the launcher."""
    with (folder / "payload").open("rb") as file:
        pickle.load(file).set()
        return _Unpickler(file, folder).load()


def drop_tensors(folder: Path) -> None:
    """Remove the tensor files' names: ranks that have mapped them keep them, and nothing can be left behind."""
    for path in folder.glob("tensor-*"):
        path.unlink()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder
        self._seen: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, np.memmap):
            return key_of_memmap(value)
        if type(value) is np.ndarray and value.nbytes >= MAPPED_BYTES and not value.dtype.hasobject:
            return self._mapped(value, "array", value.dtype.str, np.ascontiguousarray(value))
        is_large = type(value) is Tensor and value.device.type == "cpu" and not value.requires_grad
        if not is_large or value.layout != torch.strided or value.numel() * value.element_size() < MAPPED_BYTES:
            return None
        return self._mapped(value, "tensor", value.dtype, value.contiguous().view(torch.uint8).numpy())

    def _mapped(self, value: Any, kind: str, dtype: Any, content: NDArray[Any]) -> tuple[Any, ...]:
        if id(value) not in self._seen:
            name = f"tensor-{len(self._seen)}"
            with _writing_to(self._folder):
                content.tofile(self._folder / name)
            # The value is kept, too: its id must not be given to another while we pickle.
            self._seen[id(value)] = (value, (kind, name, 0, dtype, tuple(value.shape)))
        return self._seen[id(value)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_load(self, key: Any) -> Any:
        kind, name, place, dtype, shape = key
        if kind != "tensor":
            return give_mapped((kind, name if kind == "file" else str(self._folder / name), place, dtype, shape))
        count = 1
        for length in shape:
            count *= length
        return torch.from_file(str(self._folder / name), shared=True, size=count, dtype=dtype).view(shape)
