"""What machines compare of their data: the first difference is named, and what is drawn at random is no difference."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from uneven.data import fingerprint
from uneven.data.fingerprint import compare_data, describe_data, describe_files
from uneven.data.tensors import TensorData


class Files:
    """A data set of one file per sample."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


class Source:
    """A stream in shards."""

    def __init__(self, sizes: list[int], offset: int = 0) -> None:
        self.shard_sizes, self._offset = sizes, offset

    def open(self, shard: int, start: int) -> Any:
        return (self._offset + shard * 100 + number for number in range(start, self.shard_sizes[shard]))


def compared(ours: Any, theirs: Any) -> str:
    """The difference of two data sets, as machines would exchange them; '' without one."""
    found = [json.loads(json.dumps(describe_data(one))) for one in (ours, theirs)]
    difference = compare_data("node2", "the data set", found[0], found[1])
    return "" if difference is None else str(difference)


def files(folder: Path, contents: dict[str, bytes]) -> Files:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return Files([folder / name for name in contents])


PARTS = {f"part-{number:05}.bin": bytes([number]) * 100 for number in range(20)}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (PARTS, ""),
        (dict(list(PARTS.items())[:4]), "node2: the number of files in paths is 4, the leader's is 20; copy"),
        (
            {name: value for name, value in [*PARTS.items(), ("part-00099.bin", b"x")] if name != "part-00017.bin"},
            "node2: file 17 of paths is part-00018.bin, the leader's is part-00017.bin; copy the leader's data there",
        ),
        (dict(reversed(PARTS.items())), "file 0 of paths is part-00019.bin, the leader's is part-00000.bin; sort the"),
        ({**PARTS, "part-00003.bin": b"short"}, "the size of part-00003.bin in paths is 5, the leader's is 100; copy"),
        ({**PARTS, "part-00003.bin": b"y" * 100}, "node2: the content of part-00003.bin in paths is "),
    ],
)
def test_files_are_compared_by_name_order_size_and_content(
    tmp_path: Path, theirs: dict[str, bytes], words: str
) -> None:
    found = compared(files(tmp_path / "here", PARTS), files(tmp_path / "elsewhere", theirs))
    assert found == "" if not words else words in found
    assert "\n" not in found


def test_files_are_found_below_other_data_sets(tmp_path: Path) -> None:
    ours, theirs = (files(tmp_path / name, PARTS) for name in ("here", "elsewhere"))
    (tmp_path / "elsewhere" / "part-00001.bin").write_bytes(b"other")
    assert "part-00001.bin" in compared(Subset(ours, [0, 5]), Subset(theirs, [0, 5]))
    pairs = [[(str(path), 1) for path in one.paths] for one in (ours, theirs)]
    assert "part-00001.bin" in compared(ConcatDataset([pairs[0]]), ConcatDataset([pairs[1]]))
    (tmp_path / "elsewhere" / "part-00001.bin").write_bytes(PARTS["part-00001.bin"])
    assert compared(ConcatDataset([pairs[0]]), ConcatDataset([pairs[1]])) == ""


def test_the_end_of_a_large_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There a Parquet file has its row groups: with others, equal numbers are other samples."""
    monkeypatch.setattr("uneven.data.fingerprint.WHOLE_FILES", 1 << 20)
    contents = [{"train.parquet": bytes(2 << 20) + end} for end in (b"2 row groups", b"3 row groups")]
    ours, theirs = (files(tmp_path / name, one) for name, one in zip("ab", contents, strict=True))
    assert "the content of train.parquet" in compared(ours, theirs)


def test_long_lists_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.data.fingerprint.MOST_NAMES", 10)
    names = [f"/data/{number}.jpg" for number in range(95)]
    found = [
        {"files": describe_files("paths", list_), "contents": {}}
        for list_ in (names, [*names[:60], "/data/x.jpg", *names[61:]])
    ]
    assert sum("from number" in name for name in found[0]["files"]) == 10
    difference = compare_data("node2", "the data set", found[0], found[1])
    assert "a file of paths from number 60 on" in str(difference)


X = torch.arange(60.0).view(20, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (TensorData(X), TensorData(X.clone()), ""),
        (TensorData(X), TensorData(X * (1 + 1e-7)), ""),  # another processor's rounding
        (TensorData(X), TensorData(X + torch.eye(20, 3) * 1e-3), "tensor 0 of the data set is other values"),
        (TensorDataset(X), TensorDataset(X.flip(0)), "tensor 0 of the data set is other values"),
        (TensorDataset(X, X.long()), TensorDataset(X, X.long() + 1), "tensor 1 of the data set"),
        (TensorDataset(X), TensorDataset(X.double()), "is float64 (20, 3), the leader's is float32 (20, 3)"),
        (X, X[:19], "the length of the data set is 19, the leader's is 20"),
        (Source([40, 20]), Source([40, 20]), ""),
        (Source([40, 20]), Source([20, 40]), "shard 0 of the data set is 20 samples, the leader's is 40"),
        (Source([40, 20]), Source([40, 20], 5), "sample 0 of the data set is 5, the leader's is 0"),
        (Source([40, 20]), Source([60]), "the number of shards of the data set is 1, the leader's is 2"),
        ([("a", 1), ("b", 2)], [("a", 1), ("b", 3)], "sample 1[1] of the data set is 3, the leader's is 2"),
        ([{"x": np.ones(3)}], [{"x": np.zeros(3)}], "sample 0['x'] of the data set is other values"),
    ],
)
def test_contents_are_compared(ours: Any, theirs: Any, words: str) -> None:
    found = compared(ours, theirs)
    assert found == "" if not words else words in found, found
    assert "--skip data" in found or not words


def test_large_tensors_are_read_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 100)
    monkeypatch.setattr(fingerprint, "SAMPLED_ROWS", 3)  # 0, 9 and 19
    changed = X.clone()
    changed[9] = 0
    assert "tensor 0" in compared(TensorData(X), TensorData(changed))
    changed = X.clone()
    changed[5] = 0
    assert compared(TensorData(X), TensorData(changed)) == ""


class Augmented:
    """Draws from every generator that there is, its own and the system's included."""

    def __init__(self, label: int = 3) -> None:
        self.rng, self.own, self.label = np.random.default_rng(), random.Random(), label

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        drawn = (random.random(), np.random.rand(2), torch.rand(2), self.rng.random(), self.own.random())
        return (*drawn, os.urandom(4), os.urandom(1)[0] % 2, index * self.label)


def test_what_is_drawn_at_random_is_not_compared_and_not_disturbed() -> None:
    ours = Augmented()
    states = [ours.rng.bit_generator.state, ours.own.getstate(), random.getstate(), torch.get_rng_state().tolist()]
    assert compared(ours, Augmented()) == ""
    after = [ours.rng.bit_generator.state, ours.own.getstate(), random.getstate(), torch.get_rng_state().tolist()]
    assert states == after
    assert "sample 49[7] of the data set is 196, the leader's is 147" in compared(ours, Augmented(4))


def test_a_sample_that_cannot_be_read_is_a_difference() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise OSError(index)

    ours, theirs = (describe_data(one) for one in ([5], [5]))
    theirs["contents"]["sample 0"] = fingerprint._read(Broken(), 0, 0)[""]
    assert "is unreadable (OSError), the leader's is int" in str(compare_data("node2", "the data set", ours, theirs))
