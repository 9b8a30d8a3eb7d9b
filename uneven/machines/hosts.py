"""The other machines of a run in a file, and how they are told to join: `uneven run --hosts hosts.toml train.py`.

    [[hosts]]
    address = "192.0.2.11"     # or a name that ssh knows
    user = "ann"               # all of the rest may be left out
    devices = "cuda:0,cuda:1"
    folder = "project"         # where the script is; the home folder
    python = "venv/bin/python" # in which uneven is installed; python3

Each gets `uneven join` over ssh, with keys and without questions. The token goes through ssh's stdin: a command line
can be read by every user of a machine. What a machine prints comes back with its name before each line.
"""

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from uneven.config.sources import load_toml
from uneven.errors import InputError

END_S = 5.0  # for a machine that was told to end


@dataclass(frozen=True)
class Host:
    address: str
    user: str | None = None
    devices: str | None = None
    folder: str | None = None
    python: str = "python3"
    name: str = ""  # for what it prints; its address where it has none

    @property
    def label(self) -> str:
        return self.name or self.address


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file; InputError that names the entry where one is wrong."""
    content = load_toml(path)
    unknown = set(content) - {"hosts"}
    entries = content.get("hosts")
    if unknown or not isinstance(entries, list) or not entries:
        found = f" and not {', '.join(sorted(unknown))}" if unknown else ""
        raise InputError(f'--hosts {path}: it must hold a list of [[hosts]]{found}, each with an address = "..."')
    return tuple(_read_host(entry, f"--hosts {path}, entry {number}") for number, entry in enumerate(entries, 1))


def join_command(host: Host, place: str, ssh: str) -> list[str]:
    """What starts `uneven join` there; the token is read from stdin."""
    words = [host.python, "-m", "uneven", "join", place, "--token-file", "-"]
    words += ["--devices", host.devices] if host.devices else []
    remote = f"exec {shlex.join(words)}"
    if host.folder:
        # A leading ~ is the shell's to expand.
        home, folder = ("~/", host.folder[2:]) if host.folder.startswith("~/") else ("", host.folder)
        remote = f"cd {home}{shlex.quote(folder)} && {remote}"
    where = host.address if host.user is None else f"{host.user}@{host.address}"
    options = ["-T", "-o", "BatchMode=yes"]  # nobody is there to type a password
    return [*shlex.split(ssh), *options, where, remote]


class StartedHosts:
    """`uneven join` on every host, from the start to `end()`; their lines are passed on with their names."""

    def __init__(
        self, hosts: Sequence[Host], place: str, token: str, ssh: str, show: Callable[[str], None] | None = None
    ) -> None:
        self._show = show or _print
        self._threads: list[threading.Thread] = []
        self._last = dict.fromkeys(range(len(hosts)), "")  # its last line, which says why it ended
        self._hosts, self._processes = tuple(hosts), list[subprocess.Popen[str]]()
        try:
            for number, host in enumerate(hosts):
                self._start(number, join_command(host, place, ssh), token)
        except BaseException:
            self.end(0.0)
            raise

    def failure(self) -> str | None:
        """About a host that has ended, which none does before the run; None while all are there."""
        for number, (host, process) in enumerate(zip(self._hosts, self._processes, strict=True)):
            if (code := process.poll()) is not None:
                self._threads[number].join(1.0)
                why = self._last[number] or "it printed nothing"
                return f"{host.label}: 'uneven join' over ssh ended with exit code {code}: {why}"
        return None

    def end(self, seconds: float = END_S) -> None:
        """Wait for them, then end what is left of ssh; the machines notice by themselves that the leader is gone."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
        for process in self._processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _start(self, number: int, command: list[str], token: str) -> None:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True,  # Ctrl-C is the leader's to interpret
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"--ssh {command[0]}: cannot be started ({error}); install ssh, or name it") from error
        self._processes.append(process)
        thread = threading.Thread(target=self._pass_on, args=(number, process), name="uneven-host", daemon=True)
        self._threads.append(thread)
        thread.start()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{token}\n")
            process.stdin.flush()  # and left open: some programs in the place of ssh end with it
        except OSError:
            return  # it has ended already, and `failure` says why

    def _pass_on(self, number: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.rstrip("\n")
            self._last[number] = text.strip() or self._last[number]
            self._show(f"[{self._hosts[number].label}] {text}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_host(entry: Any, where: str) -> Host:
    if isinstance(entry, str):
        user, _, address = entry.rpartition("@")
        entry = {"address": address, **({"user": user} if user else {})}
    known = {one.name: one for one in fields(Host)}
    if not isinstance(entry, dict):
        raise InputError(f"{where}: {entry!r} must be a table with an address")
    for name, value in entry.items():
        if name not in known:
            raise InputError(f"{where}: {name!r} is not known; allowed are {', '.join(known)}")
        if not isinstance(value, str):
            raise InputError(f"{where}: {name} = {value!r} must be text")
    if "address" not in entry and "name" in entry:
        entry = {**entry, "address": entry["name"]}
    address = entry.get("address", "")
    # What begins with a dash ssh would take for an option.
    if not address or address.startswith("-") or str(entry.get("user", "u")).startswith("-") or " " in address:
        raise InputError(f"{where}: address = {address!r} must be an address, or a name that ssh knows")
    return Host(**entry)
