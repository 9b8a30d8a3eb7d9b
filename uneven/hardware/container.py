"""Detect WSL, the kind of container this process runs in, and a usable Docker engine. Used by system.py.

The signs are files and variables that the container runtime creates. The only request is a ping of the Docker socket,
with a timeout.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from uneven.hardware.cgroup import read_text


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
    family = getattr(socket, "AF_UNIX", None)
    if family is None or not path.exists():
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.")
    except (OSError, ValueError):
        return False


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
