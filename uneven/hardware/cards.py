"""Graphics cards that the kernel sees, whatever driver they have: on the PCI bus, and AMD's in its compute driver.

gpus.py asks NVIDIA's driver; this answers where there is none: a card without a driver, a container that was started
without its machine's GPUs, a GPU of AMD. Only files are read, below `root`, so that tests pass fake trees.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.hardware.optional import read_text

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, processing accelerator


@dataclass(frozen=True)
class Card:
    """A card on the PCI bus; `driver` is the kernel module that holds it, such as nvidia, nouveau or amdgpu."""

    vendor: str
    device: str
    driver: str | None = None


@dataclass(frozen=True)
class AmdGpu:
    """A GPU of AMD's compute driver; `gfx` is its architecture as ROCm spells it, such as gfx1100."""

    index: int
    gfx: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class AmdReport:
    """AMD's GPUs, the installed ROCm (None: none), and whether this user may use /dev/kfd (None: there is none)."""

    gpus: tuple[AmdGpu, ...] = ()
    rocm: str | None = None
    may_use: bool | None = None


@dataclass(frozen=True)
class Nvidia:
    """Signs of NVIDIA hardware around this process, apart from its driver's library.

    `asked` is NVIDIA_VISIBLE_DEVICES, which images and container runtimes set. `jetson` is the release of Jetson
    Linux, such as R36.4, or "unknown" on a Tegra kernel.
    """

    has_device_files: bool = False
    kernel_module: str | None = None
    asked: str | None = None
    jetson: str | None = None


def read_cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """Display and accelerator cards of NVIDIA, AMD and Intel on the PCI bus; also visible inside most containers."""
    cards = []
    for folder in _folders(root / "sys/bus/pci/devices"):
        vendor = _VENDORS.get((read_text(folder / "vendor") or "").strip())
        kind = (read_text(folder / "class") or "").strip()
        if vendor is None or not kind.startswith(_DISPLAY_CLASSES):
            continue
        driver = os.path.basename(os.path.realpath(folder / "driver")) if (folder / "driver").exists() else None
        cards.append(Card(vendor, (read_text(folder / "device") or "").strip(), driver))
    return tuple(cards)


def read_amd(root: Path = Path("/")) -> AmdReport:
    """AMD's GPUs from the topology of its compute driver (KFD)."""
    gpus: list[AmdGpu] = []
    for node in _folders(root / "sys/class/kfd/kfd/topology/nodes"):
        fields = dict(re.findall(r"^(\w+) (\d+)$", read_text(node / "properties") or "", re.MULTILINE))
        version = int(fields.get("gfx_target_version", 0))
        if int(fields.get("simd_count", 0)) > 0 and version > 0:
            gpus.append(AmdGpu(len(gpus), _gfx(version), _memory(node)))
    device = root / "dev/kfd"
    may_use = os.access(device, os.R_OK | os.W_OK) if device.exists() else None
    version_line = (read_text(root / "opt/rocm/.info/version") or "").strip()
    match = re.match(r"\d+\.\d+(\.\d+)?", version_line)
    return AmdReport(tuple(gpus), match[0] if match else None, may_use)


def read_nvidia(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Nvidia:
    """Device files, kernel module, what a container runtime was asked for, Jetson."""
    names = ("nvidia0", "nvidiactl", "dxg", "nvhost-gpu", "nvgpu")  # dxg: WSL 2; the last two: Jetson
    module = re.search(
        r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", read_text(root / "proc/driver/nvidia/version") or ""
    )
    return Nvidia(
        has_device_files=any((root / "dev" / name).exists() for name in names),
        kernel_module=module[1] if module else None,
        asked=environ.get("NVIDIA_VISIBLE_DEVICES"),
        jetson=_jetson(root),
    )


def _jetson(root: Path) -> str | None:
    # "# R36 (release), REVISION: 4.3, GCID: ..."
    text = read_text(root / "etc/nv_tegra_release") or ""
    match = re.search(r"R(\d+) \(release\), REVISION: (\d+)", text)
    if match:
        return f"R{match[1]}.{match[2]}"
    kernel = (read_text(root / "proc/sys/kernel/osrelease") or "").strip()
    return "unknown" if kernel.endswith("tegra") else None


def _gfx(version: int) -> str:
    # 90010 is gfx90a, 110000 gfx1100: major in decimal, then minor and stepping as one hexadecimal digit each.
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _memory(node: Path) -> int | None:
    sizes: list[int] = []
    for bank in _folders(node / "mem_banks"):
        fields: dict[str, Any] = dict(re.findall(r"^(\w+) (\d+)$", read_text(bank / "properties") or "", re.MULTILINE))
        if fields.get("heap_type") in ("1", "2"):  # the memory of the card, public or private
            sizes.append(int(fields.get("size_in_bytes", 0)))
    return sum(sizes) or None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    except OSError:
        return []
