"""The verdict on interference, on made-up /proc files and on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from uneven.hardware.interference import (
    MAX_PRESSURE_SHARE,
    Counters,
    Interference,
    measure_interference,
    read_counters,
)

from .fakes import write_tree

SELF, CHILD, GRANDCHILD, STRANGER = 10, 20, 30, 40


def write_proc(
    root: Path,
    cores: tuple[tuple[int, int], ...] = ((0, 0), (0, 0)),  # (busy, stolen) ticks of each core
    processes: dict[int, tuple[int, int]] | None = None,  # pid: (parent, ticks)
    pressure_us: int | None = 0,
) -> Path:
    stat = ["cpu  1 1 1 1 1 1 1 1 0 0"]
    # Interrupt time (the sixth and seventh field) is never counted: it grows with our own loopback traffic.
    stat += [f"cpu{core} {busy} 0 1 500 3 9000 9000 {stolen} 0 0" for core, (busy, stolen) in enumerate(cores)]
    files = {"proc/stat": "\n".join([*stat, "ctxt 12345", ""])}
    for pid, (parent, ticks) in (processes or {SELF: (1, 0)}).items():
        fields = ["0"] * 50
        fields[0], fields[1], fields[11] = "S", str(parent), str(ticks)
        files[f"proc/{pid}/stat"] = f"{pid} (a (strange) name) {' '.join(fields)}\n"
    if pressure_us is not None:
        files["proc/pressure/cpu"] = (
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={pressure_us}\nfull avg10=0.00 total=9\n"
        )
    return write_tree(root, files)


def read(root: Path, time_s: float, cores: tuple[int, ...] = (0, 1)) -> Counters:
    return read_counters(SELF, root, cores, time_s)


@pytest.fixture(autouse=True)
def hundred_ticks_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)


def between(tmp_path: Path, **end: object) -> Interference:
    """Ten seconds from an idle beginning to the given end."""
    begin = read(write_proc(tmp_path / "begin", **{**end, **IDLE}), 100.0)  # type: ignore[arg-type]
    return Interference.between(begin, read(write_proc(tmp_path / "end", **end), 110.0))  # type: ignore[arg-type]


IDLE = {"cores": ((0, 0), (0, 0)), "processes": {SELF: (1, 0), STRANGER: (1, 0)}}


def test_a_quiet_machine_is_undisturbed(tmp_path: Path) -> None:
    span = between(tmp_path, cores=((1000, 1), (1000, 0)), processes={SELF: (1, 1995)})
    assert span.seconds == 10.0
    assert span.stolen_share == pytest.approx(1 / 2001)
    assert span.foreign_cores == pytest.approx(0.005)
    assert not span.is_disturbed
    assert span.describe().startswith("Undisturbed: 0.0% of the CPU time stolen")


def test_stolen_time_is_disturbance_without_other_processes(tmp_path: Path) -> None:
    span = between(tmp_path, cores=((730, 270), (730, 270)), processes={SELF: (1, 1460)})
    assert span.stolen_share == pytest.approx(0.27)
    assert span.is_disturbed
    assert span.describe() == "Disturbed: the hypervisor took 27% of the CPU time."


def test_stolen_time_of_an_almost_idle_machine_delays_nothing(tmp_path: Path) -> None:
    span = between(tmp_path, cores=((40, 10), (0, 0)), processes={SELF: (1, 40)})
    assert span.stolen_share == pytest.approx(0.2)
    assert not span.is_disturbed


def test_pressure_of_our_own_ranks_is_no_disturbance(tmp_path: Path) -> None:
    """Four ranks on two cores wait for each other all the time; no other process runs."""
    processes = {SELF: (1, 10), CHILD: (SELF, 1000), GRANDCHILD: (CHILD, 990)}
    span = between(tmp_path, cores=((1000, 0), (1000, 0)), processes=processes, pressure_us=9_900_000)
    assert span.foreign_cores == pytest.approx(0.0)
    assert not span.is_disturbed


def test_a_foreign_process_that_competes_is_disturbance(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin"), 0.0)
    processes = {SELF: (1, 0), CHILD: (SELF, 1000), STRANGER: (1, 1000)}
    end = read(write_proc(tmp_path / "end", ((1000, 0), (1000, 0)), processes, 9_000_000), 10.0)
    span = Interference.between(begin, end)
    assert span.foreign_cores == pytest.approx(1.0)
    assert span.foreign_share == pytest.approx(0.5)
    assert span.pressure_share == pytest.approx(0.9)
    assert span.is_disturbed
    assert span.describe() == (
        "Disturbed: other processes kept 1.0 of 2 cores busy and tasks waited for a core 90% of the time."
    )


def test_a_foreign_process_that_finds_a_free_core_is_no_disturbance(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin"), 0.0)
    end = read(write_proc(tmp_path / "end", ((1000, 0), (1000, 0)), {SELF: (1, 1000)}, 100_000), 10.0)
    span = Interference.between(begin, end)
    assert span.foreign_cores == pytest.approx(1.0)
    assert span.pressure_share is not None
    assert span.pressure_share < MAX_PRESSURE_SHARE
    assert not span.is_disturbed


def test_without_pressure_files_other_processes_are_not_judged(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin", pressure_us=None), 0.0)
    root = write_proc(tmp_path / "end", ((1000, 0), (1000, 0)), {SELF: (1, 1000)}, None)
    span = Interference.between(begin, read(root, 10.0))
    assert (span.pressure_share, span.foreign_cores) == (None, 1.0)
    assert not span.is_disturbed
    assert span.describe().startswith("Undisturbed")


def test_only_our_cores_count(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin"), 0.0, cores=(1,))
    end = read(write_proc(tmp_path / "end", ((900, 100), (1000, 0)), {SELF: (1, 1000)}), 10.0, cores=(1,))
    span = Interference.between(begin, end)
    assert (span.num_cores, span.stolen_cores, span.foreign_cores) == (1, 0.0, 0.0)


def test_renumbered_cores_count_all(tmp_path: Path) -> None:
    assert read(write_proc(tmp_path, ((300, 0), (100, 0))), 0.0, cores=(17, 18)).busy_s == pytest.approx(4.02)


def test_the_pressure_of_our_own_group_comes_first(tmp_path: Path) -> None:
    root = write_proc(tmp_path, pressure_us=5_000_000)
    write_tree(
        root,
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu\n",
            "sys/fs/cgroup/box/cpu.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\n",
        },
    )
    assert read(root, 0.0).pressure_s == 2.0


def test_a_quota_of_our_own_is_no_foreign_load(tmp_path: Path) -> None:
    """A stopped group waits too, and other containers of the host use other cores meanwhile."""
    roots = [
        write_proc(tmp_path / "begin"),
        write_proc(tmp_path / "end", ((1000, 0), (1000, 0)), {SELF: (1, 500)}, 9_000_000),
    ]
    for root, count in zip(roots, (3, 70), strict=True):
        write_tree(
            root,
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cgroup.controllers": "cpu\n",
                "sys/fs/cgroup/cpu.stat": f"usage_usec 1\nnr_periods 100\nnr_throttled {count}\n",
            },
        )
    span = Interference.between(read(roots[0], 0.0), read(roots[1], 10.0))
    assert span.is_throttled
    assert span.pressure_share == pytest.approx(0.9)
    assert not span.is_disturbed


def test_what_is_not_known_never_disturbs(tmp_path: Path) -> None:
    span = Interference.between(read(tmp_path, 0.0), read(tmp_path, 10.0))
    assert span.stolen_share is span.foreign_share is span.pressure_share is None
    assert not span.is_disturbed
    assert span.describe() == "Interference is not known on this machine."


def test_counters_that_stay_zero_are_not_known(tmp_path: Path) -> None:
    write_tree(tmp_path, {"proc/stat": "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n"})
    assert read(tmp_path, 0.0).busy_s is None


def test_a_very_short_span_is_not_judged(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin"), 0.0)
    end = read(write_proc(tmp_path / "end", ((2, 2), (2, 2)), pressure_us=50_000), 0.05)
    span = Interference.between(begin, end)
    assert span.stolen_share is None
    assert not span.is_disturbed
    assert "shorter than 0.2 s" in span.describe()


def test_a_process_that_left_the_tree_gives_no_negative_time(tmp_path: Path) -> None:
    begin = read(write_proc(tmp_path / "begin", processes={SELF: (1, 0), CHILD: (SELF, 500)}), 0.0)
    end = read(write_proc(tmp_path / "end", ((100, 0), (0, 0)), processes={SELF: (1, 100), CHILD: (1, 500)}), 10.0)
    span = Interference.between(begin, end)
    assert span.foreign_cores == pytest.approx(0.1)


def test_the_result_is_json_with_its_verdict(tmp_path: Path) -> None:
    span = between(tmp_path, cores=((730, 270), (730, 270)), processes={SELF: (1, 1460)})
    written = json.loads(json.dumps(span.to_json()))
    assert written["is_disturbed"] is True
    assert written["stolen_share"] == pytest.approx(0.27)


def test_this_machine_counts_ended_and_living_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"
    begin = read_counters()
    command = [sys.executable, "-c", burn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = read_counters()
        child.communicate("")
    ended = read_counters()
    assert begin.own_cpu_s is not None
    assert living.own_cpu_s is not None
    assert ended.own_cpu_s is not None
    assert living.own_cpu_s - begin.own_cpu_s >= 0.25
    assert ended.own_cpu_s >= living.own_cpu_s - 0.05


def test_a_span_has_its_interference_after_its_end() -> None:
    with measure_interference() as span:
        pass
    assert span.interference.num_cores == len(os.sched_getaffinity(0))
