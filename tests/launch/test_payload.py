"""What ranks are given: code by value, and one copy of large data, mapped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from uneven import MachineError
from uneven.data.pickling import MAPPED_BYTES
from uneven.launch.payload import drop_tensors, read_payload, write_payload


def test_large_data_is_written_once_beside_the_pickle_and_mapped(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((600, 300))
    file = np.memmap(tmp_path / "file", dtype=np.int32, mode="w+", shape=(300_000,))
    file[...] = np.arange(300_000)
    content = {
        "array": array.T,
        "tensor": torch.from_numpy(array),
        "file": file,
        "piece": file[5:8],
        "small": array[:2],
    }
    content["again"] = content["array"]
    folder = tmp_path / "run"
    folder.mkdir()
    write_payload(content, folder)
    assert (folder / "payload").stat().st_size < 20_000
    assert len(list(folder.glob("tensor-*"))) == 2  # the file is mapped where it is
    ranks = [read_payload(folder) for _ in range(2)]
    drop_tensors(folder)
    for found in ranks:
        for name, value in content.items():
            assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name
            assert found[name].dtype == value.dtype
    assert type(ranks[0]["array"]) is np.ndarray
    ranks[0]["array"][1, 1] = 9.0  # copied on write: the other rank keeps its value
    assert ranks[1]["array"][1, 1] == array[1, 1]


def test_a_full_disk_is_named_where_data_are_handed_to_ranks(tmp_path: Path) -> None:
    """It was called data that cannot be pickled."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "payload").symlink_to("/dev/full")
    with pytest.raises(MachineError, match=r"no space left; make room there or, .* set TMPDIR"):
        write_payload(["small"], folder)
    (folder / "tensor-0").symlink_to("/dev/full")
    with pytest.raises(MachineError, match=r"no space left; make room there or, .* set TMPDIR"):
        write_payload(np.zeros(MAPPED_BYTES), folder)
