"""The advice for each kind of machine, and the turns that a small change of one takes."""

from dataclasses import replace

import pytest

from tests.hardware.fakes import CPU_BUILD, NO_GPUS, TWO_GPUS, make_system
from uneven.errors import InputError
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.hardware.system import Cpu
from uneven.hardware.torchbuild import TorchBuild
from uneven.install.advice import WHEELS, Advice, Machine, advise

NO_TORCH = TorchBuild(installed=False)
CU130 = TorchBuild(True, "2.13.0+cu130", "13.0", None, WHEELS[0].archs, gloo=True)
ARM = make_system(cpu=Cpu("Neoverse-V2", "aarch64", ()))


def machine(
    *sms: str | None, driver: str = "580.82.07", cuda: str | None = "13.0", torch: TorchBuild = NO_TORCH
) -> Machine:
    gpus = tuple(Gpu(index, f"GPU {index}", sm=sm) for index, sm in enumerate(sms))
    return Machine(make_system(), GpuReport(gpus, driver, cuda) if gpus else NO_GPUS, torch)


def text_of(advice: Advice) -> str:
    return "\n".join([advice.why, advice.action, *advice.notes])


@pytest.mark.parametrize(
    ("found", "kind", "build", "words"),
    [
        (machine("sm_89"), "install", "cu130", ("has code for GPU 0 (sm_89)",)),
        (machine("sm_61"), "install", "cu126", ("cu126 has code for GPU 0 (sm_61)",)),
        (machine("sm_61", "sm_90"), "install", "cu126", ()),
        (machine("sm_70", "sm_120"), "install", "cu128", ()),
        (machine("sm_121"), "install", "cu130", ()),
        (machine("sm_140"), "install", "cu130", ()),  # newer than every wheel: from PTX
        (
            machine("sm_86", driver="550.54", cuda="12.4"),
            "install",
            "cu126",
            ("cu130 needs driver 580.65.06 or newer",),
        ),
        (machine("sm_120", driver="570.1", cuda="12.8"), "install", "cu128", ()),
        (machine("sm_86", driver="470.2", cuda="11.4"), "driver", None, ("525.60.13 or newer (for cu126)", "580.65")),
        (machine("sm_35"), "install", "cpu", ("no torch of today runs on GPU 0 (sm_35)",)),
        (machine("sm_35", "sm_89"), "install", "cu130", ("GPU 0 (sm_35): it stays unused",)),
        (machine(), "install", "cpu", ("no NVIDIA GPU: no NVIDIA driver",)),
        (replace(machine("sm_90"), system=ARM), "install", "cu130", ()),
        (replace(machine("sm_75"), system=ARM), "source", None, ()),
        (replace(machine(), has_nvidia_card=True), "driver", None, ("install the NVIDIA driver 580.65.06",)),
        (
            Machine(make_system(is_container=True), NO_GPUS, has_nvidia_card=True),
            *("container", None),
            ("--gpus all", "--build cpu"),
        ),
        (
            machine("sm_61", "sm_120"),
            *("source", None),
            (
                *("no prebuilt torch covers sm_61 beside sm_120", "uneven torch build --archs '6.1;12.0'"),
                *("CUDA 12.8 to 12.9", "--build cu130` runs GPU 1 (sm_120) alone", "cu126` runs GPU 0 (sm_61) alone"),
            ),
        ),
        (
            machine("sm_61", "sm_120", driver="470.2", cuda="11.4"),
            *("source", None),
            ("update the NVIDIA driver (470.2) to 525.60.13",),
        ),
    ],
)
def test_the_right_advice_each_time(found: Machine, kind: str, build: str | None, words: tuple[str, ...]) -> None:
    advice = advise(found)
    assert (advice.kind, advice.build, advice.is_installed) == (kind, build, False)
    for word in words:
        assert word in text_of(advice)
    assert advice.fix == ("uneven setup" if kind == "install" else advice.action)


@pytest.mark.parametrize(("cuda", "build"), [("13.0", "cu130"), ("12.4", "cu126"), ("11.4", None), (None, "cu130")])
def test_where_the_architecture_is_not_told_the_driver_decides(cuda: str | None, build: str | None) -> None:
    advice = advise(machine(None, cuda=cuda))
    assert (advice.kind, advice.build) == ("install" if build else "driver", build)


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (machine("sm_89", torch=CU130), True),
        (machine("sm_89", torch=CPU_BUILD), False),
        (machine("sm_61", torch=CU130), False),
        (machine("sm_89", driver="550.54", cuda="12.4", torch=CU130), False),
        (machine("sm_35", torch=CPU_BUILD), True),
        (machine(torch=CPU_BUILD), True),
        (machine(torch=CU130), True),
        (machine(torch=replace(CPU_BUILD, version="2.7.1+cpu")), False),
        (machine(torch=replace(CPU_BUILD, version=None, error="libgomp.so.1: not found")), False),
        (machine("sm_61", "sm_120", torch=TorchBuild(True, "2.13.0", "12.9", None, ("sm_61", "sm_120"))), True),
    ],
)
def test_a_torch_that_runs_on_everything_stays_and_others_are_replaced(found: Machine, is_right: bool) -> None:
    advice = advise(found)
    assert (advice.is_installed, advice.replaces) == (is_right, not is_right)
    assert advice.action.startswith("nothing: torch" if is_right else "replace torch")


def test_what_a_user_has_to_know_beside_the_build() -> None:
    assert "takes some GB more" in text_of(advise(machine(torch=CU130)))
    sliced = machine("sm_90")
    gpus = tuple(replace(gpu, mig=True) for gpu in sliced.gpus.gpus)
    assert "CUDA_VISIBLE_DEVICES" in text_of(advise(replace(sliced, gpus=replace(sliced.gpus, gpus=gpus))))


@pytest.mark.parametrize(
    ("found", "build", "says"),
    [
        (machine("sm_86", driver="550.54", cuda="12.4"), "cu130", "is too old for cu130, which needs 580.65.06"),
        (Machine(make_system(), TWO_GPUS), "cu126", "cu126 has no code for NVIDIA GeForce RTX 5060 Ti (sm_120)"),
        (machine("sm_89"), "cpu", "cpu has no code for GPU 0 (sm_89)"),
        (machine("sm_89"), "cu130", ""),
        (machine("sm_89"), "cu132", ""),  # not in the table: pip finds out
        (machine(), "cpu", ""),
    ],
)
def test_a_build_that_is_asked_for_is_taken_and_warned_of(found: Machine, build: str, says: str) -> None:
    advice = advise(found, build)
    assert (advice.kind, advice.build) == ("install", build)
    assert says in "\n".join(advice.notes)
    assert bool(advice.notes) == bool(says)


def test_a_build_that_is_asked_for_and_there_and_one_that_cannot_be() -> None:
    assert advise(machine(torch=CPU_BUILD), "cpu").is_installed
    assert advise(machine(torch=CPU_BUILD), "cu126").replaces
    with pytest.raises(InputError, match="allowed are cpu"):
        advise(machine(), "gpu")


def test_an_index_of_ones_own_is_taken_where_nothing_else_can_be_installed() -> None:
    two = machine("sm_61", "sm_120")
    advice = advise(two, index_url="https://mirror/simple")
    assert (advice.kind, advice.package, advice.index_url) == ("install", "torch>=2.8", "https://mirror/simple")
    assert advise(machine("sm_61"), index_url="https://mirror/simple").package == "torch>=2.8,<2.15"
