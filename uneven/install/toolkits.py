"""Which CUDA toolkits compile for which GPU architectures, and which of them this machine has.

The ranges are those of nvcc, from the release notes of CUDA 11.0 to 13.0: 13.0 dropped everything before Turing.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.errors import InputError

Version = tuple[int, int]

OLDEST = (12, 6)  # that PyTorch 2.8 and newer are built with
_LAST_12 = (12, 9)
# Compute capability -> (first toolkit, last toolkit or None). Older than Turing: 12.9 is the last.
_RANGES: dict[Version, tuple[Version, Version | None]] = {
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2)], ((9, 2), _LAST_12)),
    (7, 5): ((10, 0), None),
    (8, 0): ((11, 0), None),
    (8, 6): ((11, 1), None),
    (8, 7): ((11, 4), None),
    (8, 8): ((13, 0), None),
    (8, 9): ((11, 8), None),
    (9, 0): ((11, 8), None),
    (10, 0): ((12, 8), None),
    (10, 1): ((12, 8), _LAST_12),  # called 11.0 from CUDA 13.0 on
    (10, 3): ((12, 9), None),
    (11, 0): ((13, 0), None),
    (12, 0): ((12, 8), None),
    (12, 1): ((12, 9), None),
}
# The images of NVIDIA with compiler and cuDNN, in order of preference.
_IMAGES = {(12, 8): "12.8.1", (13, 0): "13.0.1", (12, 9): "12.9.1", (12, 6): "12.6.3"}


@dataclass(frozen=True)
class Arch:
    """A compute capability such as 6.1, to be compiled as machine code, and as PTX too with `ptx`."""

    capability: Version
    ptx: bool = False

    @property
    def sm(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}{'+PTX' if self.ptx else ''}"


@dataclass(frozen=True)
class Toolkit:
    """An installed CUDA toolkit."""

    home: Path
    version: Version


@dataclass(frozen=True)
class ToolkitRange:
    """The toolkits that compile for some architectures: from `oldest` to `newest`, None if there is no last one."""

    oldest: Version
    newest: Version | None

    def __contains__(self, version: Version) -> bool:
        return self.oldest <= version and (self.newest is None or version <= self.newest)

    def __str__(self) -> str:
        oldest = dotted(self.oldest)
        if self.newest is None:
            return f"{oldest} or newer"
        return oldest if self.newest == self.oldest else f"{oldest} to {dotted(self.newest)}"

    @property
    def image(self) -> str | None:
        """A Docker image with such a toolkit and cuDNN."""
        tag = next((tag for version, tag in _IMAGES.items() if version in self), None)
        return None if tag is None else f"nvidia/cuda:{tag}-cudnn-devel-ubuntu22.04"


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def parse_archs(text: str) -> tuple[Arch, ...]:
    """'6.1;12.0' as TORCH_CUDA_ARCH_LIST takes it; commas, spaces and sm_61 are understood, too. Sorted, each once."""
    found: dict[Version, Arch] = {}
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,2})\.(\d)(\+PTX)?", word) or re.fullmatch(r"sm_(\d{1,2})(\d)(\+PTX)?", word)
        if match is None:
            raise InputError(f"--archs {text!r}: allowed are compute capabilities as in '6.1;12.0' or '8.6+PTX'")
        capability = (int(match[1]), int(match[2]))
        if capability not in _RANGES:
            known = " ".join(dotted(one) for one in _RANGES)
            raise InputError(f"--archs {text!r}: torch 2.8 and newer cannot be built for {word}; known are {known}")
        ptx = bool(match[3]) or (capability in found and found[capability].ptx)
        found[capability] = Arch(capability, ptx)
    return tuple(found[capability] for capability in sorted(found))


def toolkits_for(archs: Sequence[Arch]) -> ToolkitRange:
    """The toolkits that compile for all of these; InputError that names the two that exclude each other."""
    oldest = max(archs, key=lambda arch: _RANGES[arch.capability][0])
    ended = [arch for arch in archs if _RANGES[arch.capability][1] is not None]
    first = max(OLDEST, _RANGES[oldest.capability][0])
    if not ended:
        return ToolkitRange(first, None)
    newest = min(ended, key=lambda arch: _RANGES[arch.capability][1] or first)
    last = _RANGES[newest.capability][1]
    assert last is not None
    if last < first:
        raise InputError(
            f"no CUDA toolkit compiles for both {newest} (up to CUDA {dotted(last)}) and {oldest} (from CUDA "
            f"{dotted(first)} on): leave one of them out"
        )
    return ToolkitRange(first, last)


def find_toolkits(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Toolkit]:
    """The toolkits of this machine: CUDA_HOME's, the one on the PATH, and those in /usr/local and /opt."""
    compiler = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    homes += [Path(compiler).resolve().parent.parent] if compiler else []
    homes += sorted([*root.glob("usr/local/cuda*"), *root.glob("opt/cuda*")], reverse=True)
    found: dict[Path, Toolkit] = {}
    for home in homes:
        place = home.resolve()
        # A wrapper script for nvcc may be anywhere; a toolkit has its headers beside it.
        if place in found or not (place / "include" / "cuda.h").is_file():
            continue
        version = _nvcc_version(place / "bin" / "nvcc")
        if version is not None:
            found[place] = Toolkit(home, version)
    return list(found.values())


def _nvcc_version(nvcc: Path) -> Version | None:
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None
