import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import Device, parse_devices

from .fakes import write_tree

kinds = st.lists(st.sampled_from([Device("cpu"), Device("cpu", speed=0.4), Device("cuda", 0)]), max_size=12)


@given(kinds, st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=40))
def test_a_plan_is_disjoint_and_even_or_not_pinned(devices: list[Device], cores: list[int]) -> None:
    plan = assign_cores(devices, cores)
    assert len(plan.cores) == len(plan.threads) == len(devices)
    if len(devices) > len(cores):
        assert not plan.pinned
        assert not any(plan.cores)
        assert plan.note is not None
        assert "speeds mean nothing" in plan.note
        return
    assert plan.pinned
    assert plan.note is None
    used = list(itertools.chain.from_iterable(plan.cores))
    assert len(used) == len(set(used))
    assert set(used) <= set(cores)
    assert list(plan.threads) == [len(part) for part in plan.cores]
    assert all(plan.cores)
    on_cpu = [len(part) for part, device in zip(plan.cores, devices, strict=True) if device.kind == "cpu"]
    if on_cpu:
        assert max(on_cpu) - min(on_cpu) <= 1
        assert all(len(part) == 1 for part, device in zip(plan.cores, devices, strict=True) if device.kind == "cuda")
    if devices:
        assert len(used) == len(cores)


def test_one_cpu_rank_gets_everything() -> None:
    assert assign_cores([Device("cpu")], (3, 5, 7)).cores == ((3, 5, 7),)


def test_a_cuda_rank_reserves_one_core() -> None:
    plan = assign_cores(parse_devices("cuda:0,cpu,cpu"), range(8))
    assert [len(part) for part in plan.cores] == [1, 3, 4]


def sibling_tree(root: Path, pairs: dict[int, str]) -> Path:
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return write_tree(root, {folder.format(core): text + "\n" for core, text in pairs.items()})


def test_threads_of_one_physical_core_stay_together(tmp_path: Path) -> None:
    # The usual x86 numbering: 0-3 are the first threads, 4-7 the second ones of the same cores.
    root = sibling_tree(tmp_path, {core: f"{core % 4},{core % 4 + 4}" for core in range(8)})
    cores = available_cores(root, affinity=range(8))
    assert cores == (0, 4, 1, 5, 2, 6, 3, 7)
    assert assign_cores(parse_devices("cpu,cpu"), cores).cores == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_a_range_of_siblings_is_read(tmp_path: Path) -> None:
    root = sibling_tree(tmp_path, {core: "0-1" if core < 2 else "2-3" for core in range(4)})
    assert available_cores(root, affinity=[0, 1, 2, 3]) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "cpu\n"}, 8),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/cgroup.controllers": "cpu\n",
                "sys/fs/cgroup/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/job/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "garbage\n0::\n", "sys/fs/cgroup/unified/cpu.max": "what\n"}, 8),
    ],
)
def test_a_quota_limits_the_count(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert len(available_cores(write_tree(tmp_path, files), affinity=range(8))) == count


def test_a_quota_takes_different_physical_cores(tmp_path: Path) -> None:
    root = sibling_tree(tmp_path, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/unified/cpu.max": "200000 100000\n"}
    assert available_cores(write_tree(root, quota), affinity=range(4)) == (0, 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this OS has no affinity call")
def test_pin_moves_this_process_and_its_running_threads() -> None:
    # In a process of its own: pinning the test runner would slow every later test.
    code = """
import os, threading
from uneven.hardware.cores import available_cores, pin
core = available_cores()[0]
stop, ready, tid = threading.Event(), threading.Event(), []
def run():
    tid.append(threading.get_native_id()); ready.set(); stop.wait()
thread = threading.Thread(target=run); thread.start(); ready.wait()
assert pin([core]) is True
assert os.sched_getaffinity(0) == {core}
assert os.sched_getaffinity(tid[0]) == {core}
assert available_cores() == (core,)
assert pin([]) is False
assert pin([100000]) is False
stop.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
