"""Which torch covers this machine's GPUs, and what stands in the way: one choice for `uneven setup`, `torch install`,
`diagnose` and the Dockerfile of a new project.

uv chooses a build by the driver (`--torch-backend auto`), pip not at all. Neither knows for which GPU architectures a
build has code: a GTX 1060 would get a build that fails at its first kernel, and for some pairs of GPUs there is none.
That is what stands here. The table is PyTorch's own release matrix (RELEASE.md and the build scripts of 2.8 to 2.13):
12.6 is the last CUDA with Maxwell and Pascal and ends with torch 2.14; 12.8 lost Volta after torch 2.10; 13.0 starts at
Turing.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from uneven.errors import InputError
from uneven.hardware.gpus import Gpu, GpuReport, has_nvidia_card, read_gpus
from uneven.hardware.preflight import OLDEST_TORCH
from uneven.hardware.system import System, read_system
from uneven.hardware.torchbuild import Support, TorchBuild, arch_support, parse_sm, read_torch, release

OLDEST_SM = (5, 0)  # what CUDA 12 still compiles for; torch 2.8 and newer are never built with CUDA 11
_TURING = (7, 5)
# The oldest driver for each CUDA major, from the CUDA toolkit release notes (minor version compatibility).
_OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
_CPU_INSTEAD = "`uneven setup --build cpu` installs the CPU build meanwhile"


@dataclass(frozen=True)
class Wheel:
    """A prebuilt torch; `torch` is the range of versions with these archs, `arm_archs` are those for aarch64."""

    tag: str
    cuda: tuple[int, int] | None
    torch: str
    archs: tuple[str, ...] = ()
    arm_archs: tuple[str, ...] = ()

    def support(self, sm: str, architecture: str) -> Support:
        """Whether the wheel for this CPU architecture has code for a GPU."""
        return arch_support(sm, self.arm_archs if architecture in ("aarch64", "arm64") else self.archs)

    def covers(self, sms: Sequence[str], architecture: str) -> bool:
        return all(self.support(sm, architecture) is not Support.MISSING for sm in sms)

    def runs_with(self, driver_cuda: str | None) -> bool:
        """Whether the driver is new enough; True where its version is not known."""
        offered = release(driver_cuda)
        return offered is None or self.cuda is None or offered[0] >= self.cuda[0]


CPU_WHEEL = Wheel("cpu", None, "torch>=2.8")
# In order of preference.
WHEELS = (
    Wheel(
        "cu130",
        (13, 0),
        "torch>=2.9",
        ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
        ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"),
    ),
    Wheel(
        "cu126",
        (12, 6),
        "torch>=2.8,<2.15",
        ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
        ("sm_90",),
    ),
    Wheel(
        "cu128",
        (12, 8),
        "torch>=2.8,<2.11",
        ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
        ("sm_90", "sm_100", "sm_120"),
    ),
)


@dataclass(frozen=True)
class Machine:
    """Everything that `advise` looks at; `has_nvidia_card` is what the PCI bus shows, with or without a driver."""

    system: System
    gpus: GpuReport = field(default_factory=GpuReport)
    torch: TorchBuild = field(default_factory=lambda: TorchBuild(installed=False))
    has_nvidia_card: bool = False


def read_machine(torch: TorchBuild | None = None) -> Machine:
    """This machine; imports torch where it is installed, unless its description is passed in."""
    return Machine(read_system(), read_gpus(), torch or read_torch(), has_nvidia_card())


@dataclass(frozen=True)
class Advice:
    """What to do. Only "install" is something that setup does by itself; `action` says in words what the rest is.

    `build` is the tag of a wheel; `covers` are the GPUs that it runs on. `is_installed`: the torch that is there is
    right. `replaces`: it is not, but pip would keep it, because 2.13.0+cpu satisfies torch>=2.9, too.
    """

    kind: Literal["install", "source", "driver", "container"]
    why: str
    action: str
    build: str | None = None
    package: str | None = None
    index_url: str | None = None  # in place of PyTorch's own
    covers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_installed: bool = False
    replaces: bool = False

    @property
    def fix(self) -> str:
        """The command or action, in one line."""
        return "uneven setup" if self.kind == "install" else self.action


def check_tag(tag: str) -> Wheel:
    """The wheels of this name; InputError for what cannot be one. Those that the table has not are pip's to find."""
    known = next((wheel for wheel in (CPU_WHEEL, *WHEELS) if wheel.tag == tag), None)
    if known is None and not re.fullmatch(r"cu1\d\d|rocm\d+\.\d+(\.\d+)?", tag):
        raise InputError(f"build {tag!r}: allowed are cpu, cu126, cu128, cu130 and other names of PyTorch's indexes")
    return known or Wheel(tag, None, "torch>=2.8")


def advise(machine: Machine, build: str | None = None, index_url: str | None = None) -> Advice:
    """The torch for this machine, or what stands in the way of one; with `build`, that one in place of the choice.

    From `index_url` (a mirror, NVIDIA's for a Jetson) something can be installed in any case.
    """
    advice = _choose(machine) if build is None else _asked_for(machine, check_tag(build))
    if index_url is None or (advice.is_installed and build is None):
        return advice
    action = advice.action if advice.kind == "install" else f"install torch from {index_url}"
    package = advice.package or CPU_WHEEL.torch
    again = advice.replaces or machine.torch.installed
    return replace(advice, kind="install", action=action, package=package, index_url=index_url, replaces=again)


def covered_archs(report: GpuReport) -> tuple[str, ...]:
    """The architectures of these GPUs that a torch of today can be built for, oldest first."""
    found = {gpu.sm for gpu in report.gpus if gpu.sm is not None and _capability(gpu.sm) >= OLDEST_SM}
    return tuple(sorted(found, key=_capability))


def _capability(sm: str) -> tuple[int, int]:
    return parse_sm(sm) or (0, 0)


def too_old(report: GpuReport) -> list[Gpu]:
    """The GPUs that no torch of today runs on: nothing can be done about them."""
    return [gpu for gpu in report.gpus if gpu.sm is not None and gpu.sm not in covered_archs(report)]


def oldest_driver(cuda: str | None) -> str | None:
    """The oldest driver that runs code built for this CUDA; None if unknown."""
    version = release(cuda)
    return _OLDEST_DRIVER.get(version[0]) if version else None


def name_of(gpu: Gpu) -> str:
    """With its architecture, so that the name says why: 'NVIDIA GeForce RTX 4090 (sm_89)'."""
    return f"{gpu.name} ({gpu.sm or 'sm_?'})"


def _choose(machine: Machine) -> Advice:
    report, architecture = machine.gpus, machine.system.cpu.architecture
    sms = covered_archs(report)
    if not report.gpus:
        return _without_gpu(machine)
    if not sms and len(too_old(report)) == len(report.gpus):
        return _install(machine, CPU_WHEEL, "no torch of today runs on these GPUs")
    # Where the driver does not tell an architecture, as those before 510 do, its own version decides.
    covering = [wheel for wheel in WHEELS if wheel.covers(sms, architecture)]
    runnable = [wheel for wheel in covering if wheel.runs_with(report.driver_cuda)]
    if not covering:
        return _source(machine, sms)
    if not runnable:
        return _update_driver(report, covering)
    wheel, driver = runnable[0], f"driver {report.driver or '?'} (CUDA {report.driver_cuda or '?'})"
    covers = [name_of(gpu) for gpu in report.gpus if gpu.sm in sms]
    why = f"{wheel.tag} has code for {', '.join(covers) or 'all GPUs of today'}, and {driver} runs it"
    if covering[0] is not wheel:
        why += f"; {covering[0].tag} needs driver {oldest_driver('13.0')} or newer"
    return _install(machine, wheel, why)


def _install(machine: Machine, wheel: Wheel, why: str, notes: Sequence[str] = ()) -> Advice:
    torch, notes = machine.torch, [*notes]
    is_right = _covers_machine(machine)
    if is_right and wheel is CPU_WHEEL and not torch.is_cpu_build:
        notes.append(f"torch {torch.version} is a GPU build: it works on the CPU and takes some GB more")
    if any(gpu.mig for gpu in machine.gpus.gpus):
        notes.append("MIG is on: a process sees one slice, named in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)")
    unused = [name_of(gpu) for gpu in too_old(machine.gpus)]
    notes += [f"no torch of today runs on {', '.join(unused)}: it stays unused"] if unused else []
    if is_right:
        action = f"nothing: torch {torch.version} is installed and runs on all of it"
    elif torch.installed:
        action = f"replace torch {torch.version or '(it does not import)'} by the {wheel.tag} build"
    else:
        action = f"install the {wheel.tag} build of torch"
    return Advice(
        kind="install",
        why=why,
        action=action,
        build=wheel.tag,
        package=wheel.torch,
        covers=_covers(machine, wheel),
        notes=tuple(notes),
        is_installed=is_right,
        replaces=torch.installed and not is_right,
    )


def _covers(machine: Machine, wheel: Wheel) -> tuple[str, ...]:
    architecture = machine.system.cpu.architecture
    return tuple(name_of(gpu) for gpu in machine.gpus.gpus if gpu.sm and wheel.covers([gpu.sm], architecture))


def _covers_machine(machine: Machine) -> bool:
    """Whether the installed torch runs on every GPU of this machine that a torch can run on, or it has none."""
    torch, version = machine.torch, release(machine.torch.version)
    if not torch.installed or torch.error is not None or (version is not None and version < OLDEST_TORCH):
        return False
    sms, old = covered_archs(machine.gpus), too_old(machine.gpus)
    if len(old) == len(machine.gpus.gpus):
        return True
    needed, offered = release(torch.cuda), release(machine.gpus.driver_cuda)
    runs = needed is not None and (offered is None or offered[0] >= needed[0])
    return runs and all(arch_support(sm, torch.archs) is not Support.MISSING for sm in sms)


def _asked_for(machine: Machine, wheel: Wheel) -> Advice:
    """A build that the user has named, with a note where it cannot work."""
    torch, report = machine.torch, machine.gpus
    notes: list[str] = []
    # The local part of the version names the build: 2.13.0+cu130.
    is_there = torch.error is None and (torch.version or "").endswith(f"+{wheel.tag}")
    if report.gpus and not wheel.runs_with(report.driver_cuda) and wheel.cuda is not None:
        driver = f"driver {report.driver or '?'} (CUDA {report.driver_cuda})"
        notes.append(f"{driver} is too old for {wheel.tag}, which needs {_OLDEST_DRIVER[wheel.cuda[0]]} or newer")
    covers = _covers(machine, wheel)
    unused = [name_of(gpu) for gpu in report.gpus if gpu.sm and name_of(gpu) not in covers]
    if unused and (wheel.archs or wheel is CPU_WHEEL):
        notes.append(f"{wheel.tag} has no code for {', '.join(unused)}: unused with this build")
    return Advice(
        kind="install",
        why="asked for by --build",
        action=f"nothing: torch {torch.version} is this build" if is_there else f"install the {wheel.tag} build",
        build=wheel.tag,
        package=wheel.torch,
        covers=covers,
        notes=tuple(notes),
        is_installed=is_there,
        replaces=torch.installed and not is_there,
    )


def source_archs(sms: Sequence[str]) -> str:
    """'6.1;12.0', as TORCH_CUDA_ARCH_LIST wants it."""
    return ";".join(f"{major}.{minor}" for major, minor in map(_capability, sms))


def source_toolkit(archs: Sequence[tuple[int, int]]) -> str:
    """The CUDA toolkits that compile for all of these GPUs, in words; which one does, its nvcc says."""
    newest, oldest = ("12.8", "12.6")[max(archs) < (10, 0)], min(archs)  # 12.8 is the first with Blackwell
    return f"{newest} to 12.9" if oldest < _TURING else f"{newest} or newer"  # 13.0 begins with Turing


def _source(machine: Machine, sms: Sequence[str]) -> Advice:
    report = machine.gpus
    why = f"no prebuilt torch covers {' beside '.join(sms)}"
    covers = tuple(name_of(gpu) for gpu in report.gpus if gpu.sm in sms)
    if _covers_machine(machine):
        action = f"nothing: torch {machine.torch.version} is installed and runs on all of it"
        return Advice("source", why, action, covers=covers, is_installed=True)
    toolkit = source_toolkit([_capability(sm) for sm in sms])
    notes = [f"it needs the CUDA {toolkit} toolkit"]
    runnable = [wheel for wheel in reversed(WHEELS) if wheel.runs_with(report.driver_cuda)]
    for names, tag in {_covers(machine, wheel): wheel.tag for wheel in runnable}.items():
        if names:
            notes.append(f"without a source build: `uneven setup --build {tag}` runs {', '.join(names)} alone")
    action = f"uneven torch build --archs {shlex.quote(source_archs(sms))}"
    if not WHEELS[1].runs_with(report.driver_cuda):
        driver = f"{oldest_driver('12.0')} or newer, which CUDA 12 needs"
        action = f"update the NVIDIA driver ({report.driver or '?'}) to {driver}, then: {action}"
    return Advice("source", why, action, covers=covers, notes=tuple(notes))


def _update_driver(report: GpuReport, covering: Sequence[Wheel]) -> Advice:
    oldest = {wheel.cuda[0]: wheel.tag for wheel in reversed(covering) if wheel.cuda}
    drivers = ", or ".join(f"{_OLDEST_DRIVER[major]} or newer (for {oldest[major]})" for major in sorted(oldest))
    tags = ", ".join(wheel.tag for wheel in covering)
    why = f"driver {report.driver or '?'} is for CUDA {report.driver_cuda}, too old for all builds that cover the GPUs"
    action = f"update the NVIDIA driver to {drivers}, then: uneven setup"
    return Advice("driver", f"{why} ({tags})", action, notes=(_CPU_INSTEAD,))


def _without_gpu(machine: Machine) -> Advice:
    """The CPU build, unless a card is there that its driver does not show."""
    reason = machine.gpus.reason or "none found"
    if not machine.has_nvidia_card:
        return _install(machine, CPU_WHEEL, f"no NVIDIA GPU: {reason}")
    if machine.system.is_container:
        why = f"the machine has an NVIDIA GPU, but this container does not have it: {reason}"
        action = "start the container with --gpus all (NVIDIA Container Toolkit on the host), then: uneven setup"
        return Advice("container", why, action, notes=(_CPU_INSTEAD,))
    driver = f"{oldest_driver('13.0')} or newer (for GPUs before Turing the 580 series)"
    action = f"install the NVIDIA driver {driver}, reboot, then: uneven setup"
    return Advice("driver", f"there is an NVIDIA card, but {reason}", action, notes=(_CPU_INSTEAD,))
