"""A new build of torch from prebuilt wheels: what would be installed, how large it is, and the installation itself.

`plan_build` is a pure choice apart from looking at this machine's GPUs; `make_build` carries a plan out. An interrupted
one goes on in the same folder: pip keeps what it has downloaded, and a build counts only when its record is written.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import uneven
from uneven.errors import InputError, MachineError
from uneven.hardware.preflight import OLDEST_TORCH
from uneven.hardware.torchbuild import TorchBuild, release
from uneven.hardware.wheels import CPU_WHEEL, INDEX, ROCM_WHEELS, WHEELS
from uneven.install.advice import advise
from uneven.install.builds import Build, builds_folder, check_name, installing, list_builds, python_of, record
from uneven.install.environment import install, pip_command
from uneven.install.machine import Machine, read_machine

_GB = 10**9
# (to download, on disk) in bytes, with the libraries that torch brings: rounded up from torch 2.8 to 2.13. Estimates.
_SIZES = {"cpu": (_GB // 4, _GB), "cu": (4 * _GB, 8 * _GB), "rocm": (5 * _GB, 18 * _GB)}
_FORMS = "auto, cpu, cu126, cu128, cu130, rocm7.1, or the file of a wheel"


@dataclass(frozen=True)
class BuildPlan:
    """What `uneven torch install` would do; sizes are estimates, None where nothing is known."""

    name: str
    variant: str
    torch: str
    index_url: str | None
    uneven: tuple[str, ...]
    folder: Path
    download_bytes: int | None
    disk_bytes: int | None

    @property
    def source(self) -> str:
        """What the build's record says of where its torch came from."""
        return self.torch if self.index_url is None else f"{self.torch} of {self.variant}"


def plan_build(
    variant: str, name: str | None = None, version: str | None = None, index_url: str | None = None
) -> BuildPlan:
    """What to install for a variant; InputError for one that does not exist, MachineError where 'auto' finds none.

    `index_url` is an index in place of PyTorch's own: a mirror, NVIDIA's for a Jetson, nightly builds.
    """
    if variant.endswith(".whl"):
        return _plan_wheel_file(Path(variant), name, version)
    if variant == "auto":
        # Whatever torch is here does not matter, and importing it takes seconds.
        variant = choose_variant(read_machine(torch=TorchBuild(installed=False)))
    family = re.fullmatch(r"(cpu)|(cu)1\d\d|(rocm)\d+\.\d+(?:\.\d+)?", variant)
    if family is None:
        raise InputError(f"variant {variant!r}: allowed are {_FORMS}")
    if version is not None and (release(version) is None or release(version) < OLDEST_TORCH):  # type: ignore[operator]
        raise InputError(f"--version {version}: a version of torch from 2.8 on, such as 2.13.0")
    wheel = next((wheel for wheel in (CPU_WHEEL, *WHEELS, *ROCM_WHEELS) if wheel.tag == variant), None)
    spec = f"torch=={version}" if version else wheel.torch if wheel else "torch>=2.8"
    download, disk = _SIZES[next(filter(None, family.groups()))]
    name = check_name(name or (variant if version is None else f"{variant}-{version}"))
    index = index_url or INDEX + variant
    return BuildPlan(name, variant, spec, index, own_package(), builds_folder() / name, download, disk)


def _plan_wheel_file(file: Path, name: str | None, version: str | None) -> BuildPlan:
    if not file.is_file():
        raise InputError(f"{file} does not exist; name the file of a torch wheel, or a variant: {_FORMS}")
    match = re.match(r"torch-([^-]+)-", file.name)
    if match is None or version is not None:
        what = "is not a wheel of torch (torch-VERSION-...whl)" if match is None else "has its version in its name"
        raise InputError(f"{file} {what}{'; leave --version out' if match else ''}")
    name = check_name(name or match[1])
    size = file.stat().st_size
    wheel = str(file.absolute())
    return BuildPlan(name, "wheel", wheel, None, own_package(), builds_folder() / name, None, 4 * size + _GB // 2)


def choose_variant(machine: Machine) -> str:
    """The variant that covers this machine, as `uneven setup` advises; MachineError with what stands in the way."""
    advice = advise(machine)
    if advice.kind != "install" or advice.build is None:
        raise MachineError(f"{advice.why}; {advice.action}")
    return advice.build


def own_package() -> tuple[str, ...]:
    """What installs the same uneven elsewhere: the checkout this one runs from, the wheel it came from, its version.

    The very same code, since machines of a run compare every line of it.
    """
    checkout = Path(uneven.__file__).absolute().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return ("-e", str(checkout))
    try:
        origin = json.loads(distribution("uneven").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    path = Path(unquote(urlparse(url).path))
    if url.startswith("file:") and path.exists():
        return (str(path),)
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return (f"uneven @ {vcs['vcs']}+{url}@{vcs['commit_id']}",)
    return (f"uneven=={uneven.__version__}",)


def check_space(plan: BuildPlan) -> int:
    """The free bytes where the build goes; MachineError where its estimate and its download do not fit."""
    place = next(folder for folder in (plan.folder, *plan.folder.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    needed = (plan.disk_bytes or 0) + (plan.download_bytes or 0)
    if free < needed:
        raise MachineError(
            f"{plan.name} needs about {needed / _GB:.1f} GB while it is installed, "
            f"{place} has {free / _GB:.1f} GB free; "
            "make room, or choose another disk with UNEVEN_HOME=/some/folder"
        )
    return free


def check_absent(name: str) -> None:
    """InputError where a complete build of this name is there."""
    for build in list_builds():
        if build.name == name:
            raise InputError(
                f"build {name!r} is there (torch {build.version}): choose --name, or run: uneven torch remove {name}"
            )


def make_build(plan: BuildPlan, say: Callable[[str], None]) -> Build:
    """Make the environment, install torch and then uneven into it, and write down what it is."""
    check_absent(plan.name)
    check_space(plan)
    with installing(plan.name, {"variant": plan.variant, "torch": plan.torch}) as folder:
        make_environment(folder, say)
        python = python_of(folder)
        say(f"installing {plan.torch}")
        install(pip_command(python, [plan.torch], plan.index_url), say)
        say("installing uneven")
        install(pip_command(python, plan.uneven), say)
        return record(folder, plan.source)


def commands_of(plan: BuildPlan) -> list[str]:
    """What make_build would run, for a dry run: by pip, also where it will be uv."""
    pip = [str(python_of(plan.folder)), "-m", "pip", "install"]
    index = ["--index-url", plan.index_url] if plan.index_url else []
    lines = [environment_command(plan.folder), [*pip, plan.torch, *index], [*pip, *plan.uneven]]
    return [shlex.join(line) for line in lines]


def make_environment(folder: Path, say: Callable[[str], None]) -> None:
    """A virtual environment of this Python, by uv where it is there; one that runs is kept as it is."""
    if _runs(python_of(folder)):
        say(f"going on in {folder}")
        return
    say(f"making the environment {folder}")
    install(environment_command(folder), say)


def environment_command(folder: Path) -> list[str]:
    """Makes the environment; may be repeated where it was interrupted."""
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "venv", "--seed", "--allow-existing", "--python", sys.executable, str(folder)]
    return [sys.executable, "-m", "venv", str(folder)]


def _runs(python: Path) -> bool:
    try:
        command = [str(python), "-I", "-c", "import pip"]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
