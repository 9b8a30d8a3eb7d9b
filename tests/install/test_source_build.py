"""The plan of a source build, on machines that are not this one; and its whole course with tiny steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.install.test_builds import ANSWER
from uneven.errors import InputError, MachineError
from uneven.install import builds, source_build
from uneven.install.source_build import BuildMachine, SourceBuild, docker_command, plan_source_build, run_source_build
from uneven.install.steps import Step, StepError
from uneven.install.toolkits import Toolkit, parse_archs

MACHINE = BuildMachine(
    cores=16,
    memory_bytes=24 * 10**9,
    free_bytes=100 * 10**9,
    tools={"git": "/usr/bin/git", "g++": "/usr/bin/g++", "cmake": None, "ninja": None},
    has_python_headers=True,
    toolkits=(Toolkit(Path("/usr/local/cuda-13.0"), (13, 0)), Toolkit(Path("/usr/local/cuda-12.8"), (12, 8))),
    has_cudnn=True,
)
PAIR = parse_archs("6.1;12.0")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path))


def test_the_plan_for_the_pair_that_no_wheel_covers(tmp_path: Path) -> None:
    plan = plan_source_build(PAIR, MACHINE)
    assert (plan.name, plan.missing, plan.notes) == ("sm61-sm120", (), ())
    assert plan.toolkit == MACHINE.toolkits[1]  # and not 13.0, which has no sm_61
    assert (plan.jobs, plan.hours) == (6, 4.0)  # the build that the estimate is from
    steps = {step.name: step for step in plan.steps}
    order = ("environment", "folder of the sources", "sources", "checkout", "submodules", "requirements", "wheel")
    assert tuple(steps) == (*order, "torch", "uneven")
    assert steps["sources"].command[-1] == "+refs/tags/v2.13.0:refs/tags/v2.13.0"
    assert "--recursive" in steps["submodules"].command
    environment = steps["wheel"].environment
    assert environment["TORCH_CUDA_ARCH_LIST"] == "6.1;12.0"
    assert environment["CUDA_HOME"] == "/usr/local/cuda-12.8"
    assert (environment["MAX_JOBS"], environment["USE_CUDNN"], environment["USE_FLASH_ATTENTION"]) == ("6", "1", "1")
    assert environment["PYTORCH_BUILD_VERSION"] == "2.13.0+sm61.sm120"
    assert steps["torch"].command[-1] == "torch==2.13.0+sm61.sm120"
    assert steps["wheel"].path == (str(tmp_path / "torch/sm61-sm120/bin"), "/usr/local/cuda-12.8/bin")
    assert str(plan.log).startswith(str(tmp_path / "torch" / "sm61-sm120"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_given_is_taken() -> None:
    plan = plan_source_build(parse_archs("7.5"), MACHINE, torch="2.9.1", jobs=3, name="turing")
    assert (plan.name, plan.jobs, plan.jobs_why) == ("turing", 3, "as given")
    wheel = next(step for step in plan.steps if step.name == "wheel")
    assert wheel.environment["USE_FLASH_ATTENTION"] == "0"
    assert wheel.environment["CUDA_HOME"] == "/usr/local/cuda-13.0"
    for bad in ({"torch": "2.5.0"}, {"torch": "main"}, {"torch": "2.13"}, {"jobs": 0}, {"name": "../x"}):
        with pytest.raises(InputError):
            plan_source_build(PAIR, MACHINE, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "memory", "jobs"), [(16, 24, 6), (4, 64, 4), (8, 3, 1), (8, None, 8)])
def test_as_many_jobs_as_cores_and_memory_allow(cores: int, memory: int | None, jobs: int) -> None:
    bytes_free = None if memory is None else memory * 10**9
    assert source_build.choose_jobs(replace(MACHINE, cores=cores, memory_bytes=bytes_free))[0] == jobs


def test_everything_that_is_missing_is_told_at_once_and_nothing_is_begun(tmp_path: Path) -> None:
    bare = replace(
        MACHINE, toolkits=MACHINE.toolkits[:1], tools={}, has_python_headers=False, has_cudnn=False, free_bytes=10**10
    )
    plan = plan_source_build(PAIR, bare)
    with pytest.raises(MachineError) as caught:
        run_source_build(plan, print)
    said = str(caught.value)
    for part in ("CUDA toolkit 12.8 to 12.9 (found: CUDA 13.0 in", "git", "g++", ["Python", "h"][0], "35 GB, 10 GB"):
        assert part in said
    assert "\n" not in said
    assert plan.notes[0].startswith("cuDNN is not found")
    assert list(tmp_path.iterdir()) == []


def test_the_docker_command_has_image_archs_and_the_python_of_here(tmp_path: Path) -> None:
    plan = plan_source_build(PAIR, replace(MACHINE, toolkits=()))
    command = docker_command(plan)
    assert "nvidia/cuda:12.8.1-cudnn-devel-ubuntu22.04" in command
    for part in ("docker run", "6.1;12.0", "CUDA_HOME=/usr/local/cuda ", "v2.13.0", "--wheel-dir /build/wheels"):
        assert part in command
    assert str(tmp_path) not in command.partition("bash -euc")[2]  # inside there are no paths of here
    assert source_build.wheel_file(plan).name.startswith("torch-2.13.0+sm61.sm120-cp3")


def tiny(plan: SourceBuild, *steps: Step) -> SourceBuild:
    """The plan with other steps, the first of which makes the environment."""
    python = builds.python_of(builds.builds_folder() / plan.name)
    script = f"mkdir -p {python.parent} && printf '#!/bin/sh\\necho %s\\n' \"'$0'\" > {python} && chmod +x {python}"
    return replace(plan, steps=(Step("environment", ("sh", "-c", script, ANSWER)), *steps))


def test_a_build_breaks_goes_on_and_is_listed(tmp_path: Path) -> None:
    plan = plan_source_build(PAIR, MACHINE)
    made = f"mkdir -p {plan.work}/pytorch {plan.work}/wheels && echo made >> {plan.work}/wheels/torch.whl"
    plan = tiny(plan, Step("wheel", ("sh", "-c", made)), Step("torch", ("sh", "-c", f"test -e {tmp_path}/mended")))
    said: list[str] = []
    with pytest.raises(StepError, match="step 'torch' failed"):
        run_source_build(plan, said.append)
    assert builds.list_builds() == []
    assert builds.unfinished_builds() == ["sm61-sm120"]
    (tmp_path / "mended").touch()
    build = run_source_build(plan, said.append)
    assert "goes on after 2 of 3 steps" in said
    assert (plan.work / "wheels" / "torch.whl").read_text() == "made\n"  # once
    assert not (plan.work / "pytorch").exists()
    assert builds.list_builds() == [build]
    assert build.source == "built from source for 6.1;12.0"
    with pytest.raises(InputError, match="is there"):
        run_source_build(plan, said.append)
    builds.remove(build.name)
    assert not plan.work.exists()


def test_it_can_start_over_and_keep_its_sources() -> None:
    plan = plan_source_build(PAIR, MACHINE)
    script = f"mkdir {plan.work}/pytorch"
    plan = tiny(plan, Step("sources", ("sh", "-c", script)), Step("wheel", ("false",)))
    with pytest.raises(StepError):
        run_source_build(plan, print)
    plan = replace(plan, steps=(*plan.steps[:-1], Step("wheel", ("true",))))
    run_source_build(plan, print, resume=False, keep=True)  # without the old folder: mkdir would fail
    assert (plan.work / "pytorch").exists()
    assert len(json.loads(plan.state.read_text())["done"]) == 3
