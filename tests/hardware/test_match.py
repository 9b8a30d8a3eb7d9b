"""What is said of a run's devices before anything is trained."""

from dataclasses import replace

import pytest

from uneven.hardware.device import parse_devices
from uneven.hardware.gpus import Gpu
from uneven.hardware.match import describe_devices

from .fakes import GIB, GTX_1060, RTX_5060_TI

H200 = [Gpu(index, "NVIDIA H200", 140 * GIB + index * 2**20) for index in range(2)]
PAIR = [RTX_5060_TI, GTX_1060]
CARD = "NVIDIA GeForce RTX 5060 Ti"
SIZES = [RTX_5060_TI, replace(RTX_5060_TI, index=1, memory_bytes=8 * GIB)]


@pytest.mark.parametrize(
    ("devices", "gpus", "sentence"),
    [
        ("cpu", [], "1 device: cpu"),
        ("cpu@0.4", [], "1 device: cpu@0.4"),
        ("cuda:1", PAIR, "1 device: cuda:1 (NVIDIA GeForce GTX 1060 6GB)"),
        ("cpu,cpu", [], "2 devices, alike: cpu, cpu"),
        ("cuda:0,cuda:1", H200, "2 devices, alike: cuda:0, cuda:1 (NVIDIA H200)"),
        ("cuda:0%50,cuda:0%50", H200, "2 devices, alike: cuda:0%50, cuda:0%50 (NVIDIA H200)"),
        ("cpu@0.5,cpu@0.5", [], "2 devices, alike: cpu@0.5, cpu@0.5"),
        ("cpu,cpu@0.4", [], "2 devices, mismatched: cpu, cpu@0.4 (why)"),
        ("cuda:0,cpu", H200, "2 devices, mismatched: cuda:0 NVIDIA H200, cpu (why)"),
        (
            "cuda:0%60,cuda:0%24",
            H200,
            "2 devices, mismatched: cuda:0%60 NVIDIA H200, cuda:0%24 NVIDIA H200 (why)",
        ),
        (
            "cuda:0,cuda:1",
            PAIR,
            f"2 devices, mismatched: cuda:0 {CARD}, cuda:1 NVIDIA GeForce GTX 1060 6GB (why)",
        ),
        (
            "cuda:0,cuda:1",
            SIZES,
            f"2 devices, mismatched: cuda:0 {CARD} 16 GB, cuda:1 {CARD} 8 GB (why)",
        ),
    ],
)
def test_the_sentence_says_whether_they_match(devices: str, gpus: list[Gpu], sentence: str) -> None:
    assert describe_devices(parse_devices(devices), gpus, "why") == sentence


@pytest.mark.parametrize(
    ("devices", "gpus", "sentence"),
    [
        ("cuda:0,cuda:1", [], "2 devices: cuda:0, cuda:1 (why)"),
        ("cuda:0,cuda:1", PAIR[:1], f"2 devices: cuda:0 {CARD}, cuda:1 (why)"),
    ],
)
def test_what_could_not_be_read_is_called_neither_alike_nor_mismatched(
    devices: str, gpus: list[Gpu], sentence: str
) -> None:
    assert describe_devices(parse_devices(devices), gpus, "why") == sentence


def test_of_another_machines_devices_only_their_marks_are_known() -> None:
    def said(devices: str) -> str:
        return describe_devices(parse_devices(devices), H200, is_one_machine=False)

    assert said("cuda:0,cuda:0") == "2 devices on several machines: cuda:0, cuda:0"
    assert said("cpu,cpu") == "2 devices on several machines: cpu, cpu"
    assert said("cuda:0,cuda:0@0.5") == "2 devices, mismatched: cuda:0, cuda:0@0.5"
