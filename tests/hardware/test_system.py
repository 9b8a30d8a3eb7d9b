import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from uneven.hardware.container import Surroundings, docker_answers, read_container, read_docker_version, read_wsl
from uneven.hardware.cpumodel import read_cpu
from uneven.hardware.system import read_memory, read_system

from .fakes import write_tree

X86 = """processor\t: {0}
vendor_id\t: GenuineIntel
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: {1}
core id\t\t: {2}
flags\t\t: fpu sse2 avx512f avx512_bf16 amx_bf16

"""
ARM = """processor\t: {0}
BogoMIPS\t: 243.75
Features\t: fp asimd {1}
CPU implementer\t: {2}
CPU part\t: {3}

"""


def test_an_x86_machine(tmp_path: Path) -> None:
    cpuinfo = "".join(X86.format(thread, thread % 2, thread // 4) for thread in range(8))
    cpu = read_cpu(write_tree(tmp_path, {"proc/cpuinfo": cpuinfo}))
    assert cpu.model == "Intel(R) Xeon(R) Platinum 8480+"
    assert (cpu.sockets, cpu.cores, cpu.threads) == (2, 4, 8)
    assert cpu.flags == ("avx512_bf16", "amx_bf16")


@pytest.mark.parametrize(
    ("implementer", "part", "model"),
    [
        ("0x41", "0xd0c", "Neoverse-N1"),
        ("0x41", "0xd49", "Neoverse-N2"),
        ("0x41", "0xd40", "Neoverse-V1"),
        ("0x41", "0xd4f", "Neoverse-V2"),
        ("0x41", "0xd08", "Cortex-A72"),
        ("0x41", "0xd0b", "Cortex-A76"),
        ("0x61", "0x022", "Apple"),
        ("0x51", "0x800", "Qualcomm part 0x800"),
        ("0x99", "0x001", "ARM part 0x001"),
        ("what", "0x001", "ARM part 0x001"),
    ],
)
def test_arm_numbers_become_names(tmp_path: Path, implementer: str, part: str, model: str) -> None:
    text = ARM.format(0, "bf16", implementer, part)
    cpu = read_cpu(write_tree(tmp_path, {"proc/cpuinfo": text}))
    assert cpu.model == model
    assert cpu.flags == ("bf16",)


def test_topology_from_sys(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "".join(ARM.format(n, "", "0x41", "0xd0c") for n in range(4))}
    for core in range(4):
        files[f"sys/devices/system/cpu/cpu{core}/topology/physical_package_id"] = "0\n"
        files[f"sys/devices/system/cpu/cpu{core}/topology/core_id"] = f"{core // 2}\n"
    cpu = read_cpu(write_tree(tmp_path, files))
    assert (cpu.sockets, cpu.cores, cpu.threads) == (1, 2, 4)


def test_an_empty_machine_is_all_unknown(tmp_path: Path) -> None:
    system = read_system(tmp_path, environ={})
    assert system.cpu.model is None
    assert system.memory_bytes is None
    assert system.os_name is None
    assert system.kernel is None
    assert system.surroundings.container is None
    assert system.surroundings.docker_engine is False


MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    800 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1000 * 1024, 800 * 1024, False)),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cgroup.controllers": "memory\n",
                "sys/fs/cgroup/memory.max": "409600\n",
                "sys/fs/cgroup/memory.current": "102400\n",
                "sys/fs/cgroup/memory.stat": "anon 0\ninactive_file 2400\n",
            },
            (409600, 309600, True),
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            },
            (1000 * 1024, 800 * 1024, False),
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/x\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "500000\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "600000\n",
            },
            (500000, 0, True),
        ),
    ],
)
def test_memory_respects_the_cgroup(tmp_path: Path, files: dict[str, str], expected: tuple[int, int, bool]) -> None:
    assert read_memory(write_tree(tmp_path, {"proc/meminfo": MEMINFO} | files)) == expected


@pytest.mark.parametrize(
    ("release", "wsl"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", 2),
        ("4.4.0-19041-Microsoft", 1),
        ("6.1.0-18-amd64", None),
    ],
)
def test_wsl(tmp_path: Path, release: str, wsl: int | None) -> None:
    assert read_wsl(write_tree(tmp_path, {"proc/sys/kernel/osrelease": release})) == wsl


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"container": "lxc"}, "lxc"),
        ({"proc/1/environ": "A=1\0container=systemd-nspawn\0"}, {}, "systemd-nspawn"),
        ({"proc/1/cgroup": "0::/docker/0123\n"}, {}, "docker"),
        ({"proc/1/cgroup": "0::/kubepods.slice/x\n"}, {}, "kubernetes"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, None),
        ({"proc/version": "Linux version 4.4.0 gVisor", ".dockerenv": ""}, {}, "gVisor"),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str | None) -> None:
    assert read_container(write_tree(tmp_path, files), environ) == kind


def test_os_release(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n'})
    assert read_system(root, environ={}).os_name == "Debian GNU/Linux 12"


@contextmanager
def engine_at(path: Path, answer: bytes, request: bytes) -> Iterator[None]:
    """A Docker engine that gives this answer to the first request, which must begin like this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)
        asked: list[bytes] = []

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(256))
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(30)
        assert asked[0].startswith(request)


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets here")
@pytest.mark.parametrize(("answer", "expected"), [(b"HTTP/1.0 200 OK\r\n\r\nOK", True), (b"", False)])
def test_a_docker_engine_answers_or_not(tmp_path: Path, answer: bytes, expected: bool) -> None:
    path = tmp_path / "d.sock"
    with engine_at(path, answer, b""):
        assert docker_answers(path, timeout_s=30) is expected


def test_the_version_of_docker_is_that_of_the_engine_else_of_the_client(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'Docker version 28.2.2, build e6534b4'\n")
    client.chmod(0o755)
    assert read_docker_version(Surroundings(None, None, str(client), False)) == "28.2.2"
    assert read_docker_version(Surroundings(None, None, None, False)) is None
    assert read_docker_version(Surroundings(None, None, str(tmp_path / "gone"), False)) is None
    body = b'{"Components": [{"Name": "Engine", "Version": "1"}], "Version": "29.1.0"}'
    path = tmp_path / "d.sock"
    with engine_at(path, b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body, b"GET /version "):
        both = Surroundings(None, None, str(client), True)
        assert read_docker_version(both, environ={"DOCKER_HOST": f"unix://{path}"}, timeout_s=30) == "29.1.0"


def test_a_docker_socket_that_is_silent_or_dead_is_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    assert docker_answers(path) is False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        assert docker_answers(path, timeout_s=0.05) is False
        server.listen(1)
        assert docker_answers(path, timeout_s=0.05) is False


def test_this_machine_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    system = read_system()
    assert len(system.available_cores) >= 1
    if system.is_linux:
        assert system.memory_bytes is not None
        assert system.memory_bytes > 0
