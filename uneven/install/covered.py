"""Which GPUs of a machine a prebuilt torch runs on, and what stands against it: the pieces that advice.py decides with.

All functions are pure. A GPU is named as the advice names it: with its architecture, so that the name says why.
"""

from uneven.hardware.cards import AmdGpu
from uneven.hardware.gpus import Gpu
from uneven.hardware.torchbuild import Support, arch_support, release
from uneven.hardware.wheels import ROCM_WHEELS, WHEELS, Wheel, oldest_driver
from uneven.install.machine import Machine

PREBUILT_ON = ("x86_64", "aarch64", "amd64", "arm64")
_ROCM_ON = ("x86_64", "amd64")


def architecture_of(machine: Machine) -> str:
    """Of the CPU: x86_64, aarch64, ..."""
    return machine.system.cpu.architecture


def name_of(gpu: Gpu | AmdGpu) -> str:
    """'NVIDIA GeForce RTX 4090 (sm_89)' or 'AMD GPU 0 (gfx1100)'."""
    return f"AMD GPU {gpu.index} ({gpu.gfx})" if isinstance(gpu, AmdGpu) else f"{gpu.name} ({gpu.sm or 'sm_?'})"


def driver_runs(machine: Machine, wheel: Wheel) -> bool:
    """Whether NVIDIA's driver is new enough for this wheel; True where its version is not known."""
    offered = release(machine.gpus.driver_cuda)
    return offered is None or wheel.cuda is None or offered[0] >= wheel.cuda[0]


def has_code(machine: Machine, wheel: Wheel, gpu: Gpu | AmdGpu) -> bool:
    """Whether the wheel for this machine's CPU has code for a GPU; False where the architecture is not known."""
    if isinstance(gpu, AmdGpu):
        return gpu.gfx in wheel.archs
    archs = wheel.archs_on(architecture_of(machine)) if wheel.cuda else ()
    return gpu.sm is not None and arch_support(gpu.sm, archs) is not Support.MISSING


def newest_for_driver(machine: Machine) -> Wheel | None:
    """The preferred CUDA wheel that the driver runs, whatever the GPU is; None if the driver is too old for all."""
    return next((wheel for wheel in WHEELS if driver_runs(machine, wheel)), None)


def pick_rocm(machine: Machine) -> Wheel | None:
    """The ROCm wheel with code for the most of AMD's GPUs, the newest of these that the installed ROCm allows.

    None if none has code for any of them. One GPU is enough: beside a card there often is an integrated GPU that no
    wheel knows.
    """
    if architecture_of(machine) not in _ROCM_ON:
        return None
    major = (release(machine.amd.rocm) or (7, 0))[0]
    wheels = [wheel for wheel in ROCM_WHEELS if int(wheel.tag[4]) <= major] or list(ROCM_WHEELS[-1:])
    best = max(wheels, key=lambda wheel: len(covered_of_amd(machine, wheel)))  # the first of equals: the newest
    return best if covered_of_amd(machine, best) else None


def covered_of_amd(machine: Machine, wheel: Wheel) -> tuple[AmdGpu, ...]:
    return tuple(gpu for gpu in machine.amd.gpus if has_code(machine, wheel, gpu))


def rocm_fits(machine: Machine, wheel: Wheel) -> bool:
    """Whether the installed torch is for ROCm and has code for every AMD GPU that `wheel` would cover."""
    if machine.torch.hip is None:
        return False
    built = {arch.partition(":")[0] for arch in machine.torch.archs}  # gfx90a:xnack- is gfx90a
    return not built or all(gpu.gfx in built for gpu in covered_of_amd(machine, wheel))


def weigh(machine: Machine, wheel: Wheel) -> tuple[tuple[str, ...], list[str]]:
    """For a wheel that the user has asked for: the names of the GPUs it has code for, and why it may not work here."""
    gpus: list[Gpu | AmdGpu] = [*machine.gpus.gpus, *machine.amd.gpus]
    covers = tuple(name_of(gpu) for gpu in gpus if has_code(machine, wheel, gpu))
    notes = []
    architecture = architecture_of(machine)
    is_gpu_build = wheel.tag != "cpu"
    has_cpu = architecture in (_ROCM_ON if wheel in ROCM_WHEELS else PREBUILT_ON)
    if is_gpu_build and (not has_cpu or machine.system.platform == "Darwin"):
        notes.append(f"there is no {wheel.tag} build for {machine.system.platform} on {architecture}")
    if machine.gpus.gpus and not driver_runs(machine, wheel):
        cuda = f"{wheel.cuda[0]}.0" if wheel.cuda else None
        driver = f"driver {machine.gpus.driver or '?'} (CUDA {machine.gpus.driver_cuda})"
        notes.append(f"{driver} is too old for {wheel.tag}, which needs {oldest_driver(cuda)} or newer")
    # A GPU whose architecture is not told may well run with a CUDA build, but with no other.
    judged = [gpu for gpu in gpus if wheel.cuda is None or isinstance(gpu, AmdGpu) or gpu.sm is not None]
    unused = [name_of(gpu) for gpu in judged if not has_code(machine, wheel, gpu)]
    if unused:
        notes.append(f"{wheel.tag} has no code for {', '.join(unused)}: unused with this build")
    elif is_gpu_build and not gpus and machine.nvidia.jetson is None:
        notes.append(f"no GPU was found that {wheel.tag} could run on")
    return covers, notes
