"""The report of `uneven diagnose`: what this machine is, what is compatible, and how to fix what is not.

diagnose() reads all parts (tests pass them in) and judges them; it never raises. A problem stops or breaks training and
names a command that fixes it; a note is information only.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import uneven
from uneven.config import Precision
from uneven.hardware import preflight
from uneven.hardware.choices import choose_precision
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu, GpuReport, VisibleGpus, read_visible
from uneven.hardware.network import (
    Interface,
    default_route,
    describe_vpns,
    likely_interface,
    read_interfaces,
)
from uneven.hardware.system import System
from uneven.hardware.torchbuild import Support, TorchBuild, arch_support, release
from uneven.install.advice import Advice, Machine, advise, name_of, oldest_driver, too_old
from uneven.install.builds import Build, list_builds

_REINSTALL = "uneven setup --force"


@dataclass(frozen=True)
class Problem:
    """A fault, and the command or action that fixes it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Compatibility:
    """Whether torch's compiled code runs on a GPU."""

    gpu: int  # the driver's index
    sm: str | None
    support: Support
    detail: str


@dataclass(frozen=True)
class DevicePrecision:
    """The default number format of a device, and the reason."""

    device: str
    name: str
    precision: Precision
    why: str


@dataclass(frozen=True)
class Network:
    """The interfaces, and the one that a run over several machines would probably use."""

    interfaces: tuple[Interface, ...]
    likely: str | None
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The complete report; the machine is fine if there are no problems."""

    version: str  # of uneven
    system: System
    gpus: GpuReport
    torch: TorchBuild
    compatibility: tuple[Compatibility, ...]
    precision: tuple[DevicePrecision, ...]
    network: Network
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    advice: Advice
    builds: list[Build]  # that uneven torch keeps

    @property
    def is_fine(self) -> bool:
        return not self.problems


def _compatibility(gpu: Gpu, build: TorchBuild) -> Compatibility:
    if not build.installed or build.error is not None:
        return Compatibility(gpu.index, gpu.sm, Support.MISSING, "torch is missing or cannot be imported")
    if build.is_cpu_build:
        return Compatibility(gpu.index, gpu.sm, Support.MISSING, f"torch {build.version} is a CPU build")
    if gpu.sm is None:
        return Compatibility(gpu.index, gpu.sm, Support.MISSING, "its architecture is unknown")
    support = arch_support(gpu.sm, build.archs)
    details = {
        Support.OK: f"torch has code that runs on {gpu.sm}",
        Support.JIT: "the driver compiles torch's PTX at first use: slow start, then full speed",
        Support.MISSING: f"torch has no code for {gpu.sm} (it has {' '.join(build.archs) or 'none'})",
    }
    return Compatibility(gpu.index, gpu.sm, support, details[support])


def _system_problems(system: System, build: TorchBuild) -> list[Problem]:
    why = preflight.why_untested(system.platform, build.hip is not None)
    return [] if why is None else [Problem(why, "set UNEVEN_UNTESTED=1 to try anyway")]


def _torch_problems(build: TorchBuild) -> list[Problem]:
    if not build.installed:
        return [Problem("torch is not installed", preflight.INSTALL)]
    if build.error is not None:
        return [Problem(f"torch does not import: {build.error}", _REINSTALL)]
    problems = []
    version = release(build.version)
    if version is not None and version < preflight.OLDEST_TORCH:
        problems.append(Problem(f"torch {build.version} is too old; tested: {preflight.TESTED}", preflight.INSTALL))
    if not build.gloo:
        fix = f"{_REINSTALL}  (prebuilt torch has Gloo; a source build needs USE_GLOO=1)"
        problems.append(Problem(f"torch {build.version} has no Gloo, which ranks need to communicate", fix))
    return problems


def _gpu_problems(
    report: GpuReport, build: TorchBuild, fits: Sequence[Compatibility], visible: VisibleGpus, cover: str
) -> list[Problem]:
    """What keeps torch from the GPUs that the driver lists; `cover` is what gives torch code for them."""
    old = too_old(report)
    usable = [gpu for gpu in report.gpus if gpu not in old]
    if not usable or not build.installed or build.error is not None:
        return []
    names = ", ".join(gpu.name for gpu in usable)
    if build.is_cpu_build:
        return [Problem(f"this machine has {names}, but torch {build.version} is a CPU build", cover)]
    missing = {fit.gpu: fit.detail for fit in fits if fit.support is Support.MISSING and fit.sm is not None}
    uncovered = [gpu for gpu in usable if gpu.index in missing]
    problems = [Problem(f"GPU {gpu.index} ({gpu.name}): {missing[gpu.index]}", cover) for gpu in uncovered]
    required, offered = release(build.cuda), release(report.driver_cuda)
    if visible.gpus or visible.error is None:
        return problems  # torch can use a GPU, so the driver is sufficient whatever its version
    if required is not None and offered is not None and offered[0] < required[0]:
        what = f"driver {report.driver} is for CUDA {report.driver_cuda}, too old for torch's CUDA {build.cuda}"
        fix = f"update the NVIDIA driver to {oldest_driver(build.cuda) or 'a newer one'} or newer, or: {cover}"
        problems.append(Problem(what, fix))
    else:
        fix = "unset CUDA_VISIBLE_DEVICES; nvidia-smi  (shows whether the driver responds)"
        problems.append(Problem(f"this machine has {names}, but torch cannot use it: {visible.error}", fix))
    return problems


def _notes(system: System, report: GpuReport) -> list[str]:
    notes = []
    if not report.gpus:
        notes.append(f"no NVIDIA GPU: {report.reason}; ranks train on the cpu (simulate two with cpu,cpu@0.4)")
    notes += [f"no torch of today runs on {name_of(gpu)}: it stays unused" for gpu in too_old(report)]
    if any(gpu.mig for gpu in report.gpus):
        notes.append("MIG is on: CUDA shows one MIG slice per process, so name it in CUDA_VISIBLE_DEVICES")
    if system.cpu_quota is not None and system.cpu_quota < (os.cpu_count() or 1):
        notes.append(f"a cgroup quota allows {system.cpu_quota:g} of {os.cpu_count()} cores")
    return notes


def _precision(device: Device, system: System, gpu: Gpu | None = None) -> DevicePrecision:
    precision, why = choose_precision(device, system, gpu)
    name = gpu.name if gpu is not None else system.cpu.model or "cpu"
    return DevicePrecision(str(device), name, precision, why)


def diagnose(
    machine: Machine,
    visible: VisibleGpus | None = None,
    interfaces: Sequence[Interface] | None = None,
    route: str | None = None,
) -> Diagnosis:
    """Report on a machine; of its own, `visible` GPUs and the network are read where they are not passed in."""
    report, build = machine.gpus, machine.torch
    visible = visible if visible is not None else read_visible(build, report)
    found_interfaces = tuple(interfaces) if interfaces is not None else read_interfaces()
    likely, why = likely_interface(found_interfaces, route or default_route())
    fits = tuple(_compatibility(gpu, build) for gpu in report.gpus)
    advice = advise(machine)

    precision = [_precision(Device("cpu"), machine.system)]
    precision += [_precision(Device("cuda", gpu.index), machine.system, gpu) for gpu in visible.gpus or report.gpus]
    problems = _system_problems(machine.system, build) + _torch_problems(build)
    if not report.gpus and advice.kind in ("driver", "container"):  # a GPU that the driver does not list
        problems.append(Problem(advice.why, advice.fix))
    cover = advice.fix if advice.kind == "install" else f"{advice.why}: {advice.fix}"
    problems += _gpu_problems(report, build, fits, visible, cover)
    return Diagnosis(
        version=uneven.__version__,
        system=machine.system,
        gpus=report,
        torch=build,
        compatibility=fits,
        precision=tuple(precision),
        network=Network(found_interfaces, likely, why),
        problems=tuple(problems),
        notes=(*_notes(machine.system, report), *describe_vpns(found_interfaces)),
        advice=advice,
        builds=list_builds(),
    )
