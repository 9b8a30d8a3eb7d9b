import stat
import sys
from pathlib import Path

import pytest

from uneven.hardware.gpus import read_gpus

from .fakes import GIB, GTX_1060, RTX_5060_TI, make_pynvml

SMI = """#!/bin/sh
case "$1" in
  *{refused}*) echo 'Field is not a valid field to query.'; exit 2 ;;
  --query-gpu=*compute_cap*)
    echo '0, NVIDIA GeForce RTX 5060 Ti, 16384, GPU-aaaa, 00000000:01:00.0, Disabled, 12.0'
    echo '1, NVIDIA GeForce GTX 1060 6GB, 6144, GPU-bbbb, 00000000:02:00.0, [N/A], 6.1' ;;
  --query-gpu=*)
    echo '0, NVIDIA GeForce RTX 5060 Ti, [N/A], GPU-aaaa, 00000000:01:00.0, Enabled' ;;
  *) echo '| NVIDIA-SMI 580.82.07    Driver Version: 580.82.07    CUDA Version: 13.0 |' ;;
esac
"""


@pytest.fixture
def put_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Put a fake nvidia-smi on an otherwise bare PATH, with no NVML binding to ask first."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(text: str) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(text)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    return put


def test_two_different_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml())
    report = read_gpus()
    assert report.gpus == (RTX_5060_TI, GTX_1060)
    assert (report.driver, report.driver_cuda, report.source) == ("580.82.07", "13.0", "NVML")
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


def test_nvidia_smi_where_nvml_is_missing(put_smi) -> None:  # type: ignore[no-untyped-def]
    put_smi(SMI.format(refused="nothing"))
    report = read_gpus()
    assert [(gpu.name, gpu.sm, gpu.memory_bytes) for gpu in report.gpus] == [
        (RTX_5060_TI.name, "sm_120", 16 * GIB),
        (GTX_1060.name, "sm_61", 6 * GIB),
    ]
    assert [gpu.mig for gpu in report.gpus] == [False, None]
    assert (report.driver, report.driver_cuda, report.source) == ("580.82.07", "13.0", "nvidia-smi")


def test_an_old_nvidia_smi_without_compute_cap(put_smi) -> None:  # type: ignore[no-untyped-def]
    put_smi(SMI.format(refused="compute_cap"))
    (gpu,) = read_gpus().gpus
    assert gpu.sm is None
    assert gpu.memory_bytes is None
    assert gpu.mig is True


def test_a_broken_nvidia_smi_is_no_gpu(put_smi) -> None:  # type: ignore[no-untyped-def]
    put_smi("#!/bin/sh\nexit 9\n")
    report = read_gpus()
    assert report.gpus == ()
    assert report.reason


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


def test_the_mps_daemon_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_pynvml())
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert read_gpus().mps_running is False
    (tmp_path / "control").write_text("")
    assert read_gpus().mps_running is True
