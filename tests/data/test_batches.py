"""Batches of every shape that people return from a collate function, moved, pinned and sent between processes."""

import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from tests.forked import run_forked
from uneven import MachineError
from uneven.data import batches
from uneven.data.batches import Collate, Loaded, pin, to_device
from uneven.data.pickling import MAPPED_BYTES, MappedArrays, dumps, give_mapped, loads

META = torch.device("meta")  # a device that every machine has
Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: Tensor
    parts: dict[str, Any]
    name: str = "a"
    total: int = field(init=False, default=3)


class Encoding(UserDict[str, Any]):
    """As HF's BatchEncoding: a mapping with a `.to` of its own, which takes the device alone."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({name: value.to(device) for name, value in self.items()})


class InPlace:
    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)

    def pin_memory(self) -> "InPlace":
        raise RuntimeError("asked for")


def ones() -> Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "tensors"),
    [
        (ones(), lambda b: [b]),
        ((ones(), [ones(), "text", 3]), lambda b: [b[0], b[1][0]]),
        ({"x": ones(), "n": None}, lambda b: [b["x"]]),
        (Pair(ones(), [ones()]), lambda b: [b.x, b.y[0]]),
        (Record(ones(), {"y": (ones(),)}), lambda b: [b.x, b.parts["y"][0]]),
        ([Record(ones(), {})], lambda b: [b[0].x]),
        (UserDict(x=ones(), y=[ones()]), lambda b: [b["x"], b["y"][0]]),
        (Encoding(x=ones()), lambda b: [b["x"]]),
        ({"inner": Encoding(x=ones())}, lambda b: [b["inner"]["x"]]),
        (InPlace(), lambda b: [b.x]),
        (pack_sequence([torch.ones(3), torch.ones(2)]), lambda b: [b.data]),
        (None, lambda b: []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_of_a_batch_is_moved_and_its_kind_kept(batch: Any, tensors: Any) -> None:
    before = [tensor.device.type for tensor in tensors(batch)]
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert [tensor.device.type for tensor in tensors(moved)] == ["meta"] * len(before)
    if not isinstance(batch, InPlace):
        assert [tensor.device.type for tensor in tensors(batch)] == before  # the batch itself is as it was


def test_a_record_keeps_what_is_no_tensor() -> None:
    moved = to_device(Record(ones(), {"n": 5}, "b"), META)
    assert (moved.parts["n"], moved.name, moved.total) == (5, "b", 3)


def test_pinning_reaches_into_records_and_asks_objects_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)  # there may be no CUDA here
    pinned = Loaded(Record(ones(), {"y": [ones()]})).pin_memory().batch
    assert pinned.x.tolist() == pinned.parts["y"][0].tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="asked for"):
        pin([InPlace()])


def test_batches_of_any_class_can_be_sent() -> None:
    for batch in ({"x": ones()}, Pair(ones(), 1), Record(ones(), {"y": ones()}), Encoding(x=ones()), None):
        function, arguments = Loaded(batch).__reduce__()
        back = function(*arguments).batch
        assert type(back) is type(batch)
        assert str(back) == str(batch)


def test_an_empty_part_has_no_batch() -> None:
    assert Collate(lambda samples: samples[0])([]).batch is None


@pytest.mark.parametrize("shape", [(MAPPED_BYTES // 4,), (3, MAPPED_BYTES // 4), (1,)])
def test_large_arrays_are_mapped_and_equal(shape: tuple[int, ...], tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    file = np.memmap(tmp_path / "file", dtype=np.float32, mode="w+", shape=shape)
    file[...] = numbers
    tensor = torch.from_numpy(numbers).t() if len(shape) == 2 else torch.from_numpy(numbers)
    data = {"array": numbers, "again": numbers, "tensor": tensor, "file": file, "piece": file[:1], "list": [1]}
    arrays = MappedArrays()
    pickled = dumps(data, arrays.take)
    back = loads(pickled, give_mapped)
    is_large = numbers.nbytes >= MAPPED_BYTES
    assert (len(pickled) < 3000 + file[:1].nbytes) or not is_large
    for name in ("array", "tensor", "file", "piece"):
        assert np.array_equal(np.asarray(back[name]), np.asarray(data[name])), name
        assert back[name].dtype == data[name].dtype
    assert back["list"] == [1]
    assert (back["array"] is back["again"]) or not is_large
    back["tensor"].zero_()  # a copy on write: the others keep theirs
    assert np.array_equal(np.asarray(loads(pickled, give_mapped)["tensor"]), np.asarray(tensor))


# Loader processes of a rank: not forked, and without the script. Classes, functions and arrays of it come along.
SCRIPT = """
from collections import namedtuple
from dataclasses import dataclass
import numpy as np, torch
from torch.utils.data import get_worker_info
from uneven.config import Loading
from uneven.data.feed import make_feed
from uneven.policy.axis import Axis, part_of

Pair = namedtuple("Pair", ["x", "mapped"])

@dataclass
class Batch:
    pair: Pair
    offsets: list

def mapping_of(address):
    for line in open("/proc/self/maps"):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-2] if line.split()[-1] == "(deleted)" else line.split()[-1]

class Numbers:
    def __init__(self):
        self.tensor, self.array, self.offset = torch.arange(1 << 20), np.arange(1 << 20), 0
    def __len__(self):
        return 6
    def __getitem__(self, index):
        places = [mapping_of(self.tensor.data_ptr()), mapping_of(self.array.ctypes.data)]
        return int(self.tensor[index] + self.array[index]), places, self.offset

def collate(samples):
    return Batch(Pair(torch.tensor([s[0] for s in samples]), {str(p) for s in samples for p in s[1]}),
                 [s[2] for s in samples])

def begin(worker):
    get_worker_info().dataset.offset = 10 + worker

loading = Loading(collate_fn=collate, worker_init_fn=begin, prefetch_factor=1)
feed = make_feed(Numbers(), torch.device("cpu"), 0, 2, num_workers=2, is_rank=True, loading=loading)
parts = [part_of(slot, (slot.samples,), 0, 2) for slot in Axis(6, 2, 1).slots()]
batches = [batch for _, micros in feed.stream(parts) for batch, _ in micros]
assert all(type(batch) is Batch and type(batch.pair) is Pair for batch in batches)
print(sorted(int(x) for batch in batches for x in batch.pair.x))
print(sorted({place for batch in batches for place in batch.pair.mapped}))
print(sorted({offset for batch in batches for offset in batch.offsets}), feed.lookahead)
"""


def test_batches_of_the_scripts_own_classes_come_from_loader_processes_that_share_the_data(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_forked([sys.executable, tmp_path / "script.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 2, 4, 6, 8, 10]", "['/memfd:uneven-data']", "[10, 11] 2"]


def test_no_room_in_shared_memory_is_not_taken_for_samples_of_different_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it in a loader process, where Docker gives 64 MB of shared memory."""

    def no_room(samples: list[Any]) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    monkeypatch.setattr(batches, "default_collate", no_room)
    with pytest.raises(MachineError, match=r"no room in /dev/shm .*--shm-size"):
        Collate(None).batch([torch.ones(2)])
