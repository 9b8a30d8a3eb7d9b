"""The device string, with which a user names the device of a rank.

`cpu`, `cuda`, `cuda:1`; `@0.4` makes a rank slower by sleeping, `%60` takes an MPS slice of a CUDA GPU.
Parsing looks at the text alone, never at the machine (that is preflight.check_device), so that a config
written elsewhere can be read here. Invariant: parse_device(str(device)) == device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from uneven.errors import InputError

DeviceKind = Literal["cpu", "cuda"]
ALLOWED = "cpu, cuda or cuda:N, with @SPEED (0 < SPEED <= 1) or, on cuda, %PERCENT (1 to 100)"
NEXT = "run 'uneven devices' to see what this machine has"

_SHAPE = re.compile(r"(?P<kind>cpu|cuda)(?::(?P<index>[0-9]{1,4}))?(?:(?P<mark>[@%])(?P<number>.*))?")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?|[0-9]+\.")


def _fault(kind: str, index: int | None, speed: float, percent: int | None) -> str | None:
    """What is wrong and what would be allowed, or None."""
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
    """Where one rank trains: a kind, a CUDA index, and at most one of a simulated speed and a slice.

    Invariant: a Device is always valid; parsed or made by hand, it passes the same checks.
    """

    kind: DeviceKind
    index: int | None = None
    speed: float = 1.0
    percent: int | None = None

    def __post_init__(self) -> None:
        fault = _fault(self.kind, self.index, self.speed, self.percent)
        if fault is not None:
            raise InputError(f"device {str(self)!r}: {fault}; {NEXT}")

    @property
    def torch_name(self) -> str:
        """The name torch knows it by: 'cpu' or 'cuda:1'."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def __str__(self) -> str:
        # repr of a float is the shortest text that reads back to the same float.
        speed = f"@{self.speed!r}" if self.speed != 1.0 else ""
        percent = f"%{self.percent}" if self.percent is not None else ""
        return f"{self.torch_name}{speed}{percent}"


def parse_device(text: str) -> Device:
    """One device string to a Device; InputError names the text, what is allowed and the next command."""
    text = text.strip()
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise InputError(f"device {text!r}: allowed is {ALLOWED}; {NEXT}")
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
            f"device {text!r}: a speed (@) and a slice (%) cannot be combined; allowed is one of them; {NEXT}"
        )
    elif match["mark"]:
        raise InputError(f"device {text!r}: allowed is {ALLOWED}; {NEXT}")
    fault = _fault(kind, index, speed, percent)
    if fault is not None:
        raise InputError(f"device {text!r}: {fault}; {NEXT}")
    return Device(kind, index, speed, percent)


def needs_ranks(devices: Sequence[Device]) -> bool:
    """Whether rank processes are started for these devices.

    One device trains in the caller's own process, unless it is a slice: its variables must be set before CUDA is
    initialised, and in the caller's process it may be already.
    """
    return len(devices) > 1 or devices[0].percent is not None


def parse_devices(devices: str | Sequence[str | Device]) -> tuple[Device, ...]:
    """'cuda:0,cpu@0.4' or a sequence of such strings to Devices, one per rank, in rank order."""
    parts: Sequence[str | Device] = devices.split(",") if isinstance(devices, str) else devices
    if not parts:
        raise InputError(f"devices {devices!r}: allowed is one or more, as in cpu,cpu@0.4; {NEXT}")
    if any(isinstance(part, str) and not part.strip() for part in parts):
        raise InputError(f"devices {devices!r}: one of them is empty; allowed is {ALLOWED}; {NEXT}")
    return tuple(part if isinstance(part, Device) else parse_device(part) for part in parts)
