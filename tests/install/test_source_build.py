"""The plan of a source build, on machines that are not this one; and its whole course with tiny steps."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.install.builds import ANSWER
from uneven.errors import InputError, MachineError
from uneven.install import builds, source_build
from uneven.install.source_build import choose_jobs, find_toolkits, parse_archs, plan_source_build, run_source_build
from uneven.install.steps import Step, python_of

OLD, NEW = Path("/usr/local/cuda-12.8"), Path("/usr/local/cuda-13.0")
TURING = {(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)}
PAIR = parse_archs("6.1;12.0")


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with everything that a build needs, and two toolkits, of which the newer has no sm_61."""
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path))
    monkeypatch.setattr(source_build, "find_toolkits", lambda: {NEW: TURING, OLD: TURING | {(6, 1), (7, 0)}})
    monkeypatch.setattr(source_build, "read_memory", lambda: (32 * 10**9, 24 * 10**9, False))
    monkeypatch.setattr(source_build, "available_cores", lambda: tuple(range(16)))
    monkeypatch.setattr(source_build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(source_build.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 10**9))
    monkeypatch.setattr(source_build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()


def wheel_of(plan: source_build.SourceBuild) -> Step:
    return next(step for step in plan.steps if step.environment)


def test_the_plan_for_the_pair_that_no_wheel_covers(tmp_path: Path) -> None:
    plan = plan_source_build(PAIR)
    assert (plan.name, plan.archs, plan.missing, plan.toolkit) == ("sm61-sm120", "6.1;12.0", (), OLD)
    assert plan.jobs == 6
    lines = [step.line for step in plan.steps]
    assert "+refs/tags/v2.13.0:refs/tags/v2.13.0" in lines[2]
    assert "--recursive" in lines[4]
    assert lines[-2].endswith("torch==2.13.0+sm61.sm120")
    step = wheel_of(plan)
    assert step.environment["TORCH_CUDA_ARCH_LIST"] == "6.1;12.0"
    assert step.environment["CUDA_HOME"] == str(OLD)
    assert (step.environment["MAX_JOBS"], step.environment["USE_FLASH_ATTENTION"]) == ("6", "1")
    assert step.environment["PYTORCH_BUILD_VERSION"] == "2.13.0+sm61.sm120"
    assert step.path == (str(tmp_path / "torch/sm61-sm120/bin"), f"{OLD}/bin")
    assert not (tmp_path / "torch").exists()


def test_what_is_given_is_taken() -> None:
    plan = plan_source_build(parse_archs("7.5"), torch="2.9.1", jobs=3, name="turing")
    assert (plan.name, plan.jobs, plan.toolkit) == ("turing", 3, NEW)
    assert wheel_of(plan).environment["USE_FLASH_ATTENTION"] == "0"
    for bad in ({"torch": "2.5.0"}, {"torch": "main"}, {"torch": "2.13"}, {"jobs": 0}, {"name": "../x"}):
        with pytest.raises(InputError):
            plan_source_build(PAIR, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "archs"),
    [("12.0;6.1", ("6.1", "12.0")), ("sm_61, sm_120", ("6.1", "12.0")), ("8.6+PTX 8.6+PTX", ("8.6+PTX",))],
)
def test_archs_as_torch_writes_them_and_as_users_do(text: str, archs: tuple[str, ...]) -> None:
    assert parse_archs(text) == archs


@pytest.mark.parametrize("text", ["", "6", "Pascal", "6.1;", "compute_61"])
def test_what_is_no_arch(text: str) -> None:
    with pytest.raises(InputError, match="--archs"):
        parse_archs(text)


@pytest.mark.parametrize(("cores", "memory", "jobs"), [(16, 24, 6), (4, 64, 4), (8, 3, 1), (8, None, 8)])
def test_as_many_jobs_as_cores_and_memory_allow(cores: int, memory: int | None, jobs: int) -> None:
    assert choose_jobs(cores, None if memory is None else memory * 10**9) == jobs


def test_everything_that_is_missing_is_told_at_once_and_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_build, "find_toolkits", lambda: {NEW: TURING})
    monkeypatch.setattr(source_build.shutil, "which", lambda name: None)
    monkeypatch.setattr(source_build.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**10))
    (tmp_path / "Python.h").unlink()
    with pytest.raises(MachineError) as caught:
        run_source_build(plan_source_build(PAIR), print)
    said = str(caught.value)
    for part in (f"CUDA toolkit 12.8 to 12.9 (found: {NEW}", "git", "g++", "python3-dev", "35 GB, 10 GB"):
        assert part in said
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_toolkit_says_itself_what_it_compiles_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    nvcc.write_text("#!/bin/sh\ntest $1 = --list-gpu-arch && printf 'compute_61\\ncompute_90a\\ncompute_120\\n'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_toolkits()[tmp_path] == {(6, 1), (12, 0)}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    assert tmp_path / "gone" not in find_toolkits()


def test_a_build_breaks_goes_on_and_is_listed(tmp_path: Path) -> None:
    plan = plan_source_build(PAIR)
    python = python_of(builds.builds_folder() / plan.name)
    script = f"mkdir -p {python.parent} && printf '#!/bin/sh\\necho %s\\n' \"'$0'\" > {python} && chmod +x {python}"
    made = f"mkdir -p {plan.work}/pytorch {plan.work}/wheels && echo made >> {plan.work}/wheels/torch.whl"
    commands = (("sh", "-c", script, ANSWER), ("sh", "-c", made), ("test", "-e", f"{tmp_path}/mended"))
    plan = replace(plan, steps=tuple(Step(command) for command in commands))
    said: list[str] = []
    with pytest.raises(MachineError, match="failed with exit code 1"):
        run_source_build(plan, said.append)
    assert builds.list_builds() == []
    assert builds.unfinished_builds() == ["sm61-sm120"]
    (tmp_path / "mended").touch()
    build = run_source_build(plan, said.append)
    assert said[-1].startswith("step 3 of 3: test -e")
    assert (plan.work / "wheels" / "torch.whl").exists()
    assert not (plan.work / "pytorch").exists()
    assert builds.list_builds() == [build]
    assert build.source == "built from source for 6.1;12.0"
    with pytest.raises(InputError, match="is there"):
        run_source_build(plan, said.append)
    builds.remove(build.name)
    assert not plan.work.exists()
