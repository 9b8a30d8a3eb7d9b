"""The advice for each kind of machine: recorded ones in machines/, and the turns that a small change of one takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from uneven.errors import InputError
from uneven.hardware.cards import AmdGpu, AmdReport
from uneven.hardware.gpus import GpuReport
from uneven.hardware.torchbuild import TorchBuild
from uneven.install.advice import Advice, advise
from uneven.install.machine import Machine, read_record

MACHINES = Path(__file__).parent / "machines"
INDEX = "https://download.pytorch.org/whl/"

# kind of advice, build, what the advice must say
RIGHT = {
    "one-card": ("install", "cu130", ("pip install 'torch>=2.9'", f"{INDEX}cu130", "RTX 4090 (sm_89)")),
    "two-archs-no-wheel": (
        *("source", None),
        ("no wheel covers sm_61 beside sm_120", "uneven torch build --archs '6.1;12.0'", "12.8 or 12.9", "cu130"),
    ),
    "old-driver": ("install", "cu126", (f"{INDEX}cu126", "cu130 needs driver 580.65.06 or newer")),
    "driver-too-old-for-all": ("driver", None, ("470.256.02", "525.60.13 or newer (for cu126)", "580.65.06")),
    "rocm": ("install", "rocm6.4", (f"{INDEX}rocm6.4", "gfx1100", "ROCm 6.4.1", "not tested")),
    "wsl": ("install", "cu130", (f"{INDEX}cu130", "driver is that of Windows")),
    "jetson": ("manual", None, ("NVIDIA's own wheel", "JetPack 6", "R36.4", "--index-url URL")),
    "no-gpu": ("install", "cpu", (f"{INDEX}cpu", "no GPU")),
    "container-without-gpu": ("container", None, ("--gpus all", "no /dev/nvidia*", "--build cpu")),
    "mig": ("install", "cu130", (f"{INDEX}cu130", "MIG is on", "CUDA_VISIBLE_DEVICES")),
    "driver-newer-than-torch": ("install", "cu130", ("nothing: torch 2.13.0+cu130", "newer than torch's CUDA 13.0")),
    "card-without-driver": ("driver", None, ("nouveau", "install the NVIDIA driver 580.65.06")),
    "arm-server": ("install", "cu130", (f"{INDEX}cu130", "GH200")),
    "cpu-torch-beside-gpu": ("install", "cu126", ("replace torch 2.13.0+cpu", "--force-reinstall", f"{INDEX}cu126")),
}


def machine(name: str) -> Machine:
    return read_record(MACHINES / f"{name}.json")


def text_of(advice: Advice) -> str:
    return "\n".join([advice.why, advice.action, advice.command or "", *advice.notes])


def test_every_recorded_machine_has_its_right_advice() -> None:
    assert {path.stem for path in MACHINES.glob("*.json")} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_advice_each_time(name: str) -> None:
    kind, build, words = RIGHT[name]
    advice = advise(machine(name))
    assert (advice.kind, advice.build) == (kind, build)
    for word in words:
        assert word in text_of(advice)
    assert advice.is_installed == (name == "driver-newer-than-torch")
    assert (advice.command or "").startswith({"install": "pip install", "source": "uneven torch build"}.get(kind, ""))
    assert (advice.command is None) == (kind not in ("install", "source"))


def test_a_source_build_that_covers_all_is_right_as_it_is() -> None:
    built = TorchBuild(True, "2.13.0a0+git1", "12.9", None, ("sm_61", "sm_120"), gloo=True)
    advice = advise(replace(machine("two-archs-no-wheel"), torch=built))
    assert advice.is_installed
    assert advice.action.startswith("nothing: torch 2.13.0a0+git1")


def test_a_build_that_the_driver_cannot_run_is_replaced() -> None:
    newer = TorchBuild(True, "2.13.0+cu130", "13.0", None, ("sm_86",), gloo=True)
    advice = advise(replace(machine("old-driver"), torch=newer))
    assert (advice.build, advice.is_installed, advice.replaces) == ("cu126", False, True)


@pytest.mark.parametrize("version", ["2.7.1+cpu", None])
def test_a_torch_that_is_too_old_or_does_not_import_is_replaced(version: str | None) -> None:
    broken = TorchBuild(True, version, error=None if version else "libgomp.so.1: not found")
    advice = advise(replace(machine("no-gpu"), torch=broken))
    assert (advice.build, advice.is_installed, advice.replaces) == ("cpu", False, True)


def test_a_gpu_build_on_a_machine_without_gpu_may_stay() -> None:
    large = TorchBuild(True, "2.13.0+cu130", "13.0", None, ("sm_86",), gloo=True)
    advice = advise(replace(machine("no-gpu"), torch=large))
    assert advice.is_installed
    assert "takes some GB more" in text_of(advice)


def test_gpus_of_amd_that_no_wheel_knows_leave_the_cpu_build() -> None:
    integrated = replace(machine("rocm"), amd=AmdReport((AmdGpu(0, "gfx1036"),), None, True))
    assert advise(integrated).build == "cpu"
    assert "gfx1036" in advise(integrated).why
    newest = replace(machine("rocm"), amd=AmdReport((AmdGpu(0, "gfx1151"),), "7.1.0", False))
    assert advise(newest).build == "rocm7.1"
    assert "usermod -aG render,video" in text_of(advise(newest))


BESIDE_INTEGRATED = AmdReport((AmdGpu(0, "gfx1100"), AmdGpu(1, "gfx1036")), "6.4.1", True)


def test_an_integrated_gpu_that_no_rocm_wheel_knows_does_not_take_the_card_away() -> None:
    both = replace(machine("rocm"), amd=BESIDE_INTEGRATED)
    advice = advise(both)
    assert (advice.build, advice.covers) == ("rocm6.4", ("AMD GPU 0 (gfx1100)",))
    assert "rocm6.4 has no code for AMD GPU 1 (gfx1036): it stays unused" in advice.notes
    rocm = TorchBuild(True, "2.9.1+rocm6.4", None, "6.4", ("gfx90a:xnack-", "gfx1100"), gloo=True)
    assert advise(replace(both, torch=rocm)).is_installed
    for other in (replace(rocm, archs=("gfx90a",)), replace(rocm, hip=None, archs=())):
        assert not advise(replace(both, torch=other)).is_installed


def test_the_wheel_that_covers_most_gpus_of_amd_is_taken() -> None:
    newest = AmdReport((AmdGpu(0, "gfx1100"), AmdGpu(1, "gfx1151"), AmdGpu(2, "gfx1036")), None, True)
    assert advise(replace(machine("rocm"), amd=newest)).build == "rocm7.1"


@pytest.mark.parametrize("name", ["card-without-driver", "container-without-gpu"])
def test_an_integrated_gpu_of_amd_does_not_hide_a_card_of_nvidia(name: str) -> None:
    alone = advise(machine(name))
    integrated = AmdReport((AmdGpu(0, "gfx1036"),), None, True)
    assert advise(replace(machine(name), amd=integrated)) == alone
    usable = advise(replace(machine(name), amd=BESIDE_INTEGRATED))
    assert usable.build == "rocm6.4"
    assert f"{alone.why}; {alone.action}" in usable.notes


@pytest.mark.parametrize(
    ("cuda", "kind", "build", "says"),
    [
        ("13.0", "install", "cu130", "the build for all GPUs of today"),
        ("12.4", "install", "cu126", "the build for driver"),
        ("11.4", "driver", None, "too old for every wheel"),
        (None, "install", "cu130", "the build for all GPUs of today"),
    ],
)
def test_where_the_architecture_is_not_told_the_driver_decides(
    cuda: str | None, kind: str, build: str | None, says: str
) -> None:
    one = machine("one-card")
    gpus = tuple(replace(gpu, sm=None) for gpu in one.gpus.gpus)
    advice = advise(replace(one, gpus=replace(one.gpus, gpus=gpus, driver_cuda=cuda)))
    assert (advice.kind, advice.build) == (kind, build)
    assert says in advice.why
    assert ("525.60.13 or newer (for cu126)" in advice.action) == (kind == "driver")


def test_a_source_build_names_the_driver_it_needs_where_that_is_older() -> None:
    two = machine("two-archs-no-wheel")
    assert "driver" not in advise(two).action
    old = replace(two.gpus, driver="470.256.02", driver_cuda="11.4")
    assert advise(replace(two, gpus=old)).action.startswith("update the NVIDIA driver (470.256.02) to 525.60.13")


def test_beside_nvidia_a_gpu_of_amd_stays_unused() -> None:
    both = replace(machine("one-card"), amd=AmdReport((AmdGpu(0, "gfx1100"),), "6.4.1", True))
    advice = advise(both)
    assert advice.build == "cu130"
    assert "AMD's gfx1100 stays unused" in text_of(advice)


def test_jetson_by_its_release() -> None:
    jetson = machine("jetson")
    old = advise(replace(jetson, nvidia=replace(jetson.nvidia, jetson="R35.6")))
    assert "update to JetPack 6" in old.action
    thor = replace(machine("arm-server"), nvidia=replace(jetson.nvidia, jetson="R38.2"))
    assert advise(thor).build == "cu130"
    own = TorchBuild(True, "2.8.0", "12.6", None, ("sm_87",), gloo=True)
    assert advise(replace(jetson, torch=own)).is_installed


def test_wsl_with_an_old_driver_is_updated_in_windows_and_wsl_1_has_no_gpu() -> None:
    wsl = machine("wsl")
    old = replace(wsl, gpus=replace(wsl.gpus, driver="472.12", driver_cuda="11.4"))
    assert "in Windows, then: uneven setup" in advise(old).action
    first = replace(wsl.system, surroundings=replace(wsl.system.surroundings, wsl=1))
    advice = advise(replace(wsl, system=first, gpus=GpuReport(reason="nvidia-smi not found")))
    assert advice.build == "cpu"
    assert "wsl --set-version DISTRO 2" in text_of(advice)


def test_a_build_that_is_asked_for() -> None:
    advice = advise(machine("two-archs-no-wheel"), "cu126")
    assert (advice.kind, advice.build) == ("install", "cu126")
    assert advice.covers == ("NVIDIA GeForce GTX 1060 6GB (sm_61)",)
    with pytest.raises(InputError, match=r"--build cu999: allowed are cpu, cu130"):
        advise(machine("no-gpu"), "cu999")


@pytest.mark.parametrize(
    ("name", "build", "says"),
    [
        ("old-driver", "cu130", ("is too old for cu130, which needs 580.65.06 or newer",)),
        ("two-archs-no-wheel", "cu126", ("cu126 has no code for NVIDIA GeForce RTX 5060 Ti (sm_120)",)),
        ("arm-server", "rocm7.1", ("no rocm7.1 build for Linux on aarch64", "rocm7.1 has no code for NVIDIA GH200")),
        ("jetson", "cu126", ("do not run on its GPU",)),
        ("rocm", "cu130", ("cu130 has no code for AMD GPU 0 (gfx1100)",)),
        ("no-gpu", "cu130", ("no GPU was found that cu130 could run on",)),
        ("one-card", "cpu", ("cpu has no code for NVIDIA GeForce RTX 4090 (sm_89)",)),
        ("one-card", "cu130", ()),
        ("no-gpu", "cpu", ()),
        ("rocm", "rocm6.4", ()),
    ],
)
def test_a_build_that_is_asked_for_and_cannot_work_is_warned_of(name: str, build: str, says: tuple[str, ...]) -> None:
    notes = "\n".join(advise(machine(name), build).notes)
    assert all(words in notes for words in says), notes
    assert bool(notes) == bool(says)
