"""Which torch to install for a set of GPUs: a prebuilt wheel where one covers them all, else a source build.

The table is PyTorch's own release matrix (RELEASE.md, and the build scripts of 2.8 to 2.13): 12.6 is the
last CUDA with Maxwell and Pascal and ends with torch 2.14; 12.8 lost Volta after torch 2.10; 13.0 starts at
Turing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from uneven.hardware.torchbuild import Support, arch_support, parse_sm, release


@dataclass(frozen=True)
class Wheel:
    """A CUDA variant of the prebuilt torch; `torch` is the range of versions that have these archs."""

    tag: str
    cuda: tuple[int, int]
    torch: str
    archs: tuple[str, ...]


# In order of preference.
WHEELS = (
    Wheel("cu130", (13, 0), "torch>=2.9", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    Wheel(
        "cu126",
        (12, 6),
        "torch>=2.8,<2.15",
        ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    ),
    Wheel(
        "cu128",
        (12, 8),
        "torch>=2.8,<2.11",
        ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    ),
)

# The oldest driver for each CUDA major, from the CUDA toolkit release notes (minor version compatibility).
_OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}


def pick_wheel(sms: Sequence[str], driver_cuda: str | None = None) -> Wheel | None:
    """The preferred wheel with compiled code for all these GPUs that the driver can run; None if there is none."""
    driver = release(driver_cuda)
    for wheel in WHEELS:
        if driver is not None and driver[0] < wheel.cuda[0]:
            continue
        if all(arch_support(sm, wheel.archs) is Support.OK for sm in sms):
            return wheel
    return None


def install_command(wheel: Wheel) -> str:
    """The pip command for a wheel; the URL of its index is on pytorch.org, not in this code."""
    index = f"<the {wheel.tag} index named on pytorch.org/get-started>"
    return f"pip install --force-reinstall '{wheel.torch}' --index-url {index}"


def source_command(sms: Sequence[str]) -> str:
    """The command that builds torch for exactly these GPUs, in a checkout of the PyTorch sources."""
    parsed = sorted({arch for sm in sms if (arch := parse_sm(sm)) is not None})
    archs = ";".join(f"{major}.{minor}" for major, minor in parsed)
    # Only the last CUDA 12 toolkits support both Blackwell and GPUs older than Turing.
    toolkit = "12.8 or 12.9" if parsed and parsed[0] < (7, 5) else "12.8 or newer"
    return (
        f'TORCH_CUDA_ARCH_LIST="{archs}" pip install --no-build-isolation -v .  '
        f"(in a checkout of the PyTorch sources, with the CUDA {toolkit} toolkit)"
    )


def how_to_cover(sms: Sequence[str], driver_cuda: str | None = None) -> str:
    """What to install so that torch runs on all these GPUs."""
    wheel = pick_wheel(sms, driver_cuda)
    if wheel is not None:
        return install_command(wheel)
    if pick_wheel(sms) is not None:
        driver = _OLDEST_DRIVER[13]
        return f"update the NVIDIA driver to {driver} or newer, then: {install_command(WHEELS[0])}"
    ordered = sorted(set(sms), key=lambda sm: parse_sm(sm) or (0, 0))
    span = f"{ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else ordered[0]
    return f"no prebuilt torch covers {span}; build it: {source_command(sms)}"


def oldest_driver(cuda: str | None) -> str | None:
    """The oldest driver version that runs code built for this CUDA; None if unknown."""
    version = release(cuda)
    return _OLDEST_DRIVER.get(version[0]) if version else None
