"""The device string, with which a user names the device of a rank.

`cpu`, `cuda`, `cuda:1`; `@0.4` slows a rank down by sleeping, `%60` is a slice of a CUDA GPU by MPS. Parsing does not
query the machine (preflight.check_device does), so that a configuration for another machine can be read here.
Invariant: parse_device(str(device)) == device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from uneven.errors import InputError

DeviceKind = Literal["cpu", "cuda"]
ALLOWED = "cpu, cuda or cuda:N, with @SPEED (0 < SPEED <= 1) or, on cuda, %PERCENT (1 to 100)"
_HINT = "run 'uneven devices' to see what this machine has"

_SHAPE = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<index>[0-9]{1,4}))?(?:(?P<mark>[@%])(?P<number>.*))?")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?|[0-9]+\.")


def _fault(kind: str, index: int | None, speed: float, percent: int | None) -> str | None:
    """Why these values are not a device and what is allowed; None if they are valid."""
    if kind not in ("cpu", "cuda"):
        return f"allowed is {ALLOWED}"
    if kind == "cpu" and index is not None:
        return "a cpu has no index, all cores are one device; allowed is cpu or cpu@SPEED"
    if kind == "cuda" and (index is None or index < 0):
        return "the index of a CUDA device is 0 or above, as in cuda:0"
    if not 0.0 < speed <= 1.0:
        return "a speed is above 0 and at most 1, as in cpu@0.4"
    if percent is not None and kind == "cpu":
        return "a slice (%) needs CUDA MPS; a slower cpu is cpu@SPEED, as in cpu@0.5"
    if percent is not None and not 1 <= percent <= 100:
        return "a slice is 1 to 100 percent, as in cuda:0%60"
    if percent is not None and speed != 1.0:
        return "a speed (@) and a slice (%) cannot be combined; allowed is one of them"
    return None


@dataclass(frozen=True)
class Device:
    """The device of one rank: a kind, a CUDA index, and at most one of a simulated speed and a slice.

    Invariant: a Device is valid, whether it was parsed or constructed.
    """

    kind: DeviceKind
    index: int | None = None
    speed: float = 1.0
    percent: int | None = None

    def __post_init__(self) -> None:
        fault = _fault(self.kind, self.index, self.speed, self.percent)
        if fault is not None:
            raise InputError(f"device {str(self)!r}: {fault}; {_HINT}")

    @property
    def torch_name(self) -> str:
        """The name for torch.device: 'cpu' or 'cuda:1'."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def __str__(self) -> str:
        # repr of a float is the shortest text that parses to the same float.
        speed = f"@{self.speed!r}" if self.speed != 1.0 else ""
        percent = f"%{self.percent}" if self.percent is not None else ""
        return f"{self.torch_name}{speed}{percent}"


def parse_device(text: str) -> Device:
    """Parse one device string; InputError names the text, what is allowed and a command that helps."""
    text = text.strip()
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise InputError(f"device {text!r}: allowed is {ALLOWED}; {_HINT}")
    kind: DeviceKind = "cuda" if match["kind"] == "cuda" else "cpu"
    number = match["number"] or ""
    index = int(match["index"]) if match["index"] else (0 if kind == "cuda" else None)
    speed, percent = 1.0, None
    if match["mark"] == "@" and _NUMBER.fullmatch(number):
        speed = float(number)
    elif match["mark"] == "%" and number.isascii() and number.isdigit():
        percent = int(number)
    elif "@" in text and "%" in text:
        raise InputError(
            f"device {text!r}: a speed (@) and a slice (%) cannot be combined; allowed is one of them; {_HINT}"
        )
    elif match["mark"]:
        raise InputError(f"device {text!r}: allowed is {ALLOWED}; {_HINT}")
    fault = _fault(kind, index, speed, percent)
    if fault is not None:
        raise InputError(f"device {text!r}: {fault}; {_HINT}")
    return Device(kind, index, speed, percent)


def needs_ranks(devices: Sequence[Device]) -> bool:
    """Whether rank processes are started for these devices.

    One device trains in the caller's process, unless it is a slice: the MPS variables must be set before CUDA is
    initialised, which may already have happened in the caller's process.
    """
    return len(devices) > 1 or devices[0].percent is not None


def parse_devices(devices: str | Sequence[str | Device]) -> tuple[Device, ...]:
    """Parse 'cuda:0,cpu@0.4' or a sequence of such strings into Devices, one per rank, in rank order."""
    parts: Sequence[str | Device] = devices.split(",") if isinstance(devices, str) else devices
    if not parts:
        raise InputError(f"devices {devices!r}: allowed is one or more, as in cpu,cpu@0.4; {_HINT}")
    if any(isinstance(part, str) and not part.strip() for part in parts):
        raise InputError(f"devices {devices!r}: one of them is empty; allowed is {ALLOWED}; {_HINT}")
    return tuple(part if isinstance(part, Device) else parse_device(part) for part in parts)


def takes_turns(devices: Sequence[Device]) -> bool:
    """Whether ranks share a GPU without slices: they compute one after the other there."""
    whole = [device.torch_name for device in devices if device.kind == "cuda" and device.percent is None]
    return len(set(whole)) < len(whole)


def is_lesser_copy(device: Device, devices: Sequence[Device]) -> bool:
    """Whether it stands for a slower device, simulated by a speed or by the smaller slice of a GPU.

    Trained alone it gives the params of the full one beside it; only its speed is its own.
    """
    if device.percent is None:
        return device.speed < 1.0 and any(other.speed >= 1.0 for other in devices)
    slices = [other.percent for other in devices if other.torch_name == device.torch_name and other.percent is not None]
    return device.percent < max(slices, default=0)
