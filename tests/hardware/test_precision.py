import pytest

from uneven.hardware.device import Device, parse_device
from uneven.hardware.gpus import Gpu
from uneven.hardware.precision import choose_precision

from .fakes import RTX_5060_TI, make_system


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
def test_a_gpu_by_its_architecture(sm: str | None, precision: str) -> None:
    name, why = choose_precision(Device("cuda", 0), make_system(flags=("amx_bf16",)), Gpu(0, "x", sm=sm))
    assert name == precision
    assert (sm or "unknown") in why


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_native_bf16(flag: str) -> None:
    name, why = choose_precision(parse_device("cpu@0.4"), make_system(flags=(flag,)), None)
    assert name == "bf16"
    assert flag in why


def test_a_cpu_beside_a_modern_gpu_is_still_a_cpu() -> None:
    assert choose_precision(Device("cpu"), make_system(), RTX_5060_TI)[0] == "fp32"


def test_a_cuda_device_of_which_nothing_is_known() -> None:
    assert choose_precision(Device("cuda", 3), make_system(), None)[0] == "fp32"
