"""How the machines of a run find each other, as the user said it: checked before anything listens or connects."""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from uneven.errors import InputError
from uneven.machines.door import Ports
from uneven.machines.hosts import Host
from uneven.machines.wire import new_token

TOKEN = "UNEVEN_TOKEN"
MOST_NODES = 1024
WAIT_S = 600.0  # for the fewest machines
MORE_S = 30.0  # for more of them, once the fewest are there
SHORTEST_TOKEN = 8


@dataclass(frozen=True)
class LeadOptions:
    """What `uneven run` was told about other machines. `fewest` and `most` count the leader's own machine."""

    fewest: int
    most: int
    token: str
    shows_token: bool = True  # the leader has made it, so whoever started it must be told
    bind: str | None = None
    port: int | None = None  # of the door
    ports: Ports | None = None  # of everything that listens
    wait: float | None = None
    skip: tuple[str, ...] = ()  # the setting `skip`: checks that the user leaves out
    hosts: tuple[Host, ...] = ()
    ssh: str = "ssh"

    @property
    def others(self) -> str:
        """How many machines are to join, in words."""
        fewest, most = self.fewest - 1, self.most - 1
        if (fewest, most) == (1, 1):
            return "one other machine"
        return f"{most if fewest == most else f'{fewest}-{most}'} other machines"

    @property
    def door_ports(self) -> Ports | None:
        return self.ports if self.port is None else (self.port, self.port)

    @property
    def wait_s(self) -> float:
        return WAIT_S if self.wait is None else self.wait

    @property
    def more_s(self) -> float:
        return MORE_S if self.wait is None else self.wait


def parse_nodes(text: str) -> tuple[int, int]:
    """'2' or '2-4' -> the fewest and the most machines."""
    match = re.fullmatch(r"(\d{1,6})(?:[-:](\d{1,6}))?", text.strip())
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most <= MOST_NODES:
        raise InputError(
            f"--nodes {text} must be a number of machines, this one included, as 2, or the fewest and the most, as 2-4"
        )
    return fewest, most


def parse_ports(ports: str | None, flag: str = "--ports") -> Ports | None:
    """'29400-29419' -> the first and the last port; None where the system chooses."""
    if ports is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", ports.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise InputError(
            f"{flag} {ports} must be within 1 and 65535, as in {flag} 29400{'-29419' * (flag == '--ports')}"
        )
    return first, last


def read_token(token: str | None, file: Path | None, environ: MutableMapping[str, str] | None = None) -> str | None:
    """The token that the user gave: by argument, file ('-': the first line of stdin) or variable; None without one.

    The variable is taken out of the environment: ranks and whatever the script starts need not know it.
    """
    environ = os.environ if environ is None else environ
    from_variable = environ.pop(TOKEN, None)
    if token is not None and file is not None:
        raise InputError("--token and --token-file: give one of them")
    if file is not None:
        try:
            token = sys.stdin.readline() if str(file) == "-" else file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--token-file {file}: cannot be read ({error})") from error
    found = from_variable if token is None else token
    if found is None:
        return None
    found = found.strip()
    if len(found) < SHORTEST_TOKEN or not found.isascii() or not found.isprintable() or " " in found:
        raise InputError(
            f"the token must be {SHORTEST_TOKEN} or more printable ASCII characters without spaces, as in: "
            "openssl rand -hex 16"
        )
    return found


def need_token(token: str | None) -> str:
    """InputError for a machine that joins without one."""
    if token is None:
        raise InputError(
            f"joining needs the leader's token: --token TOKEN, --token-file FILE or {TOKEN}=...; copy the line that it "
            "printed"
        )
    return token


def lead_options(
    *,
    nodes: str | None,
    hosts: tuple[Host, ...] | None,
    token: str | None,
    bind: str | None,
    port: int | None,
    ports: Ports | None,
    wait: float | None,
    ssh: str | None,
    skip: tuple[str, ...] = (),
    environ: Mapping[str, str] = os.environ,
) -> LeadOptions | None:
    """The options together; None where this machine trains alone. InputError where one of them has no effect."""
    if nodes is None and hosts is None:
        given: dict[str, object] = {"--bind": bind, "--port": port, "--ports": ports, "--wait": wait, "--ssh": ssh}
        given["--token or --token-file"] = token
        for flag, value in given.items():
            if value is not None:
                raise InputError(f"{flag} is for several machines: add --nodes N or --hosts FILE, or leave it out")
        return None
    if wait is not None and not 0 < wait < 1e9:
        raise InputError(f"--wait {wait:g} must be a number of seconds above 0")
    if port is not None:
        parse_ports(str(port), "--port")
    if ssh is not None and hosts is None:
        raise InputError("--ssh is for the machines of --hosts FILE: add it, or leave --ssh out")
    count = None if hosts is None else len(hosts) + 1
    fewest, most = (count, count) if nodes is None and count is not None else parse_nodes(nodes or "")
    if count is not None and not fewest <= count <= most:
        raise InputError(f"--nodes {nodes} with --hosts of {count - 1} machines: with this one they are {count}")
    if most == 1:
        return None
    return LeadOptions(
        fewest, most, token or new_token(), token is None, bind, port, ports, wait, skip, hosts or (),
        ssh or environ.get("UNEVEN_SSH") or "ssh",
    )  # fmt: skip
