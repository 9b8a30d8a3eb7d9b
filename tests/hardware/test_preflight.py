import sys
from dataclasses import replace

import pytest

from uneven.errors import InputError, MachineError
from uneven.hardware import preflight
from uneven.hardware.device import Device, parse_device
from uneven.hardware.gpus import usable_devices
from uneven.hardware.preflight import check_device, refuse_unsupported

from .fakes import GTX_1060, RTX_5060_TI, make_pynvml, make_torch


@pytest.fixture
def put_machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Put a torch and the driver's GPUs in place of this machine's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(driver_gpus=(), **torch) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setitem(sys.modules, "torch", make_torch(**torch))
        monkeypatch.setitem(sys.modules, "pynvml", make_pynvml(gpus=tuple(driver_gpus)))
        monkeypatch.setenv("PATH", "")

    return put


@pytest.mark.parametrize("system", ["Darwin", "Windows", ""])
def test_other_systems_are_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr(preflight, "installed_version", lambda: "2.13.0")
    with pytest.raises(MachineError) as caught:
        refuse_unsupported({})
    message = str(caught.value)
    assert system in message
    assert "Linux; torch 2.8, 2.11 and 2.13" in message
    assert "UNEVEN_UNTESTED=1" in message
    assert "\n" not in message
    refuse_unsupported({"UNEVEN_UNTESTED": "1"})


@pytest.mark.parametrize(("version", "named"), [(None, "not installed"), ("2.7.1+cu126", "2.7.1+cu126")])
@pytest.mark.parametrize("environ", [{}, {"UNEVEN_UNTESTED": "1"}])
def test_a_missing_or_old_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, named: str, environ: dict[str, str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(preflight, "installed_version", lambda: version)
    with pytest.raises(MachineError, match="uneven setup") as caught:
        refuse_unsupported(environ)
    assert named in str(caught.value)
    assert (version is None) == isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.20.1", "3.0.0", "unknown"])
def test_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(preflight, "installed_version", lambda: version)
    refuse_unsupported({})


def test_a_cpu_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    check_device(parse_device("cpu@0.4"))


def test_an_index_that_is_not_there(put_machine) -> None:  # type: ignore[no-untyped-def]
    two = (RTX_5060_TI, replace(RTX_5060_TI, uuid="GPU-cccc"))
    put_machine(two, gpus=two)
    check_device(Device("cuda", 1))
    with pytest.raises(InputError) as caught:
        check_device(parse_device("cuda:9@0.5"))
    message = str(caught.value)
    assert "'cuda:9@0.5'" in message
    assert "this machine has cpu, cuda:0, cuda:1" in message
    assert "uneven devices" in message


def test_a_cpu_build_on_a_machine_without_gpus(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine(version="2.13.0+cpu", cuda=None)
    with pytest.raises(InputError) as caught:
        check_device(Device("cuda", 0))
    message = str(caught.value)
    assert "'cuda:0': this machine has cpu (torch 2.13.0+cpu is a CPU build" in message
    assert "uneven diagnose" in message


def test_a_cpu_build_on_a_machine_with_a_gpu(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine((RTX_5060_TI,), version="2.13.0+cpu", cuda=None)
    with pytest.raises(MachineError) as caught:
        check_device(Device("cuda", 0))
    message = str(caught.value)
    assert "RTX 5060 Ti, but torch 2.13.0+cpu is a CPU build" in message
    assert "uneven diagnose" in message


def test_a_gpu_that_torch_has_no_code_for(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine((RTX_5060_TI, GTX_1060), gpus=(RTX_5060_TI, GTX_1060))
    check_device(Device("cuda", 0))
    with pytest.raises(MachineError, match="no code for sm_61") as caught:
        check_device(Device("cuda", 1))
    assert "uneven diagnose" in str(caught.value)
    assert usable_devices() == [Device("cuda", 0)]


def test_a_slice_needs_a_gpu_that_can_be_sliced_and_mps(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine((RTX_5060_TI, GTX_1060), gpus=(RTX_5060_TI, GTX_1060), archs=("sm_61", "sm_120"))
    check_device(Device("cuda", 1))
    with pytest.raises(MachineError, match=r"slices need sm_70 or newer, this is sm_61; 'cuda:1@0\.4'"):
        check_device(Device("cuda", 1, percent=60))
    with pytest.raises(MachineError, match="CUDA MPS is not installed"):  # nothing is on PATH there
        check_device(Device("cuda", 0, percent=60))


def test_cuda_that_does_not_start_leaves_the_cpu(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine((RTX_5060_TI,), start_error="The NVIDIA driver on your system is too old\nmore lines")
    assert usable_devices() == [Device("cpu")]
    with pytest.raises(MachineError, match="driver on your system is too old; run"):
        check_device(Device("cuda", 0))


def test_auto_without_gpus_is_one_cpu(put_machine) -> None:  # type: ignore[no-untyped-def]
    put_machine(version="2.13.0+cpu", cuda=None)
    assert usable_devices() == [Device("cpu")]


def test_hidden_gpus_are_reported_as_hidden(put_machine, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    put_machine((RTX_5060_TI,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES='' hides every GPU"):
        check_device(Device("cuda", 0))


def test_a_build_for_rocm_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(preflight, "installed_version", lambda: "2.10.0+rocm7.1")
    with pytest.raises(MachineError, match="ROCm"):
        refuse_unsupported({})
    refuse_unsupported({"UNEVEN_UNTESTED": "1"})
