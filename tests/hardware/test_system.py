from pathlib import Path

import pytest

from uneven.hardware.system import is_container, read_cpu, read_memory, read_system

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
    assert cpu.flags == ("avx512_bf16", "amx_bf16")


def test_an_arm_machine(tmp_path: Path) -> None:
    cpu = read_cpu(write_tree(tmp_path, {"proc/cpuinfo": ARM.format(0, "bf16", "0x41", "0xd0c")}))
    assert (cpu.model, cpu.flags) == (None, ("bf16",))


def test_an_empty_machine_is_all_unknown(tmp_path: Path) -> None:
    system = read_system(tmp_path)
    assert (system.cpu.model, system.memory_bytes, system.is_container) == (None, None, False)


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


@pytest.mark.parametrize("sign", [".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io/token"])
def test_container(tmp_path: Path, sign: str) -> None:
    assert not is_container(tmp_path)
    assert is_container(write_tree(tmp_path, {sign: ""}))


def test_this_machine() -> None:
    system = read_system()
    assert len(system.available_cores) >= 1
    assert system.os_name
    assert system.memory_bytes is None or system.memory_bytes > 0
