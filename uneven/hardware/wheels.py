"""Which torch covers a set of GPUs: a prebuilt wheel where one covers them all, else a newer driver or a source build.

The table is PyTorch's own release matrix (RELEASE.md, and the build scripts of 2.8 to 2.13): 12.6 is the
last CUDA with Maxwell and Pascal and ends with torch 2.14; 12.8 lost Volta after torch 2.10; 13.0 starts at
Turing. Used by `uneven diagnose` for its fixes and by install/ for its advice: this is the one choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from uneven.hardware.torchbuild import Support, arch_support, parse_sm, release

INDEX = "https://download.pytorch.org/whl/"  # PyTorch's own indexes of wheels, one for each tag
OLDEST_SM = (5, 0)  # what CUDA 12 still compiles for; torch 2.8 and newer are never built with CUDA 11


@dataclass(frozen=True)
class Wheel:
    """A variant of the prebuilt torch; `torch` is the range of versions that have these archs.

    `cuda` is None for the wheels of the CPU and of ROCm. `arm_archs` are those of the wheel for aarch64 servers.
    """

    tag: str
    cuda: tuple[int, int] | None
    torch: str
    archs: tuple[str, ...]
    arm_archs: tuple[str, ...] = ()

    @property
    def index_url(self) -> str:
        return INDEX + self.tag

    def archs_on(self, architecture: str) -> tuple[str, ...]:
        return self.arm_archs if architecture in ("aarch64", "arm64") else self.archs


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
CPU_WHEEL = Wheel("cpu", None, "torch>=2.8", ())
_ROCM6_ARCHS = (
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200"),
    "gfx1201",
)
ROCM_WHEELS = (
    Wheel("rocm7.1", None, "torch>=2.10", (*_ROCM6_ARCHS, "gfx950", "gfx1103", "gfx1150", "gfx1151")),
    Wheel("rocm6.4", None, "torch>=2.8,<2.10", _ROCM6_ARCHS),
)

# The oldest driver for each CUDA major, from the CUDA toolkit release notes (minor version compatibility).
_OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}


@dataclass(frozen=True)
class Choice:
    """What covers these GPUs: a wheel, a wheel after an update of the driver, a source build, or nothing at all.

    `wheel` is also set with "driver": it is the preferred one of those that cover, of which the driver runs none.
    `too_old` are the archs that no torch of today is compiled for; the rest of the choice is about the others.
    """

    kind: Literal["wheel", "driver", "source", "nothing"]
    sms: tuple[str, ...]
    wheel: Wheel | None = None
    others: tuple[Wheel, ...] = ()
    too_old: tuple[str, ...] = ()
    is_jit: bool = False

    @property
    def span(self) -> str:
        return f"{self.sms[0]} to {self.sms[-1]}" if len(self.sms) > 1 else "".join(self.sms)


def pick_wheel(
    sms: Sequence[str],
    driver_cuda: str | None = None,
    architecture: str = "x86_64",
    enough: tuple[Support, ...] = (Support.OK,),
) -> Wheel | None:
    """The preferred wheel with compiled code for all these GPUs that the driver can run; None if there is none."""
    driver = release(driver_cuda)
    for wheel in WHEELS:
        if wheel.cuda is None or (driver is not None and driver[0] < wheel.cuda[0]):
            continue
        if all(arch_support(sm, wheel.archs_on(architecture)) in enough for sm in sms):
            return wheel
    return None


def choose(sms: Sequence[str], driver_cuda: str | None = None, architecture: str = "x86_64") -> Choice:
    """The choice for GPUs of these archs under a driver that is for CUDA `driver_cuda` (None: not known)."""
    ordered = sorted(set(sms), key=lambda sm: parse_sm(sm) or (0, 0))
    too_old = tuple(sm for sm in ordered if (parse_sm(sm) or (0, 0)) < OLDEST_SM)
    rest = tuple(sm for sm in ordered if sm not in too_old)
    if not rest:
        return Choice("nothing", (), too_old=too_old)
    # PTX for a GPU that is newer than every wheel: the driver compiles it at the first use.
    for enough in ((Support.OK,), (Support.OK, Support.JIT)):
        wheel = pick_wheel(rest, driver_cuda, architecture, enough)
        if wheel is not None:
            return Choice("wheel", rest, wheel, too_old=too_old, is_jit=Support.JIT in enough)
    covering = [wheel for wheel in WHEELS if all(_runs(sm, wheel, architecture) for sm in rest)]
    if covering:
        return Choice("driver", rest, covering[0], tuple(covering[1:]), too_old)
    return Choice("source", rest, too_old=too_old)


def _runs(sm: str, wheel: Wheel, architecture: str) -> bool:
    return arch_support(sm, wheel.archs_on(architecture)) is not Support.MISSING


def partial_wheels(choice: Choice, driver_cuda: str | None, architecture: str) -> list[tuple[Wheel, tuple[str, ...]]]:
    """Where no wheel covers all GPUs: for each arch the wheel that the driver runs, with all archs it covers."""
    found: list[tuple[Wheel, tuple[str, ...]]] = []
    for sm in reversed(choice.sms):
        wheel = pick_wheel([sm], driver_cuda, architecture)
        if wheel is not None and wheel not in [known for known, _ in found]:
            found.append((wheel, tuple(other for other in choice.sms if _runs(other, wheel, architecture))))
    return found


def install_command(wheel: Wheel) -> str:
    """The pip command for a wheel, as a user types it."""
    return f"pip install --force-reinstall '{wheel.torch}' --index-url {wheel.index_url}"


def source_archs(sms: Sequence[str]) -> str:
    """'6.1;12.0', as TORCH_CUDA_ARCH_LIST wants it."""
    parsed = sorted({arch for sm in sms if (arch := parse_sm(sm)) is not None})
    return ";".join(f"{major}.{minor}" for major, minor in parsed)


def source_toolkit(sms: Sequence[str]) -> str:
    """The CUDA toolkits that compile for all of these GPUs, in words."""
    parsed = sorted(arch for sm in sms if (arch := parse_sm(sm)) is not None)
    # Only the last CUDA 12 toolkits support both Blackwell and GPUs older than Turing.
    return "12.8 or 12.9" if parsed and parsed[0] < (7, 5) else "12.8 or newer"


def source_command(sms: Sequence[str]) -> str:
    """The command that builds torch for exactly these GPUs."""
    return f"uneven torch build --archs '{source_archs(sms)}'"


def how_to_cover(sms: Sequence[str], driver_cuda: str | None = None, architecture: str = "x86_64") -> str:
    """What to do so that torch runs on all these GPUs, in one line: the fix that `uneven diagnose` prints."""
    choice = choose(sms, driver_cuda, architecture)
    if choice.kind == "nothing":
        return f"no torch of today runs on {', '.join(choice.too_old)}: train on the CPU or on another GPU"
    if choice.kind == "source":
        toolkit = f"(from source, with the CUDA {source_toolkit(choice.sms)} toolkit)"
        return f"no prebuilt torch covers {choice.span}; build it: {source_command(choice.sms)}  {toolkit}"
    assert choice.wheel is not None
    if choice.kind == "driver":
        return f"{describe_drivers(choice)}, then: uneven setup"
    return f"uneven setup  (or: {install_command(choice.wheel)})"


def describe_drivers(choice: Choice) -> str:
    """'update the NVIDIA driver to 525.60.13 or newer (cu126) or 580.65.06 or newer (cu130)'."""
    newest = {wheel.cuda[0]: wheel for wheel in reversed((choice.wheel, *choice.others)) if wheel and wheel.cuda}
    parts = [f"{_OLDEST_DRIVER[major]} or newer (for {newest[major].tag})" for major in sorted(newest)]
    return f"update the NVIDIA driver to {', or '.join(parts)}"


def oldest_driver(cuda: str | None) -> str | None:
    """The oldest driver version that runs code built for this CUDA; None if unknown."""
    version = release(cuda)
    return _OLDEST_DRIVER.get(version[0]) if version else None
