"""Precision and backend that follow from a run's devices, and the sentence that describes the devices."""

from dataclasses import replace

import pytest

from uneven import InputError
from uneven.hardware.choices import choose_backend, choose_precision, describe_devices
from uneven.hardware.device import Device, parse_device, parse_devices
from uneven.hardware.gpus import Gpu

from .fakes import GIB, GTX_1060, RTX_5060_TI, make_system

H200 = [Gpu(index, "NVIDIA H200", 140 * GIB + index * 2**20) for index in range(2)]
PAIR = [RTX_5060_TI, GTX_1060]
CARD = "NVIDIA GeForce RTX 5060 Ti"
SIZES = [RTX_5060_TI, replace(RTX_5060_TI, index=1, memory_bytes=8 * GIB)]


@pytest.mark.parametrize(
    ("sm", "precision"),
    [
        ("sm_120", "bf16"),
        ("sm_90", "bf16"),
        ("sm_80", "bf16"),
        ("sm_75", "fp16"),
        ("sm_70", "fp16"),
        ("sm_61", "fp32"),
        (None, "fp32"),
    ],
)
def test_the_precision_of_a_gpu_follows_from_its_architecture(sm: str | None, precision: str) -> None:
    name, why = choose_precision(Device("cuda", 0), make_system(flags=("amx_bf16",)), Gpu(0, "x", sm=sm))
    assert name == precision
    assert (sm or "unknown") in why


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_native_bf16_uses_it(flag: str) -> None:
    name, why = choose_precision(parse_device("cpu@0.4"), make_system(flags=(flag,)), None)
    assert name == "bf16"
    assert flag in why


def test_a_cpu_beside_a_modern_gpu_is_still_a_cpu() -> None:
    assert choose_precision(Device("cpu"), make_system(), RTX_5060_TI)[0] == "fp32"


def test_an_unknown_gpu_uses_fp32() -> None:
    assert choose_precision(Device("cuda", 3), make_system(), None)[0] == "fp32"


@pytest.mark.parametrize(
    ("requested", "devices", "chosen", "words"),
    [
        ("auto", "cuda:0,cuda:1", "nccl", "a CUDA device of its own"),
        ("auto", "cuda:0,cpu", "shm", "a CUDA device for every rank"),
        ("auto", "cpu,cpu", "shm", "a CUDA device for every rank"),
        ("auto", "cuda:0,cuda:0", "shm", "share a GPU"),
        ("auto", "cuda:0%60,cuda:0%24", "shm", "slices"),
        ("cpu", "cuda:0,cuda:1", "shm", "as requested"),
        ("shm", "cuda:0,cuda:1", "shm", "as requested"),
        ("gloo", "cpu,cpu", "gloo", "as requested"),
        ("nccl", "cuda:0,cuda:1", "nccl", "as requested"),
        ("nccl", "cuda:0,cuda:0", "nccl", "take turns"),
    ],
)
def test_the_backend_follows_from_the_devices(requested: str, devices: str, chosen: str, words: str) -> None:
    backend, why = choose_backend(requested, parse_devices(devices), has_nccl=True)
    assert backend == chosen
    assert words in why


@pytest.mark.parametrize(
    ("devices", "has_nccl", "words"),
    [("cuda:0,cpu", True, "every rank"), ("cuda:0%60,cuda:0%24", True, "slices"), ("cuda:0,cuda:1", False, "without")],
)
def test_nccl_that_is_not_possible_is_refused_with_the_reason(devices: str, has_nccl: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose_backend("nccl", parse_devices(devices), has_nccl)
    assert choose_backend("auto", parse_devices(devices), has_nccl)[0] == "shm"


def test_ranks_that_cannot_share_memory_use_gloo_and_say_why() -> None:
    devices = parse_devices("cuda:0,cpu")
    for requested in ("auto", "cpu"):
        backend, why = choose_backend(requested, devices, True, why_not_shared="two machines")
        assert (backend, why.endswith("; two machines")) == ("gloo", True)
    assert choose_backend("auto", parse_devices("cuda:0,cuda:1"), True, why_not_shared="two machines")[0] == "nccl"
    with pytest.raises(InputError, match=r"backend='shm' with devices='cuda:0,cpu': two machines; use backend='gloo'"):
        choose_backend("shm", devices, True, why_not_shared="two machines")


def test_between_machines_one_rank_of_each_speaks_where_a_machine_has_several() -> None:
    devices = parse_devices("cpu,cpu,cuda:0,cpu")
    speaks = "; ranks of a machine share memory, and one of each machine speaks over Gloo"
    for requested, why in (("cpu", "as requested"), ("auto", "NCCL needs a CUDA device for every rank")):
        assert choose_backend(requested, devices, True, machines=(0, 1, 1, 2)) == ("cpu", why + speaks)
        alone = choose_backend(requested, devices, True, machines=(0, 1, 2, 3))
        assert alone == ("gloo", f"{why}; every rank is on another machine")
        assert choose_backend(requested, devices, True, machines=(0, 0, 0, 0)) == ("shm", why)
    assert choose_backend("gloo", devices, True, machines=(0, 1, 1, 2)) == ("gloo", "as requested")
    whole = parse_devices("cuda:0,cuda:1,cuda:0")
    assert choose_backend("auto", whole, True, crowded=False, machines=(0, 0, 1))[0] == "nccl"
    with pytest.raises(InputError, match=r"backend='shm' with .*: the ranks are on several machines; use backend='aut"):
        choose_backend("shm", devices, True, machines=(0, 1, 1, 2))


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
            f"2 devices, mismatched: cuda:0 {CARD}, cuda:1 {CARD} (why)",
        ),
    ],
)
def test_the_line_states_whether_devices_match(devices: str, gpus: list[Gpu], sentence: str) -> None:
    assert describe_devices(parse_devices(devices), gpus, "why") == sentence


@pytest.mark.parametrize(
    ("devices", "gpus", "sentence"),
    [
        ("cuda:0,cuda:1", [], "2 devices: cuda:0, cuda:1 (why)"),
        ("cuda:0,cuda:1", PAIR[:1], f"2 devices: cuda:0 {CARD}, cuda:1 (why)"),
    ],
)
def test_unknown_gpus_are_called_neither_alike_nor_mismatched(devices: str, gpus: list[Gpu], sentence: str) -> None:
    assert describe_devices(parse_devices(devices), gpus, "why") == sentence


def test_of_another_machines_devices_only_speed_and_slice_are_known() -> None:
    def describe(devices: str) -> str:
        return describe_devices(parse_devices(devices), H200, is_one_machine=False)

    assert describe("cuda:0,cuda:0") == "2 devices on several machines: cuda:0, cuda:0"
    assert describe("cpu,cpu") == "2 devices on several machines: cpu, cpu"
    assert describe("cuda:0,cuda:0@0.5") == "2 devices, mismatched: cuda:0, cuda:0@0.5"
