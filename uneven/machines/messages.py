"""What the machines of a run say to each other: every field of every message, with its type and its size.

Who knows the token may still be hostile, or speak another version. So each side reads through `checked`, here and
nowhere else: a field of a wrong type or size is a BadMessageError that names it, which ends that connection; a field
that is not in the table is left out. In texts that people read, whatever a terminal would obey is written as an escape.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from uneven.errors import InputError
from uneven.format import printable
from uneven.hardware.device import parse_devices
from uneven.machines.wire import BadMessageError

Check = Callable[[Any], Any]  # the value as it may be used, or ValueError with what is allowed
Fields = Mapping[str, Check]

MOST_MACHINES = 1024
MOST_RANKS = 4096
MOST_PATH = 4096
MOST_ARGS, MOST_ARG_TEXT = 1000, 1 << 17
MOST_LINES = 1 << 16  # characters of a message for people
MOST_NUMBER = 2**63
STATUS_KEYS = ("policy", "out", "why", "saved", "phase")  # those of a status that are texts
STATUS_NUMBERS = (
    *("epochs", "steps", "total", "generation", "lost", "slot", "epoch", "samples", "samples_per_s", "at", "seconds"),
    *("rank", "share", "loss", "round"),
)


def checked(message: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The fields of a message that are known, each as it may be used; BadMessageError where one is not as agreed."""
    found: dict[str, Any] = {}
    for name, value in message.items():
        if name in fields:
            try:
                found[name] = fields[name](value)
            except ValueError as error:
                raise BadMessageError(f"it sent a bad message: {name} {error}") from error
    for name in found:
        for other in NEEDS.get(name, ()):
            if other not in found and other in fields:
                raise BadMessageError(f"it sent a bad message: {name} comes with {other}")
    return found


def text(most: int, *, is_empty_allowed: bool = True) -> Check:
    """As it is, for programs."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most or "\0" in value or not (value or is_empty_allowed):
            raise ValueError(f"must be text of at most {most} characters")
        return value

    return check


def shown(most: int, keep: str = "") -> Check:
    """For people: longer ones are cut."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("must be text")
        return printable(value[:most], keep)

    return check


def matching(pattern: str, what: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is None:
            raise ValueError(f"must be {what}")
        return value

    return check


def whole(least: int = 0, most: int = MOST_NUMBER) -> Check:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be a whole number within {least} and {most}")
        return value

    return check


def number(value: Any) -> int | float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e30 < value < 1e30:
        raise ValueError("must be a number")
    return value


def flag(value: Any) -> bool:
    if value not in (True, False) or not isinstance(value, int):
        raise ValueError("must be true or false")
    return bool(value)


def maybe(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def several(check: Check, most: int, least: int = 0) -> Check:
    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise ValueError(f"must be a list of {least} to {most}")
        return [check(one) for one in value]

    return check_all


def mapped(name: Check, value: Check, most: int) -> Check:
    def check(found: Any) -> dict[str, Any]:
        if not isinstance(found, dict) or len(found) > most:
            raise ValueError(f"must be an object of at most {most} names")
        return {name(key): value(one) for key, one in found.items()}

    return check


def table(fields: Fields, missing: Mapping[str, Any] | None = None) -> Check:
    """An object with these fields; one that is left out has its value in `missing`, and must be there otherwise."""
    known = missing or {}

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("must be an object")
        found = {}
        for name, one in fields.items():
            if name in value:
                try:
                    found[name] = one(value[name])
                except ValueError as error:
                    raise ValueError(f"has {name}, which {error}") from error
            elif name in known:
                found[name] = known[name]
            else:
                raise ValueError(f"must have {name}")
        return found

    return check


LABEL = shown(64)
LINE = shown(1000)
LINES = shown(MOST_LINES, keep="\n\t")
NAME = matching(r"[A-Za-z0-9_-]{1,64}", "a name of letters and digits")
INDEX = whole(0, MOST_RANKS)
PORT = whole(1, 65535)
BYTES = maybe(whole())


def address(value: Any) -> str:
    """Numeric: a name would be looked up."""
    found: str = text(100)(value)
    try:
        ip_address(found.partition("%")[0])
    except ValueError as error:
        raise ValueError("must be a numeric address") from error
    return found


def device(value: Any) -> str:
    try:
        if isinstance(value, str) and len(value) <= 64 and len(parse_devices([value])) == 1:
            return value
    except InputError:
        pass
    raise ValueError("must be a device, as in cuda:0")


def address_and_port(value: Any) -> list[Any]:
    host, port = _parts(value, 2)
    return [address(host), PORT(port)]


def ports(value: Any) -> tuple[int, int]:
    first, last = _parts(value, 2)
    return PORT(first), PORT(last)


def peer(value: Any) -> list[Any]:
    """A machine as the others reach it."""
    host, where, port = _parts(value, 3)
    return [LABEL(host), address(where), PORT(port)]


def _parts(value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"must be a list of {count}")
    return value


def setting(value: Any) -> Any:
    """What a setting may be before config/ looks at it: a plain value, or a list of numbers."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return several(number, MOST_RANKS)(value) if isinstance(value, list) else text(MOST_PATH)(value)


def arguments(value: Any) -> list[str]:
    found: list[str] = several(text(MOST_ARG_TEXT), MOST_ARGS)(value)
    if sum(map(len, found)) > MOST_ARG_TEXT:
        raise ValueError(f"must have at most {MOST_ARG_TEXT} characters")
    return found


def placement(value: Any) -> dict[str, Any]:
    """All ranks of a run, which must fit together: launch/local_ranks.py takes that for granted."""
    found: dict[str, Any] = table(_PLACEMENT, {"joins": None})(value)
    machines, hosts = found["machines"], found["hosts"]
    if not len(found["devices"]) == len(machines) == len(found["members"]):
        raise ValueError("must have a device, a machine and a member for each rank")
    if tuple(dict.fromkeys(machines)) != tuple(range(len(hosts))) or found["machine"] >= len(hosts):
        raise ValueError("must have machines that are numbered by their first ranks")
    return found


def link(value: Any) -> dict[str, Any]:
    """One machine's way to another: an error, or what was measured."""
    is_closed = isinstance(value, dict) and value.get("error")
    found: dict[str, Any] = table(_LINK, dict.fromkeys(_LINK if is_closed else ("error", "bytes_per_s")))(value)
    return {name: one for name, one in found.items() if one is not None}


def finite(value: Any) -> float:
    if not math.isfinite(found := number(value)) or found < 0:
        raise ValueError("must be a number of at least 0")
    return found


_PLACEMENT = {
    "devices": several(device, MOST_RANKS, 1),
    "machines": several(whole(0, MOST_MACHINES), MOST_RANKS, 1),
    "hosts": several(shown(100), MOST_MACHINES, 1),
    "members": several(shown(200), MOST_RANKS, 1),
    "store": address_and_port,
    "machine": whole(0, MOST_MACHINES),
    "joins": maybe(whole()),
}
_LINK = {
    "to": whole(0, MOST_MACHINES),
    "error": maybe(LINE),
    "round_trip_s": finite,
    "jitter_s": finite,
    "clock_s": number,
    "clock_error_s": finite,
    "bytes_per_s": maybe(finite),
}
_SETTINGS = mapped(NAME, setting, 200)
_CODE = mapped(shown(MOST_PATH), shown(100), 400)
_ORDER = table(
    {
        "script": text(MOST_PATH, is_empty_allowed=False),
        "args": arguments,
        "module": maybe(matching(r"\w+(\.\w+)*", "the name of a module")),
        "settings": _SETTINGS,
        "host": LABEL,
        "ports": maybe(ports),
        "run": maybe(NAME),
        "code": _CODE,
    },
    missing={"module": None, "run": None, "ports": None, "code": {}},
)
_DEVICE = {
    "device": device,
    "name": LABEL,
    "precisions": several(LABEL, 32),
    "auto": LABEL,
    "why": LINE,
    "memory_bytes": BYTES,
}
_FACTS = {
    **dict.fromkeys(("host", "os", "arch", "python"), LABEL),
    **dict.fromkeys(("torch", "numpy", "cuda", "nccl", "driver"), maybe(LABEL)),
    **dict.fromkeys(("memory_bytes", "memory_available_bytes", "disk_free_bytes"), BYTES),
    "uneven": table({"version": LABEL, "digest": LABEL}),
    "code": _CODE,
    "devices": several(table(_DEVICE, {"name": "", "auto": "", "why": "", "memory_bytes": None}), MOST_RANKS, 1),
    "clock": number,
}
_NO_FACT = {name: None for name in _FACTS if name not in ("devices", "clock")} | {"os": "?", "arch": "?", "code": {}}
_REPORT = {
    "time": number,
    "member": shown(200),
    "kind": LABEL,
    "message": LINES,
    "what": LINES,
    "place": maybe(LINE),
    "slot": whole(),
    "traceback": LINES,
}
_NO_REPORT = dict.fromkeys(_REPORT, "") | {"time": 0.0, "kind": "other", "place": None, "slot": 0}
_STATUS = {
    **dict.fromkeys(STATUS_KEYS, maybe(LINE)),
    **dict.fromkeys(STATUS_NUMBERS, maybe(number)),
    "device": LABEL,
    "machine": LABEL,
    "has_begun": flag,
}
NEEDS = {
    "go": ("settings",),
    "reach": ("machine",),
    "end": ("code",),
    "facts": ("port",),
    "role": ("version", "host"),
}


def status(value: Any) -> dict[str, Any]:
    """Where a run is (launch/control/listing.py), for `uneven status` on another machine."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    ranks = several(lambda one: _known(one, _STATUS), MOST_RANKS)(value.get("ranks", []))
    return {**_known(value, _STATUS), "ranks": ranks}


def _known(value: Any, fields: Fields) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    try:
        return {name: check(value[name]) for name, check in fields.items() if name in value}
    except ValueError as error:
        raise ValueError(f"has a field that {error}") from error


FILE_NAME = text(200, is_empty_allowed=False)
FILES: Fields = {  # what a rank asks of machines/file_service.py
    "do": LABEL,
    "key": NAME,
    "folder": text(MOST_PATH),
    "names": several(FILE_NAME, MOST_RANKS * 4),
    "places": several(shown(200), MOST_RANKS),
    "partial": text(300),
    "name": FILE_NAME,
    "size": whole(),
    "rank": INDEX,
    "why": shown(1000, keep="\n\t"),
}
HELLO: Fields = {"role": LABEL, "version": shown(40), "host": LABEL}  # the first message of a machine that joins
FROM_NODE: Fields = {
    "facts": table(_FACTS, _NO_FACT | {"uneven": {"version": "?", "digest": "?"}}),
    "port": PORT,
    "cannot": LINES,
    "reached": table(
        {
            "machine": whole(0, MOST_MACHINES),
            "links": several(link, MOST_MACHINES),
            "heard": several(whole(0, MOST_MACHINES), MOST_MACHINES),
        }
    ),
    "codes": several(maybe(whole(-256, 256)), MOST_RANKS),
    "stopped": several(INDEX, MOST_RANKS),
    "errors": mapped(matching(r"\d{1,4}", "the number of a rank"), table(_REPORT, _NO_REPORT), MOST_RANKS),
    "unused": several(INDEX, MOST_RANKS),
    "stop": maybe(whole(0, 64)),
    "left": LINES,
    "leave": NAME,
    "ranks": maybe(several(INDEX, MOST_RANKS)),
    "is_urgent": flag,
    "stays": NAME,
}
FROM_LEADER: Fields = {
    "order": _ORDER,
    "refused": LINES,
    "reach": several(peer, MOST_MACHINES, 1),
    "machine": whole(0, MOST_MACHINES),
    "go": placement,
    "settings": _SETTINGS,
    "watched": flag,
    "status": status,
    "give_up": INDEX,
    "dropped": LINES,
    "end": LINES,
    "code": whole(0, 255),
    "has_left": flag,
    "answer": NAME,
    "left": LINES,
}
