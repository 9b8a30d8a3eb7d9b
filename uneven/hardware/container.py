"""Detect WSL, the kind of container this process runs in, and a usable Docker engine. Used by system.py.

The signs are files and variables that the container runtime creates. The only request is a ping of the Docker socket,
with a timeout.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from uneven.hardware.optional import read_text


@dataclass(frozen=True)
class Surroundings:
    """Virtualization around this process; `wsl` is 1 or 2, `container` a name such as docker."""

    wsl: int | None
    container: str | None
    docker_client: str | None
    docker_engine: bool


def read_wsl(root: Path = Path("/")) -> int | None:
    """1 or 2 under the Windows Subsystem for Linux, else None."""
    release = read_text(root / "proc/sys/kernel/osrelease") or read_text(root / "proc/version") or ""
    if "microsoft" not in release.lower():
        return None
    # WSL 1 emulates system calls and reports 4.4.0-19041-Microsoft; WSL 2 is a real kernel of 4.19 or newer.
    return 2 if "WSL2" in release or "microsoft-standard" in release else 1


def read_container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str | None:
    """The kind of container this process runs in, or None."""
    # gVisor first: it runs under docker or kubernetes, and its emulated kernel matters most to a user.
    if "gvisor" in (read_text(root / "proc/version") or "").lower():
        return "gVisor"
    if environ.get("KUBERNETES_SERVICE_HOST") or (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / ".singularity.d").exists():
        return "apptainer"
    named = environ.get("container") or _first_variable(root / "proc/1/environ", "container")
    if named:
        return named
    groups = (read_text(root / "proc/1/cgroup") or "") + (read_text(root / "proc/self/cgroup") or "")
    for sign, kind in (
        ("kubepods", "kubernetes"),
        ("libpod", "podman"),
        ("docker", "docker"),
        ("lxc", "lxc"),
    ):
        if re.search(rf"[/:.-]{sign}|^{sign}", groups, re.MULTILINE):
            return kind
    return None


def _first_variable(path: Path, name: str) -> str | None:
    # Readable by root only; for other users this sign is absent.
    for entry in (read_text(path) or "").split("\0"):
        if entry.startswith(f"{name}="):
            return entry.partition("=")[2] or None
    return None


def docker_answers(path: Path, timeout_s: float = 1.0) -> bool:
    """Whether a Docker engine answers a ping on this socket; False after the timeout, never an exception."""
    return _ask_docker(path, "/_ping", timeout_s, most=64).startswith(b"HTTP/1.")


def _ask_docker(path: Path, what: str, timeout_s: float, most: int) -> bytes:
    """The beginning of the engine's answer, or nothing; the timeout is for each part of it, and `most` ends it."""
    family = getattr(socket, "AF_UNIX", None)
    if family is None or not path.exists():
        return b""
    answer = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(f"GET {what} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
            while len(answer) < most and (part := connection.recv(most - len(answer))):
                answer += part
    except (OSError, ValueError):
        pass
    return answer


def read_docker_version(
    surroundings: Surroundings, root: Path = Path("/"), environ: Mapping[str, str] = os.environ, timeout_s: float = 2.0
) -> str | None:
    """The engine's version where it answers, else that of the client, else None. For `uneven diagnose` alone.

    Not part of read_surroundings, because the client is a program to start and every run reads its machine.
    """
    if surroundings.docker_engine:
        body = _ask_docker(_docker_socket(root, environ), "/version", timeout_s, most=2**16).partition(b"\r\n\r\n")[2]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(body)["Version"])
    if surroundings.docker_client is not None:
        command = [surroundings.docker_client, "--version"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
            match = re.search(r"version v?(\d[\w.+-]*)", done.stdout)
            return match[1] if match else None
    return None


def _docker_socket(root: Path, environ: Mapping[str, str]) -> Path:
    host = environ.get("DOCKER_HOST", "")
    return Path(host.removeprefix("unix://")) if host.startswith("unix://") else root / "var/run/docker.sock"


def read_surroundings(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Surroundings:
    """WSL, container, Docker client and engine."""
    return Surroundings(
        wsl=read_wsl(root),
        container=read_container(root, environ),
        docker_client=shutil.which("docker", path=environ.get("PATH", "")),
        docker_engine=docker_answers(_docker_socket(root, environ)),
    )
