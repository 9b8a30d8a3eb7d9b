"""Control group limits: how many cores and how much memory a container may use.

Reads v1 and v2, from the process's own group up to the root, and takes the tightest limit. A file that is missing or
malformed counts as no limit. The root path is a parameter so that tests pass fake trees.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from uneven.hardware.optional import read_int, read_text

# v1 writes "no limit" as the largest page-aligned 63-bit number; nothing real is above 2**60 bytes.
_UNLIMITED_BYTES = 2**60


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The cgroup folders of this process, v2 (entries without a controller name) and v1, innermost first."""
    mount = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names == "":
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in names.split(","):
            base = mount / names if (mount / names).exists() else mount / controller
        else:
            continue
        # In a container without a cgroup namespace the path is the host's. Its folders do not exist under the mount,
        # and the mount itself is the container's own group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The CPU quota in cores (1.5 = one and a half), or None without a quota."""
    limits = []
    for folder in _folders(root, "cpu"):
        quota, period = [*(read_text(folder / "cpu.max") or "max 0").split(), "100000"][:2]
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
        quota_us, period_us = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us is not None and quota_us > 0 and period_us > 0:
            limits.append(quota_us / period_us)
    return min((limit for limit in limits if limit > 0), default=None)


def cpu_pressure_s(root: Path = Path("/")) -> float | None:
    """Seconds since boot in which at least one task was runnable but had no core; None where the kernel has no PSI.

    The process's own group where it keeps its own file (tasks of other containers are then not counted),
    otherwise the whole machine.
    """
    own_groups = (folder / "cpu.pressure" for folder in _folders(root, "cpu"))
    for path in (*own_groups, root / "proc/pressure/cpu"):
        match = re.search(r"^some .*\btotal=(\d+)", read_text(path) or "", re.MULTILINE)
        if match:
            return int(match[1]) / 1e6
    return None


def num_throttled(root: Path = Path("/")) -> int:
    """How many quota periods ended early so far because a group of this process had used up its CPU quota."""
    counts = [
        int(count)
        for folder in _folders(root, "cpu")
        for count in re.findall(r"^nr_throttled (\d+)$", read_text(folder / "cpu.stat") or "", re.MULTILINE)
    ]
    return sum(counts)


def _reclaimable(folder: Path) -> int:
    # Inactive page cache counts as used, but the kernel reclaims it on demand.
    lines = (read_text(folder / "memory.stat") or "").splitlines()
    fields = dict(line.split()[:2] for line in lines if " " in line.strip())
    number = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(number) if number.isdigit() else 0


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(limit, free memory under the tightest limit) in bytes; None without a limit."""
    limits, frees = [], []
    for folder in _folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = read_int(folder / limit_name)
            if limit is None or not 0 < limit < _UNLIMITED_BYTES:
                continue
            limits.append(limit)
            used = read_int(folder / used_name)
            if used is not None:
                frees.append(max(0, limit - max(0, used - _reclaimable(folder))))
    return min(limits, default=None), min(frees, default=None)
