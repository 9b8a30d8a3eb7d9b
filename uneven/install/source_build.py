"""torch from its sources for given GPU architectures, where no prebuilt wheel covers them: sm_61 beside sm_120.

`plan_source_build` is pure: the machine comes in as a BuildMachine. It gives all steps, what is missing, and estimates
of disk and time. `run_source_build` carries it out by steps.py, so that a second call goes on where the first stopped,
and leaves a build as `uneven torch install` does, plus the wheel for other machines.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.errors import InputError, MachineError
from uneven.hardware.preflight import OLDEST_TORCH
from uneven.hardware.system import read_system
from uneven.hardware.torchbuild import release
from uneven.install.builds import Build, ask, builds_folder, check_name, home, installing, python_of, record
from uneven.install.new_build import check_absent, environment_command, own_package
from uneven.install.steps import Step, run_steps
from uneven.install.toolkits import Arch, Toolkit, ToolkitRange, dotted, find_toolkits, toolkits_for

SOURCES = "https://github.com/pytorch/pytorch"
DEFAULT_TORCH = "2.13.0"
DISK_BYTES = 35 * 10**9  # checkout with submodules 6 GB, object files and wheel up to 25 GB, environment; an estimate
MEMORY_PER_JOB = 4 * 10**9  # what nvcc takes for the largest files (attention kernels)
# A guess: two architectures are said to take 2 to 6 h; 4 h with 6 jobs, in a part of every build and one for each.
_HOURS_BASE, _HOURS_PER_ARCH = 8.0, 8.0
HOW_ESTIMATED = (
    "a guess, not measured: 4 h with 6 jobs for two architectures, so 8 job-hours, and 8 for each architecture"
)


@dataclass(frozen=True)
class BuildMachine:
    """What the plan needs to know of this machine."""

    cores: int
    memory_bytes: int | None
    free_bytes: int | None
    tools: Mapping[str, str | None]  # git, g++ and where they are
    has_python_headers: bool
    toolkits: tuple[Toolkit, ...]
    has_cudnn: bool


@dataclass(frozen=True)
class SourceBuild:
    """A planned build: steps, estimates, and what this machine lacks for it."""

    name: str
    torch: str
    archs: tuple[Arch, ...]
    toolkits: ToolkitRange
    toolkit: Toolkit | None
    jobs: int
    jobs_why: str
    hours: float
    work: Path
    steps: tuple[Step, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def log(self) -> Path:
        return self.work / "build.log"

    @property
    def state(self) -> Path:
        return self.work / "state.json"

    @property
    def arch_list(self) -> str:
        return ";".join(map(str, self.archs))


def read_build_machine() -> BuildMachine:
    """This machine, as far as a source build depends on it."""
    system = read_system()
    place = next(folder for folder in (home(), *home().parents) if folder.is_dir())
    toolkits = tuple(find_toolkits())
    headers = [toolkit.home / "include" / "cudnn.h" for toolkit in toolkits]
    headers += [Path("/usr/include/cudnn.h"), *Path("/usr/include").glob("*-linux-gnu/cudnn.h")]
    return BuildMachine(
        cores=max(1, len(system.available_cores)),
        memory_bytes=system.memory_available_bytes,
        free_bytes=shutil.disk_usage(place).free,
        tools={name: shutil.which(name) for name in ("git", "g++", "cmake", "ninja")},
        has_python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        toolkits=toolkits,
        has_cudnn=any(header.is_file() for header in headers),
    )


def plan_source_build(
    archs: Sequence[Arch],
    machine: BuildMachine,
    torch: str = DEFAULT_TORCH,
    jobs: int | None = None,
    name: str | None = None,
) -> SourceBuild:
    """All of it, without doing any; InputError for archs that no toolkit compiles together."""
    version = release(torch)
    if version is None or version < OLDEST_TORCH or torch.count(".") != 2:
        raise InputError(f"--torch {torch}: a release of PyTorch from 2.8.0 on, such as {DEFAULT_TORCH}")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: 1 or more")
    toolkits = toolkits_for(archs)
    toolkit = next((found for found in machine.toolkits if found.version in toolkits), None)
    chosen, why = (jobs, "as given") if jobs else choose_jobs(machine)
    name = check_name(name or "-".join(arch.sm.replace("_", "") for arch in archs))
    work = builds_folder() / name / "source"
    cuda_home = toolkit.home if toolkit else Path("/usr/local") / f"cuda-{dotted(toolkits.oldest)}"
    has_cudnn = machine.has_cudnn
    return SourceBuild(
        name=name,
        torch=torch,
        archs=tuple(archs),
        toolkits=toolkits,
        toolkit=toolkit,
        jobs=chosen,
        jobs_why=why,
        hours=estimate_hours(len(archs), chosen),
        work=work,
        steps=_steps(archs, torch, chosen, cuda_home, has_cudnn, work, builds_folder() / name),
        missing=_missing(machine, toolkits, toolkit),
        notes=() if has_cudnn else ("cuDNN is not found: torch is built without it, and convolutions will be slow",),
    )


def choose_jobs(machine: BuildMachine) -> tuple[int, str]:
    """How many compilers at once: one for each core, as far as memory goes; and why."""
    if machine.memory_bytes is None:
        return machine.cores, f"{machine.cores} cores; the memory is not known"
    fit = max(1, machine.memory_bytes // MEMORY_PER_JOB)
    have = f"{machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB of free memory, 4 GB for each job"
    return min(machine.cores, fit), have


def estimate_hours(archs: int, jobs: int) -> float:
    """Hours of compiling; HOW_ESTIMATED says from what. Off by a factor of two either way on other processors."""
    return (_HOURS_BASE + _HOURS_PER_ARCH * archs) / jobs


def _steps(
    archs: Sequence[Arch], torch: str, jobs: int, cuda_home: Path, has_cudnn: bool, work: Path, folder: Path
) -> tuple[Step, ...]:
    """The whole build; each step may be repeated after an interruption."""
    python = str(python_of(folder))
    wheels, label = str(work / "wheels"), local_version(torch, archs)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    return (
        Step("environment", tuple(environment_command(folder))),
        *_sources(torch, work / "pytorch"),
        Step("requirements", (*pip, "install", "-r", str(work / "pytorch" / "requirements.txt"))),
        _wheel(archs, torch, jobs, cuda_home, has_cudnn, (*pip, "wheel"), work),
        # The label of our own lets pip take this wheel and no other of the same version.
        Step("torch", (*pip, "install", "--find-links", wheels, f"torch=={label}")),
        Step("uneven", (*pip, "install", *own_package())),
    )


def local_version(torch: str, archs: Sequence[Arch]) -> str:
    """2.13.0+sm61.sm120"""
    return f"{torch}+{'.'.join(arch.sm.replace('_', '') for arch in archs)}"


def _sources(torch: str, checkout: Path) -> tuple[Step, ...]:
    # Not `git clone`, which refuses the folder that an interrupted one has left.
    git, tag = ("git", "-C", str(checkout)), f"refs/tags/v{torch}"
    modules = ("submodule", "update", "--init", "--recursive", "--force", "--depth", "1", "--jobs", "4")
    return (
        Step("folder of the sources", ("git", "init", "--quiet", str(checkout))),
        Step("sources", (*git, "fetch", "--depth", "1", SOURCES, f"+{tag}:{tag}")),
        Step("checkout", (*git, "checkout", "--force", "--quiet", tag)),
        Step("submodules", (*git, *modules)),
    )


def _wheel(
    archs: Sequence[Arch],
    torch: str,
    jobs: int,
    cuda_home: Path,
    has_cudnn: bool,
    pip_wheel: tuple[str, ...],
    work: Path,
) -> Step:
    """The compilation; in the checkout, so that ninja goes on with the object files that are there."""
    environment = {
        "TORCH_CUDA_ARCH_LIST": ";".join(map(str, archs)),
        "CUDA_HOME": str(cuda_home),
        "CUDACXX": str(cuda_home / "bin" / "nvcc"),
        "USE_CUDA": "1",
        "USE_CUDNN": "1" if has_cudnn else "0",
        "USE_ROCM": "0",
        "USE_DISTRIBUTED": "1",
        "USE_NCCL": "1",
        # Flash attention has code for 8.0 and newer only, and is the largest part of the compilation.
        "USE_FLASH_ATTENTION": "1" if any(arch.capability >= (8, 0) for arch in archs) else "0",
        "BUILD_TEST": "0",
        "PYTORCH_BUILD_VERSION": local_version(torch, archs),
        "PYTORCH_BUILD_NUMBER": "1",
        "MAX_JOBS": str(jobs),
    }
    options = ("--no-build-isolation", "--no-deps", "-v", "--wheel-dir", str(work / "wheels"))
    # cmake and ninja are those that the requirements have brought into the environment.
    path = (str(Path(pip_wheel[0]).parent), str(cuda_home / "bin"))
    return Step("wheel", (*pip_wheel, *options, str(work / "pytorch")), environment, path)


def _missing(machine: BuildMachine, toolkits: ToolkitRange, toolkit: Toolkit | None) -> tuple[str, ...]:
    """What this machine lacks, each with what to install; cmake and ninja come with the requirements of the sources."""
    missing = []
    if toolkit is None:
        found = ", ".join(f"CUDA {dotted(one.version)} in {one.home}" for one in machine.toolkits)
        missing.append(f"nvcc of the CUDA toolkit {toolkits} (found: {found or 'none'}; CUDA_HOME names another one)")
    if machine.tools.get("git") is None:
        missing.append("git")
    if machine.tools.get("g++") is None:
        missing.append("a C++ compiler (gcc and g++ 9 or newer)")
    if not machine.has_python_headers:
        missing.append("the headers of Python (python3-dev)")
    if machine.free_bytes is not None and machine.free_bytes < DISK_BYTES:
        missing.append(
            f"disk space in {home()}: about {DISK_BYTES / 1e9:.0f} GB, {machine.free_bytes / 1e9:.0f} GB are free "
            "(UNEVEN_HOME names another folder)"
        )
    return tuple(missing)


def check_requirements(plan: SourceBuild) -> None:
    """MachineError with everything that is missing, before hours of work begin."""
    if plan.missing:
        raise MachineError(
            f"torch {plan.torch} cannot be built for {plan.arch_list} here, missing: {'; '.join(plan.missing)}. "
            "(cmake and ninja come by pip; --docker prints the command for a container that has the toolkit)"
        )


def run_source_build(plan: SourceBuild, say: Callable[[str], None], resume: bool = True, keep: bool = False) -> Build:
    """Carry out a plan; interrupted by anything, the next call goes on. The wheel is kept, the sources with `keep`."""
    check_absent(plan.name)
    check_requirements(plan)
    with installing(plan.name, {"source": plan.arch_list, "torch": plan.torch}) as folder:
        if not resume:
            shutil.rmtree(plan.work, ignore_errors=True)
        plan.work.mkdir(exist_ok=True)
        run_steps(plan.steps, plan.state, plan.log, say)
        if not keep and ask(python_of(folder)).get("version"):  # it works: the object files are not needed any more
            shutil.rmtree(plan.work / "pytorch", ignore_errors=True)
        return record(folder, f"built from source for {plan.arch_list}")


def docker_command(plan: SourceBuild) -> str:
    """The same compilation in a container that has the toolkit; it leaves the wheel in docker_folder()."""
    image = plan.toolkits.image
    if image is None:
        raise InputError(f"--docker: no image with the CUDA toolkit {plan.toolkits} is known; build without --docker")
    work, python = Path("/build"), "/build/env/bin/python"
    pip = (python, "-m", "pip")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    prepare = (
        "export DEBIAN_FRONTEND=noninteractive",
        "apt-get update && apt-get install -y git g++ python3-pip && python3 -m pip install uv",
        "git config --global --add safe.directory '*'",  # the files of an earlier call are this user's, not root's
        # The wheel is for one version of Python: the one it will be installed with.
        f"uv venv --seed --allow-existing --python {version} /build/env",
    )
    wheel = _wheel(plan.archs, plan.torch, plan.jobs, Path("/usr/local/cuda"), True, (*pip, "wheel"), work)
    requirements = Step("requirements", (*pip, "install", "-r", "/build/pytorch/requirements.txt"))
    script = [*prepare, *(step.line for step in (*_sources(plan.torch, work / "pytorch"), requirements, wheel))]
    script.append(f"chown -R {os.getuid()}:{os.getgid()} /build")
    place = docker_folder(plan)
    mount = f"type=bind,source={place},target=/build"
    container = ["docker", "run", "--rm", "--mount", mount, image, "bash", "-euc", " && ".join(script)]
    return f"mkdir -p {shlex.quote(str(place))} && {shlex.join(container)}"


def docker_folder(plan: SourceBuild) -> Path:
    """Where the container works: sources, object files and the wheel."""
    return home() / "docker" / plan.name


def wheel_file(plan: SourceBuild) -> Path:
    """The wheel that the container leaves, for `uneven torch install`."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = os.uname().machine
    name = f"torch-{local_version(plan.torch, plan.archs)}-{tag}-{tag}-linux_{machine}.whl"
    return docker_folder(plan) / "wheels" / name
