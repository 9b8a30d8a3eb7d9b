"""torch from its sources for given GPU architectures, where no prebuilt wheel covers them: sm_61 beside sm_120.

All steps are PyTorch's own, and each may be repeated: git, pip and ninja go on from what they have, so an interrupted
build is continued by the same command. It leaves a build as `uneven torch install` does, plus the wheel for other
machines. Which architectures a CUDA toolkit compiles for is asked of its nvcc.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.errors import InputError, MachineError
from uneven.hardware.cores import available_cores
from uneven.hardware.preflight import OLDEST_TORCH
from uneven.hardware.system import read_memory
from uneven.hardware.torchbuild import release
from uneven.install.advice import source_toolkit
from uneven.install.builds import Build, builds_folder, check_absent, check_name, home, installing, own_package, record
from uneven.install.steps import Step, environment_step, python_of, run_step

SOURCES = "https://github.com/pytorch/pytorch"
DEFAULT_TORCH = "2.13.0"
DISK_BYTES = 35 * 10**9  # checkout with submodules 6 GB, object files and wheel up to 25 GB, environment; an estimate
MEMORY_PER_JOB = 4 * 10**9  # what nvcc takes for the largest files (attention kernels)
_SAY_EVERY_S = 30.0


@dataclass(frozen=True)
class SourceBuild:
    """A planned build; `toolkit` is the folder of the CUDA toolkit that it takes, `missing` what this machine lacks."""

    name: str
    torch: str
    archs: str  # as TORCH_CUDA_ARCH_LIST has them
    toolkit: Path | None
    jobs: int
    steps: tuple[Step, ...]
    missing: tuple[str, ...]

    @property
    def work(self) -> Path:
        """Sources, object files, log and wheel."""
        return builds_folder() / self.name / "source"

    @property
    def log(self) -> Path:
        return self.work / "build.log"


def parse_archs(text: str) -> tuple[str, ...]:
    """'6.1;12.0' as TORCH_CUDA_ARCH_LIST takes it; commas, spaces and sm_61 are understood, too. Sorted, each once."""
    found = set()
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)(\+PTX)?", word)
        if match is None:
            raise InputError(f"--archs {text!r}: allowed are compute capabilities as in '6.1;12.0' or '8.6+PTX'")
        found.add((int(match[1]), int(match[2]), match[3] or ""))
    return tuple(f"{major}.{minor}{ptx}" for major, minor, ptx in sorted(found))


def plan_source_build(
    archs: Sequence[str], torch: str | None = None, jobs: int | None = None, name: str | None = None
) -> SourceBuild:
    """All of it, without doing any."""
    torch = torch or DEFAULT_TORCH
    if (release(torch) or (0, 0)) < OLDEST_TORCH or torch.count(".") != 2:
        raise InputError(f"--torch {torch}: a release of PyTorch from 2.8.0 on, such as {DEFAULT_TORCH}")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: 1 or more")
    capabilities = [_capability(arch) for arch in archs]
    sms = [f"sm{major}{minor}" for major, minor in capabilities]
    found = find_toolkits()
    fitting = [toolkit for toolkit, known in found.items() if {*capabilities} <= known]
    folder = builds_folder() / check_name(name or "-".join(sms))
    chosen = jobs or choose_jobs(len(available_cores()), read_memory()[1])
    label = f"{torch}+{'.'.join(sms)}"  # of our own, so that pip takes this wheel and no other of the same version
    return SourceBuild(
        name=folder.name,
        torch=torch,
        archs=";".join(archs),
        toolkit=fitting[0] if fitting else None,
        jobs=chosen,
        steps=_steps(archs, torch, label, chosen, fitting[0] if fitting else Path("/usr/local/cuda"), folder),
        missing=_missing(capabilities, [*found], [*fitting]),
    )


def _capability(arch: str) -> tuple[int, int]:
    major, minor = arch.removesuffix("+PTX").split(".")
    return int(major), int(minor)


def choose_jobs(cores: int, memory_bytes: int | None) -> int:
    """How many compilers at once: one for each core, as far as memory goes."""
    return cores if memory_bytes is None else max(1, min(cores, memory_bytes // MEMORY_PER_JOB))


def _steps(archs: Sequence[str], torch: str, label: str, jobs: int, cuda_home: Path, folder: Path) -> tuple[Step, ...]:
    """The whole build. Not `git clone`, which refuses the folder that an interrupted one has left."""
    work = folder / "source"
    checkout, wheels = str(work / "pytorch"), str(work / "wheels")
    pip = (str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input")
    git, tag = ("git", "-C", checkout), f"refs/tags/v{torch}"
    environment = {
        "TORCH_CUDA_ARCH_LIST": ";".join(archs),
        "CUDA_HOME": str(cuda_home),
        "CUDACXX": str(cuda_home / "bin" / "nvcc"),
        "USE_CUDA": "1",
        "USE_ROCM": "0",
        # Flash attention has code for 8.0 and newer only, and is the largest part of the compilation.
        "USE_FLASH_ATTENTION": "1" if any(_capability(arch) >= (8, 0) for arch in archs) else "0",
        "BUILD_TEST": "0",
        "PYTORCH_BUILD_VERSION": label,
        "PYTORCH_BUILD_NUMBER": "1",
        "MAX_JOBS": str(jobs),
    }
    # In the checkout, so that ninja goes on with the object files; cmake and ninja come by the requirements.
    build = (*pip, "wheel", "--no-build-isolation", "--no-deps", "-v", "--wheel-dir", wheels, checkout)
    return (
        environment_step(folder),
        Step(("git", "init", "--quiet", checkout)),
        Step((*git, "fetch", "--depth", "1", SOURCES, f"+{tag}:{tag}")),
        Step((*git, "checkout", "--force", "--quiet", tag)),
        Step((*git, "submodule", "update", "--init", "--recursive", "--force", "--depth", "1", "--jobs", "4")),
        Step((*pip, "install", "-r", f"{checkout}/requirements.txt")),
        Step(build, environment, (str(folder / "bin"), str(cuda_home / "bin"))),
        Step((*pip, "install", "--find-links", wheels, f"torch=={label}")),
        Step((*pip, "install", *own_package())),
    )


def find_toolkits() -> dict[Path, set[tuple[int, int]]]:
    """The CUDA toolkits here, newest first, and what each compiles for: CUDA_HOME's, that on the PATH, /usr/local's."""
    compiler = shutil.which("nvcc")
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path(compiler).resolve().parent.parent] if compiler else []
    homes += sorted([*Path("/usr/local").glob("cuda*"), *Path("/opt").glob("cuda*")], reverse=True)
    # A wrapper script for nvcc may be anywhere; a toolkit has its headers beside it.
    places = {place.resolve(): place for place in reversed(homes) if (place / "include" / "cuda.h").is_file()}
    return {place: known for place in reversed(places.values()) if (known := _capabilities(place / "bin" / "nvcc"))}


def _capabilities(nvcc: Path) -> set[tuple[int, int]]:
    try:
        done = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return set()
    return {(int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", done.stdout)}


def _missing(
    capabilities: Sequence[tuple[int, int]], found: Sequence[Path], fitting: Sequence[Path]
) -> tuple[str, ...]:
    """What this machine lacks, each with what to install; cmake and ninja come with the requirements of the sources."""
    missing = []
    if not fitting:
        here = f"found: {', '.join(map(str, found))}" if found else "found: none"
        missing.append(f"nvcc of the CUDA toolkit {source_toolkit(capabilities)} ({here}; CUDA_HOME names another one)")
    if shutil.which("git") is None:
        missing.append("git")
    if shutil.which("g++") is None:
        missing.append("a C++ compiler (gcc and g++ 9 or newer)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("the headers of Python (python3-dev)")
    free = shutil.disk_usage(next(folder for folder in (home(), *home().parents) if folder.is_dir())).free
    if free < DISK_BYTES:
        missing.append(
            f"disk space in {home()}: about {DISK_BYTES / 1e9:.0f} GB, {free / 1e9:.0f} GB are free "
            "(UNEVEN_HOME names another folder)"
        )
    return tuple(missing)


def run_source_build(plan: SourceBuild, say: Callable[[str], None]) -> Build:
    """Carry out a plan; MachineError with everything that is missing, before hours of work begin.

    The wheel is kept, the sources are not.
    """
    check_absent(plan.name)
    if plan.missing:
        raise MachineError(
            f"torch {plan.torch} cannot be built for {plan.archs} here, missing: {'; '.join(plan.missing)}"
        )
    with installing(plan.name) as folder:
        plan.work.mkdir(exist_ok=True)
        for number, step in enumerate(plan.steps, start=1):
            say(f"step {number} of {len(plan.steps)}: {step.line}")
            run_step(step, say, plan.log, _SAY_EVERY_S)
        build = record(folder, f"built from source for {plan.archs}")
        shutil.rmtree(plan.work / "pytorch", ignore_errors=True)  # it works: nobody needs the object files any more
        return build
