"""Which torch a machine needs, and why: a pure function of the machine, for `uneven setup` and `uneven diagnose`.

The choice among the wheels for NVIDIA's GPUs is that of hardware/wheels.py; here are the kinds of machines around it:
containers, Jetson, WSL, ROCm, no GPU. tests/install/machines has one of each with the advice that is right for it.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from uneven.errors import InputError
from uneven.hardware.torchbuild import Support, arch_support, release
from uneven.hardware.wheels import (
    CPU_WHEEL,
    ROCM_WHEELS,
    WHEELS,
    Choice,
    Wheel,
    choose,
    describe_drivers,
    oldest_driver,
    partial_wheels,
    source_command,
    source_toolkit,
)
from uneven.install.covered import (
    PREBUILT_ON,
    architecture_of,
    covered_of_amd,
    name_of,
    newest_for_driver,
    pick_rocm,
    rocm_fits,
    weigh,
)
from uneven.install.machine import Machine

OLDEST_TORCH = (2, 8)
_NEW_DRIVER = oldest_driver("13.0")
_SOURCE_CUDA = 12  # the oldest that source_toolkit() names
_CPU_INSTEAD = "`uneven setup --build cpu` installs the CPU build meanwhile"


@dataclass(frozen=True)
class Advice:
    """What to do. Only "install" is something that setup does by itself; `action` says in words what the rest is.

    `build` is the tag of a wheel (cpu, cu130, rocm7.1), or None; `builds` is the command of a source build.
    `is_installed`: the torch that is there is right. `replaces`: it is not, but pip would keep it, because 2.13.0+cpu
    satisfies torch>=2.9, too. `covers` are the GPUs that the build runs on.
    """

    kind: Literal["install", "source", "driver", "container", "manual"]
    why: str
    action: str
    build: str | None = None
    package: str | None = None
    index_url: str | None = None
    covers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_installed: bool = False
    replaces: bool = False
    builds: str | None = None

    @property
    def command(self) -> str | None:
        """What a user may type instead: pip's command, or that of the source build; None where there is neither."""
        if self.package is None:
            return self.builds
        index = f" --index-url {self.index_url}" if self.index_url else ""
        again = "--force-reinstall " if self.replaces else ""
        return f"pip install {again}'{self.package}'{index}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "command": self.command}


def advise(machine: Machine, build: str | None = None) -> Advice:
    """The torch for this machine, or what stands in the way of one; with `build`, that one in place of the choice."""
    if build is not None:
        return _asked_for(machine, build)
    if machine.nvidia.jetson is not None and not _is_server_jetson(machine):
        return _jetson(machine)
    if machine.gpus.gpus:
        return _nvidia(machine)
    hidden = _hidden_nvidia(machine)
    # An integrated GPU of AMD that no wheel covers must not hide NVIDIA's card, which is what one trains on.
    if machine.amd.gpus and (hidden is None or pick_rocm(machine) is not None):
        advice = _amd(machine)
        return advice if hidden is None else replace(advice, notes=(*advice.notes, f"{hidden.why}; {hidden.action}"))
    return hidden or _without_gpu(machine)


def from_index(machine: Machine, advice: Advice, url: str) -> Advice:
    """The same torch, or any where none was advised, from an index that the user names: a mirror, or NVIDIA's."""
    if advice.is_installed:
        return replace(advice, index_url=url, package=advice.package or CPU_WHEEL.torch)
    return replace(
        advice,
        kind="install",
        action=f"install torch from {url}" if advice.build is None else advice.action,
        package=advice.package or CPU_WHEEL.torch,
        index_url=url,
        replaces=machine.torch.installed,
    )


def covers_machine(machine: Machine) -> bool:
    """Whether the installed torch runs on every GPU of this machine that a torch can run on, or it has none."""
    torch = machine.torch
    version = release(torch.version)
    if not torch.installed or torch.error is not None or (version is not None and version < OLDEST_TORCH):
        return False
    if machine.gpus.gpus:
        known = [gpu.sm for gpu in machine.gpus.gpus if gpu.sm is not None]
        sms = choose(known, None, architecture_of(machine)).sms if known else ()
        needed, offered = release(torch.cuda), release(machine.gpus.driver_cuda)
        if not sms and known:
            return True  # too old for any torch: all that is left is the CPU
        runs = needed is not None and (offered is None or offered[0] >= needed[0])
        return runs and all(arch_support(sm, torch.archs) is not Support.MISSING for sm in sms)
    rocm = pick_rocm(machine)
    if rocm is not None:
        return rocm_fits(machine, rocm)
    if machine.nvidia.jetson is not None:
        return torch.cuda is not None
    return True


def _install(machine: Machine, wheel: Wheel, why: str, covers: tuple[str, ...], notes: list[str]) -> Advice:
    index = wheel.index_url
    if machine.system.platform == "Darwin" or architecture_of(machine) not in PREBUILT_ON:
        index = ""  # elsewhere the default index has the CPU build alone
    is_right = covers_machine(machine)
    torch = machine.torch
    if is_right and wheel is CPU_WHEEL and not torch.is_cpu_build:
        notes.append(f"torch {torch.version} is a GPU build: it works on the CPU and takes some GB more")
    if is_right:
        action = f"nothing: torch {torch.version} is installed and runs on all of it"
    elif torch.installed:
        action = f"replace torch {torch.version or '(it does not import)'} by the {wheel.tag} build"
    else:
        action = f"install the {wheel.tag} build of torch"
    if machine.system.platform != "Linux":
        notes.append("uneven is tested on Linux alone; on Windows use WSL 2")
    replaces = torch.installed and not is_right
    return Advice(
        "install", why, action, wheel.tag, wheel.torch, index or None, covers, tuple(notes), is_right, replaces
    )


def _asked_for(machine: Machine, build: str) -> Advice:
    wheels = {wheel.tag: wheel for wheel in (CPU_WHEEL, *WHEELS, *ROCM_WHEELS)}
    if build not in wheels:
        raise InputError(f"--build {build}: allowed are {', '.join(wheels)}")
    wheel = wheels[build]
    torch = machine.torch
    # The local part of the version names the build: 2.13.0+cu130.
    is_there = torch.error is None and (torch.version or "").endswith(f"+{build}")
    action = f"nothing: torch {torch.version} is this build" if is_there else f"install the {build} build of torch"
    covers, notes = weigh(machine, wheel)
    if wheel.cuda is not None and machine.nvidia.jetson is not None and not _is_server_jetson(machine):
        notes.append("this is a Jetson: PyTorch's wheels for aarch64 do not run on its GPU")
    replaces = torch.installed and not is_there
    why = "asked for by --build"
    return Advice("install", why, action, build, wheel.torch, wheel.index_url, covers, tuple(notes), is_there, replaces)


def _nvidia(machine: Machine) -> Advice:
    report = machine.gpus
    known = [gpu for gpu in report.gpus if gpu.sm is not None]
    if not known:
        return _unknown(machine)
    choice = choose([gpu.sm for gpu in known if gpu.sm], report.driver_cuda, architecture_of(machine))
    notes = _notes(machine)
    if choice.too_old:
        old = ", ".join(name_of(gpu) for gpu in known if gpu.sm in choice.too_old)
        notes.append(f"no torch of today runs on {old}: it stays unused")
    covers = tuple(name_of(gpu) for gpu in known if gpu.sm in choice.sms)
    if choice.kind == "nothing":
        return _install(machine, CPU_WHEEL, "no torch of today runs on these GPUs", (), notes)
    if choice.kind == "source":
        return _source(machine, choice, notes)
    assert choice.wheel is not None
    if choice.kind == "driver":
        return _old_driver(machine, choice, notes)
    if choice.is_jit:
        notes.append("a GPU is newer than every wheel: the driver compiles torch's code at first use (a slow start)")
    return _install(machine, choice.wheel, _why(machine, choice, covers), covers, notes)


def _unknown(machine: Machine) -> Advice:
    """Where the driver does not tell the architectures, as those before 510 do: what its own version allows."""
    report = machine.gpus
    why = "the driver does not tell the architecture of " + ", ".join(gpu.name for gpu in report.gpus)
    wheel = newest_for_driver(machine)
    if wheel is None:
        why += f", and driver {report.driver or '?'} is for CUDA {report.driver_cuda}, too old for every wheel"
        return _update_driver(machine, Choice("driver", (), WHEELS[0], WHEELS[1:]), why, _notes(machine))
    if wheel is WHEELS[0]:
        return _install(machine, wheel, f"{why}; this is the build for all GPUs of today", (), _notes(machine))
    why += f"; this is the build for driver {report.driver or '?'} (CUDA {report.driver_cuda})"
    return _install(machine, wheel, why, (), _notes(machine))


def _why(machine: Machine, choice: Choice, covers: tuple[str, ...]) -> str:
    report, wheel = machine.gpus, choice.wheel
    assert wheel is not None
    assert wheel.cuda is not None
    driver = f"driver {report.driver or '?'} (CUDA {report.driver_cuda or '?'})"
    text = f"{wheel.tag} has code for {', '.join(covers)}, and {driver} runs it"
    newest = choose(choice.sms, None, architecture_of(machine)).wheel
    if newest is not None and newest.cuda and newest.cuda[0] > wheel.cuda[0]:
        text += f"; {newest.tag} needs driver {oldest_driver(f'{newest.cuda[0]}.0')} or newer"
    return text


def _source(machine: Machine, choice: Choice, notes: list[str]) -> Advice:
    report = machine.gpus
    for wheel, sms in partial_wheels(choice, report.driver_cuda, architecture_of(machine)):
        names = ", ".join(name_of(gpu) for gpu in report.gpus if gpu.sm in sms)
        notes.append(f"without a source build: `uneven setup --build {wheel.tag}` runs {names} alone")
    archs = " beside ".join(choice.sms)
    why = f"no wheel covers {archs}"
    command = source_command(choice.sms)
    action = f"a source build for these archs: {command}"
    offered = release(report.driver_cuda)
    if offered is not None and offered[0] < _SOURCE_CUDA:
        needed = f"{oldest_driver(f'{_SOURCE_CUDA}.0')} or newer, which CUDA {_SOURCE_CUDA} needs"
        action = f"update the NVIDIA driver ({report.driver or '?'}) to {needed}, and {action}"
    notes.insert(0, f"it needs the CUDA {source_toolkit(choice.sms)} toolkit")
    covers = tuple(name_of(gpu) for gpu in report.gpus if gpu.sm in choice.sms)
    if covers_machine(machine):
        action = f"nothing: torch {machine.torch.version} is installed and runs on all of it"
        return Advice("source", why, action, covers=covers, is_installed=True)
    return Advice("source", why, action, covers=covers, notes=tuple(notes), builds=command)


def _old_driver(machine: Machine, choice: Choice, notes: list[str]) -> Advice:
    report, wheel = machine.gpus, choice.wheel
    assert wheel is not None
    covering = ", ".join(other.tag for other in (wheel, *choice.others))
    why = f"driver {report.driver or '?'} is for CUDA {report.driver_cuda}, too old for every wheel that covers "
    return _update_driver(machine, choice, why + f"{choice.span} ({covering})", notes)


def _update_driver(machine: Machine, choice: Choice, why: str, notes: list[str]) -> Advice:
    where = " in Windows" if machine.system.surroundings.wsl else ""
    notes.append(_CPU_INSTEAD)
    return Advice("driver", why, f"{describe_drivers(choice)}{where}, then: uneven setup", notes=tuple(notes))


def _notes(machine: Machine) -> list[str]:
    """What a user with NVIDIA's GPUs has to know beside the build."""
    notes = []
    if machine.system.surroundings.wsl:
        notes.append("WSL: the driver is that of Windows; install none inside WSL")
    if any(gpu.mig for gpu in machine.gpus.gpus):
        notes.append("MIG is on: a process sees one slice, named in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)")
    needed, offered = release(machine.torch.cuda), release(machine.gpus.driver_cuda)
    if needed and offered and offered > needed:
        cuda = f"CUDA {machine.gpus.driver_cuda}"
        notes.append(f"the driver ({cuda}) is newer than torch's CUDA {machine.torch.cuda}: that is fine")
    if machine.amd.gpus:
        names = ", ".join(gpu.gfx for gpu in machine.amd.gpus)
        notes.append(f"one torch is for CUDA or for ROCm: AMD's {names} stays unused")
    return notes


def _amd(machine: Machine) -> Advice:
    wheel = pick_rocm(machine)
    if wheel is None:
        names = [name_of(gpu) for gpu in machine.amd.gpus]
        notes = ["ROCm's own pages say which GPUs it supports; a torch for others is built with PYTORCH_ROCM_ARCH"]
        return _install(machine, CPU_WHEEL, f"no ROCm wheel has code for {', '.join(names)}", (), notes)
    covered = covered_of_amd(machine, wheel)
    covers = tuple(name_of(gpu) for gpu in covered)
    notes = ["training by uneven on ROCm is not tested"]
    unused = ", ".join(name_of(gpu) for gpu in machine.amd.gpus if gpu not in covered)
    if unused:
        notes.append(f"{wheel.tag} has no code for {unused}: it stays unused")
    if machine.amd.may_use is False:
        notes.append("no permission for /dev/kfd: sudo usermod -aG render,video $USER, then log in again")
    elif machine.amd.may_use is None:
        notes.append("there is no /dev/kfd: start the container with --device /dev/kfd --device /dev/dri")
    rocm = f"ROCm {machine.amd.rocm} is installed" if machine.amd.rocm else "the wheel brings ROCm's libraries with it"
    return _install(machine, wheel, f"{wheel.tag} has code for {', '.join(covers)}; {rocm}", covers, notes)


def _is_server_jetson(machine: Machine) -> bool:
    # Since JetPack 7 (R38, Thor) Jetson runs the wheels for aarch64 servers, and its driver lists the GPU.
    number = release((machine.nvidia.jetson or "").removeprefix("R"))
    return number is not None and number[0] >= 38 and bool(machine.gpus.gpus)


def _jetson(machine: Machine) -> Advice:
    linux = machine.nvidia.jetson
    number = release((linux or "").removeprefix("R"))
    why = f"this is a Jetson (Jetson Linux {linux}): PyTorch's wheels for aarch64 do not run on its GPU"
    notes = (_CPU_INSTEAD, "NVIDIA's containers for Jetson (l4t-pytorch, jetson-containers) have a torch in them, too")
    if covers_machine(machine):
        action = f"nothing: torch {machine.torch.version} is installed and is for its GPU"
        return Advice("manual", why, action, is_installed=True)
    if number is not None and number[0] < 36:
        action = "update to JetPack 6 or newer: for this one there is no torch 2.8 or newer"
        return Advice("manual", why, action, notes=notes)
    jetpack = "JetPack 6" if number is not None and number[0] == 36 else "its JetPack"
    action = (
        f"install NVIDIA's own wheel of torch 2.8 or newer for {jetpack} (docs.nvidia.com: Installing PyTorch for "
        "Jetson Platform); with the address of its index: uneven setup --index-url URL"
    )
    return Advice("manual", why, action, notes=notes)


def _hidden_nvidia(machine: Machine) -> Advice | None:
    """What keeps an NVIDIA card that is here, or that a container was to have, from being seen; None: there is none."""
    surroundings, nvidia = machine.system.surroundings, machine.nvidia
    has_card = any(card.vendor == "NVIDIA" for card in machine.cards) or nvidia.kernel_module is not None
    is_asked = nvidia.asked not in (None, "", "void", "none")
    if surroundings.container is not None and (has_card or is_asked):
        seen = "the machine has an NVIDIA GPU" if has_card else "the image asks for NVIDIA GPUs"
        lacks = f"the driver does not answer: {machine.gpus.reason}" if nvidia.has_device_files else "no /dev/nvidia*"
        why = f"{seen}, but this container ({surroundings.container}) does not have it: {lacks}"
        action = (
            "start the container with --gpus all (docker run --gpus all ..., with the NVIDIA Container Toolkit "
            "installed on the host), then: uneven setup"
        )
        return Advice("container", why, action, notes=(_CPU_INSTEAD,))
    if has_card and surroundings.wsl is None:
        held = sorted({card.driver for card in machine.cards if card.vendor == "NVIDIA" and card.driver})
        why = f"there is an NVIDIA card, but its driver does not answer: {machine.gpus.reason}"
        why += f" (the kernel uses {', '.join(held)})" if held and held != ["nvidia"] else ""
        driver = f"{_NEW_DRIVER} or newer (for GPUs before Turing the 580 series)"
        action = f"install the NVIDIA driver {driver}, reboot, then: uneven setup"
        return Advice("driver", why, action, notes=(_CPU_INSTEAD,))
    return None


def _without_gpu(machine: Machine) -> Advice:
    surroundings = machine.system.surroundings
    notes = []
    if surroundings.wsl == 1:
        notes.append("WSL 1 has no GPU access: run 'wsl --set-version DISTRO 2' in Windows")
    elif surroundings.wsl == 2:
        notes.append("WSL 2 shows a GPU once its driver is installed in Windows")
    elif surroundings.container is not None:
        notes.append("if the host has an NVIDIA GPU: start the container with --gpus all")
    return _install(machine, CPU_WHEEL, f"no GPU: {machine.gpus.reason or 'none found'}", (), notes)
