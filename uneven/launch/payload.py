"""The payload: a task on its way from the launcher to the rank processes of the same machine.

The factories are pickled (by value where they come from `__main__` or a notebook, so that no script is run again);
large tensors are written once, beside the pickle, and mapped by every rank, so N ranks hold one copy. The folder is
private to the user. Nothing that arrives over a network is ever unpickled.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20  # tensors from this size on are shared


def write_payload(content: Any, folder: Path) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer, folder).dump(content)
    (folder / "payload").write_bytes(buffer.getvalue())


def read_payload(folder: Path) -> Any:
    with (folder / "payload").open("rb") as file:
        return _Unpickler(file, folder).load()


def drop_tensors(folder: Path) -> None:
    """Remove the tensor files' names: ranks that have mapped them keep them, and nothing can be left behind."""
    for path in folder.glob("tensor-*"):
        path.unlink()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder
        self._seen: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}

    def persistent_id(self, value: Any) -> Any:
        is_large = type(value) is Tensor and value.device.type == "cpu" and not value.requires_grad
        if not is_large or value.layout != torch.strided or value.numel() * value.element_size() < MAPPED_BYTES:
            return None
        if id(value) not in self._seen:
            name = f"tensor-{len(self._seen)}"
            value.contiguous().view(torch.uint8).numpy().tofile(self._folder / name)
            # The tensor is kept, too: its id must not be given to another while we pickle.
            self._seen[id(value)] = (value, (name, value.dtype, tuple(value.shape)))
        return self._seen[id(value)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_load(self, key: Any) -> Tensor:
        name, dtype, shape = key
        count = 1
        for length in shape:
            count *= length
        return torch.from_file(str(self._folder / name), shared=True, size=count, dtype=dtype).view(shape)
