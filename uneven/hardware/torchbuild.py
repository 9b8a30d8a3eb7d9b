"""The installed torch: what it was built for, and which GPUs its compiled code runs on.

read_torch imports torch but never initialises CUDA, so that a diagnosis also works where CUDA fails.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from uneven.errors import TorchMissingError
from uneven.hardware.optional import or_none


@dataclass(frozen=True)
class TorchBuild:
    """The torch installation; `error` is set if it is installed but cannot be imported."""

    installed: bool
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    nccl: bool = False
    nccl_version: str | None = None
    gloo: bool = False
    threads: int | None = None
    cpu_capability: str | None = None
    error: str | None = None

    @property
    def is_cpu_build(self) -> bool:
        return self.cuda is None and self.hip is None


class Support(str, Enum):
    """Whether compiled code for some architectures runs on a GPU."""

    OK = "OK"
    JIT = "JIT"  # from PTX, compiled by the driver at the first use: slow start, then fine
    MISSING = "MISSING"


def is_installed() -> bool:
    """Whether there is a torch to import, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def raise_if_missing(error: ModuleNotFoundError) -> None:
    """TorchMissingError in place of `error` if that came of torch not being installed; else nothing."""
    if (error.name or "").partition(".")[0] == "torch" and not is_installed():
        raise TorchMissingError from None


def installed_version() -> str | None:
    """torch's version without importing it (an import takes seconds); None if it is not installed."""
    if not is_installed():
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return read_torch().version  # a source tree on sys.path has no package metadata


def release(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of '2.13.0+cpu', or of CUDA's '12.8'; None if it does not match."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def read_torch() -> TorchBuild:
    """Describe the torch that `import torch` finds; never raises."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return TorchBuild(installed=False)
        return TorchBuild(installed=True, error=str(error))
    except Exception as error:  # a missing shared library, a broken installation
        return TorchBuild(installed=True, error=f"{type(error).__name__}: {error}".splitlines()[0])

    # get_arch_list() is empty if no GPU is visible; the compiled-in flags are always available.
    flags = or_none(lambda: torch._C._cuda_getArchFlags())
    archs = flags.split() if flags else or_none(lambda: torch.cuda.get_arch_list())
    nccl = bool(or_none(lambda: torch.distributed.is_nccl_available()))
    nccl_version = or_none(lambda: torch.cuda.nccl.version()) if nccl else None
    return TorchBuild(
        installed=True,
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=getattr(torch.version, "hip", None),
        archs=tuple(archs or ()),
        nccl=nccl,
        nccl_version=".".join(str(part) for part in nccl_version) if isinstance(nccl_version, tuple) else None,
        gloo=bool(or_none(lambda: torch.distributed.is_gloo_available())),
        threads=or_none(lambda: torch.get_num_threads()),
        cpu_capability=or_none(lambda: torch.backends.cpu.get_cpu_capability()),
    )


def parse_sm(name: str) -> tuple[int, int] | None:
    """'sm_86' to (8, 6), 'sm_120' to (12, 0); suffixes are dropped; None if it does not match."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", name)
    return (int(match[1]), int(match[2])) if match else None


def arch_support(sm: str, archs: Sequence[str]) -> Support:
    """Whether code compiled for `archs` runs on a GPU of architecture `sm`.

    Machine code (sm_XY) runs on the same major with an equal or higher minor; PTX (compute_XY) is compiled by
    the driver for anything at or above it. Suffix 'a' is for exactly that architecture, 'f' for its family (the
    same major). From the CUDA programming guide, "Binary Compatibility" and "PTX Compatibility".
    """
    gpu = parse_sm(sm)
    if gpu is None:
        return Support.MISSING
    support = Support.MISSING
    for name in archs:
        arch = parse_sm(name)
        if arch is None:
            continue
        same_family = arch[0] == gpu[0] and arch[1] <= gpu[1]
        if name.endswith("a"):
            runs = arch == gpu
        elif name.endswith("f") or name.startswith("sm_"):
            runs = same_family
        else:
            runs = arch <= gpu
        if runs and name.startswith("sm_"):
            return Support.OK
        if runs:
            support = Support.JIT
    return support
