import sys
from pathlib import Path

import pytest

from uneven.hardware.gpus import has_nvidia_card, read_gpus, read_visible
from uneven.hardware.torchbuild import TorchBuild, read_torch

from .fakes import CPU_BUILD, GTX_1060, RTX_5060_TI, TWO_GPUS, make_pynvml, make_torch, write_tree


def test_two_different_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml())
    report = read_gpus()
    assert report.gpus == (RTX_5060_TI, GTX_1060)
    assert (report.driver, report.driver_cuda) == ("580.82.07", "13.0")
    assert report.reason is None


def test_a_binding_that_lacks_half_its_calls_still_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make_pynvml()
    for name in ("nvmlDeviceGetNumGpuCores", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"):
        delattr(fake, name)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    gpu = read_gpus().gpus[1]
    assert (gpu.name, gpu.sm) == (GTX_1060.name, "sm_61")
    assert (gpu.cores, gpu.uuid, gpu.memory_bytes) == (None, None, None)


def test_a_gpu_that_fell_off_the_bus_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make_pynvml()
    handle_of = fake.nvmlDeviceGetHandleByIndex

    def lose_first(index: int) -> object:
        if index == 0:
            raise RuntimeError("GPU is lost")
        return handle_of(index)

    monkeypatch.setattr(fake, "nvmlDeviceGetHandleByIndex", lose_first)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert [gpu.index for gpu in read_gpus().gpus] == [1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver (libnvidia-ml.so not found)"),
        ("NVMLError_DriverNotLoaded", "kernel module is not loaded"),
        ("NVMLError_LibRmVersionMismatch", "reboot"),
        ("NVMLError_Whatever", "NVML does not start: boom"),
    ],
)
def test_no_gpus_for_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, reason: str) -> None:
    failure = type(error, (Exception,), {})("boom")
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml(init_error=failure))
    monkeypatch.setenv("PATH", str(tmp_path))
    report = read_gpus()
    assert report.gpus == ()
    assert report.reason is not None
    assert reason in report.reason


def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml(gpus=()))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus().reason == "the NVIDIA driver lists no GPU"


@pytest.mark.parametrize(
    ("vendor", "kind", "is_card"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_a_card_without_a_driver_is_on_the_bus(tmp_path: Path, vendor: str, kind: str, is_card: bool) -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    root = write_tree(tmp_path, {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"})
    assert has_nvidia_card(root) == is_card


def test_the_number_is_cudas_and_the_facts_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA numbers the GPUs the other way round here; the cores must follow the UUID.
    monkeypatch.setitem(sys.modules, "torch", make_torch(gpus=(GTX_1060, RTX_5060_TI)))
    first, second = read_visible(read_torch(), TWO_GPUS).gpus
    assert (first.index, first.name, first.cores) == (0, GTX_1060.name, 1280)
    assert (second.index, second.name, second.cores) == (1, RTX_5060_TI.name, 4608)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (TorchBuild(installed=False), "torch is not installed"),
        (TorchBuild(installed=True, error="OSError: libcudart"), "torch does not import"),
        (CPU_BUILD, "torch 2.13.0+cpu is a CPU build"),
    ],
)
def test_no_cuda_for_a_reason(build: TorchBuild, error: str) -> None:
    visible = read_visible(build, TWO_GPUS)
    assert visible.gpus == ()
    assert visible.error == error
