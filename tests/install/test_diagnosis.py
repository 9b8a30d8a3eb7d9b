import json
from dataclasses import replace
from typing import Any

import pytest

from tests.hardware.fakes import CPU_BUILD, CU128_BUILD, GTX_1060, NO_GPUS, RTX_5060_TI, TWO_GPUS, make_system
from uneven.files import json_text
from uneven.hardware.gpus import GpuReport, VisibleGpus
from uneven.hardware.torchbuild import Support, TorchBuild
from uneven.install.advice import Machine
from uneven.install.diagnosis import Diagnosis, diagnose

ALL_SEEN, NONE_SEEN = VisibleGpus(TWO_GPUS.gpus), VisibleGpus()


def diagnose_fakes(visible: VisibleGpus = NONE_SEEN, **parts: Any) -> Diagnosis:
    machine = Machine(**{"system": make_system(), "gpus": NO_GPUS, "torch": CPU_BUILD, **parts})
    return diagnose(machine, visible, ())


def test_a_machine_without_gpus_is_fine() -> None:
    diagnosis = diagnose_fakes()
    assert diagnosis.is_fine
    assert any("no NVIDIA GPU: no NVIDIA driver" in note for note in diagnosis.notes)


@pytest.mark.parametrize("gpus", [TWO_GPUS, GpuReport((RTX_5060_TI,), "580.82.07", "13.0"), NO_GPUS])
@pytest.mark.parametrize("torch", [CPU_BUILD, CU128_BUILD])
def test_it_finds_a_problem_where_setup_has_something_to_do(gpus: GpuReport, torch: TorchBuild) -> None:
    diagnosis = diagnose_fakes(gpus=gpus, torch=torch, visible=VisibleGpus(gpus.gpus))
    assert diagnosis.is_fine == diagnosis.advice.is_installed


def test_a_gpu_that_torch_was_not_built_for() -> None:
    diagnosis = diagnose_fakes(gpus=TWO_GPUS, torch=CU128_BUILD, visible=ALL_SEEN)
    assert [fit.support for fit in diagnosis.compatibility] == [Support.OK, Support.MISSING]
    (problem,) = diagnosis.problems
    assert "GPU 1 (NVIDIA GeForce GTX 1060 6GB): torch has no code for sm_61" in problem.what
    assert "--archs '6.1;12.0'" in problem.fix
    assert [(choice.device, choice.precision) for choice in diagnosis.precision] == [
        ("cpu", "fp32"),
        ("cuda:0", "bf16"),
        ("cuda:1", "fp32"),
    ]


@pytest.mark.parametrize(
    ("parts", "what", "fix"),
    [
        ({"torch": TorchBuild(installed=False)}, "torch is not installed", "uneven setup"),
        (
            {"torch": TorchBuild(installed=True, error="OSError: libgomp.so.1")},
            "does not import: OSError: libgomp.so.1",
            "uneven setup --force",
        ),
        (
            {"torch": replace(CPU_BUILD, version="2.7.1")},
            "torch 2.7.1 is too old",
            "uneven setup",
        ),
        ({"torch": replace(CPU_BUILD, gloo=False)}, "no Gloo", "uneven setup --force"),
        (
            {"system": make_system(platform="Darwin")},
            "this is Darwin, but only Linux",
            "UNEVEN_UNTESTED=1",
        ),
        ({"torch": replace(CPU_BUILD, hip="6.4")}, "a build for ROCm", "UNEVEN_UNTESTED=1"),
        (
            {"gpus": GpuReport((RTX_5060_TI,), "580.82.07", "13.0")},
            "RTX 5060 Ti, but torch 2.13.0+cpu is a CPU build",
            "uneven setup",
        ),
        (
            {
                "gpus": GpuReport((GTX_1060,), "550.54", "12.4"),
                "torch": replace(CU128_BUILD, cuda="13.0", archs=("sm_60",)),
                "visible": VisibleGpus(error="CUDA does not start: too old"),
            },
            "driver 550.54 is for CUDA 12.4, too old for torch's CUDA 13.0",
            "update the NVIDIA driver to 580.65.06 or newer",
        ),
        (
            {
                "gpus": GpuReport((RTX_5060_TI,), "580.82.07", "13.0"),
                "torch": CU128_BUILD,
                "visible": VisibleGpus(error="CUDA shows no device"),
            },
            "torch cannot use it: CUDA shows no device",
            "CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_each_problem_names_its_fix(parts: dict[str, Any], what: str, fix: str) -> None:
    diagnosis = diagnose_fakes(**parts)
    assert not diagnosis.is_fine
    (problem,) = diagnosis.problems
    assert what in problem.what
    assert fix in problem.fix


def test_an_old_driver_that_works_is_no_problem() -> None:
    # Data-centre GPUs with CUDA's forward compatibility package: the driver's own number is lower.
    gpus = GpuReport((RTX_5060_TI,), "550.54", "12.4")
    build = replace(CU128_BUILD, cuda="13.0")
    assert diagnose_fakes(gpus=gpus, torch=build, visible=VisibleGpus(gpus.gpus)).is_fine


def test_a_gpu_too_old_for_every_torch_is_a_note() -> None:
    old = replace(GTX_1060, name="Tesla K40c", sm="sm_35")
    for gpus, torch in (((old,), CPU_BUILD), ((RTX_5060_TI, old), CU128_BUILD)):
        report = GpuReport(gpus, "580.82.07", "13.0")
        diagnosis = diagnose_fakes(gpus=report, torch=torch, visible=VisibleGpus(gpus))
        assert diagnosis.is_fine
        assert "no torch of today runs on Tesla K40c (sm_35): it stays unused" in diagnosis.notes


@pytest.mark.parametrize(("is_container", "fix"), [(False, "install the NVIDIA driver"), (True, "--gpus all")])
def test_a_gpu_that_the_driver_does_not_list_is_a_problem_by_the_advice(is_container: bool, fix: str) -> None:
    system = make_system(is_container=is_container)
    for torch in (CPU_BUILD, TorchBuild(installed=False)):
        found = diagnose_fakes(system=system, torch=torch, has_nvidia_card=True)
        assert fix in found.problems[-1].fix


def test_json_has_the_documented_keys_and_plain_values() -> None:
    again = json.loads(json_text(diagnose_fakes(gpus=TWO_GPUS, torch=CU128_BUILD, visible=ALL_SEEN)))
    assert list(again) == [
        "version",
        "system",
        "gpus",
        "torch",
        "compatibility",
        "precision",
        "network",
        "problems",
        "notes",
        "advice",
        "builds",
    ]
    assert again["compatibility"][1]["support"] == "MISSING"
    assert again["torch"]["nccl_version"] == "2.27.5"
    assert again["gpus"]["gpus"][0]["sm"] == "sm_120"
