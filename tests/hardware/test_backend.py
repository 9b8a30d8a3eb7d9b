"""Which road ranks take, and what is said about it."""

import pytest

from uneven import InputError
from uneven.hardware.backend import choose_backend
from uneven.hardware.device import parse_devices


@pytest.mark.parametrize(
    ("asked", "devices", "chosen", "words"),
    [
        ("auto", "cuda:0,cuda:1", "nccl", "a CUDA device of its own"),
        ("auto", "cuda:0,cpu", "cpu", "a CUDA device for every rank"),
        ("auto", "cpu,cpu", "cpu", "a CUDA device for every rank"),
        ("auto", "cuda:0,cuda:0", "cpu", "share a GPU"),
        ("auto", "cuda:0%60,cuda:0%24", "cpu", "slices"),
        ("cpu", "cuda:0,cuda:1", "cpu", "as asked"),
        ("nccl", "cuda:0,cuda:1", "nccl", "as asked"),
        ("nccl", "cuda:0,cuda:0", "nccl", "take turns"),
    ],
)
def test_the_road_follows_from_the_devices(asked: str, devices: str, chosen: str, words: str) -> None:
    found, why = choose_backend(asked, parse_devices(devices), has_nccl=True)
    assert found == chosen
    assert words in why


@pytest.mark.parametrize(
    ("devices", "has_nccl", "words"),
    [("cuda:0,cpu", True, "every rank"), ("cuda:0%60,cuda:0%24", True, "slices"), ("cuda:0,cuda:1", False, "without")],
)
def test_nccl_that_cannot_be_is_refused_with_the_reason(devices: str, has_nccl: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose_backend("nccl", parse_devices(devices), has_nccl)
    assert choose_backend("auto", parse_devices(devices), has_nccl)[0] == "cpu"
