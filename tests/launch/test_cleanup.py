"""Nothing stays behind: processes in any state, and folders of launchers that are gone."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.launch.fake_processes import local_cpus
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch import cleanup
from uneven.launch.processes import describe_exit
from uneven.train.rank_info import Generation


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def folder_of(home: Path, pid: int, space: int | None = None) -> Path:
    space = cleanup.pid_namespace() if space is None else space
    folder = home / f"uneven-{space}-{pid}-abc"
    folder.mkdir()
    (folder / "payload").write_text("data")
    return folder


def test_only_folders_of_dead_launchers_of_our_own_are_swept(tmp_path: Path, dead_pid: int) -> None:
    stale = folder_of(tmp_path, dead_pid)
    kept = [folder_of(tmp_path, os.getpid()), folder_of(tmp_path, dead_pid, space=1), tmp_path / "uneven-mine"]
    kept[2].mkdir()
    cleanup.remove_stale_runs(tmp_path)
    assert not stale.exists()
    assert all(folder.exists() for folder in kept)


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A process that names a folder in its command, as ranks do."""
    folder = tmp_path / "uneven-run"
    folder.mkdir()
    command = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()", str(folder)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until then its command may not be there to read yet
        yield folder, process
        process.kill()


@pytest.mark.parametrize(("given", "level"), [({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "INFO"}, "INFO")])
def test_ranks_whose_launcher_is_lost_print_no_frames_of_torch(
    given: dict[str, str], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store warned with a stack of C++ on each of them, beside our one line; a level of the user's own is kept."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, env, **__: started.append(env))
    local_cpus(tmp_path, 2)
    assert [env["TORCH_CPP_LOG_LEVEL"] for env in started] == [level] * 2


WITH_SEMAPHORE = """
import multiprocessing, signal, subprocess, sys
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("forkserver").Lock()
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print(child.pid, resource_tracker._resource_tracker._pid, lock._semlock.name.lstrip("/"), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_killed_ranks_semaphores_are_removed_with_its_processes(is_stopped: bool) -> None:
    """Those of its loader processes stayed in shared memory: what removes them was killed, too."""
    command = [sys.executable, "-W", "ignore:resource_tracker:UserWarning", "-c", WITH_SEMAPHORE]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, tracker, name = process.stdout.readline().split()
        others = [psutil.Process(int(pid)) for pid in (child, tracker)]
        assert (cleanup.SHARED_MEMORY / f"sem.{name}").exists()
        if is_stopped:
            os.killpg(process.pid, signal.SIGSTOP)
        cleanup.end_session(process.pid)
        assert process.wait(30) == -signal.SIGKILL
        _, left = psutil.wait_procs(others, 30)
    assert left == []
    assert not (cleanup.SHARED_MEMORY / f"sem.{name}").exists()


def test_a_stopped_rank_is_ended_by_whoever_cleans_up(
    sleeper: tuple[Path, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, process = sleeper
    (folder / "pid-0").write_text(str(process.pid))
    (folder / "pid-1").write_text(str(os.getpid()))  # never oneself
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(cleanup, "_live", {folder})
    cleanup.end_all_runs()
    assert process.wait(100) == -signal.SIGKILL
    assert not folder.exists()


def test_a_number_that_went_to_another_process_is_left_alone(
    sleeper: tuple[Path, "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    _, process = sleeper
    other = tmp_path / "uneven-other"
    other.mkdir()
    (other / "pid-0").write_text(str(process.pid))
    cleanup._end_ranks(other)
    assert process.poll() is None
    assert psutil.pid_exists(process.pid)


def test_a_stopped_process_is_told_apart_and_ended(tmp_path: Path) -> None:
    ranks = local_cpus(tmp_path, 1)
    assert not ranks.stopped()
    os.kill(ranks.pids[0], signal.SIGSTOP)
    os.waitpid(ranks.pids[0], os.WUNTRACED)
    assert ranks.stopped() == {0}
    ranks.end()
    assert not ranks.stopped()
    (code,) = ranks.exit_codes()
    assert code == -signal.SIGKILL
    assert describe_exit(code) == "was ended by SIGKILL"
    ranks.end()  # once more does no harm


def test_a_process_that_takes_the_place_of_another_leaves_as_many_files(tmp_path: Path) -> None:
    roster, members = Roster.on_one_machine(parse_devices("cpu")), ("vm/cpu/a",)
    ranks = local_cpus(tmp_path, 1)
    try:
        for lost in range(2):
            ranks.give_up(lost)
            (tmp_path / f"result-{lost}").mkdir(exist_ok=True)
            (tmp_path / f"error-{lost}.json").write_text("{}")
            assert ranks.restart(lost, lost + 1, Generation(0, roster, members)) is not None
        assert [path.name for path in tmp_path.glob("*.json")] == ["plan-2.json"]
        assert not (tmp_path / "result-1").exists()
    finally:
        ranks.end()


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert describe_exit(-99) == "was ended by signal 99"


def test_a_rank_that_is_cut_off_from_a_living_launcher_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took the launcher for dead, ended the other ranks and removed their folder."""
    happened: list[object] = []
    monkeypatch.setattr(cleanup.time, "sleep", lambda _: happened.append("the launcher is looked at"))
    monkeypatch.setattr(cleanup.os, "_exit", happened.append)
    monkeypatch.setattr(cleanup, "_end_ranks", lambda _: happened.append("all are ended"))
    cleanup.end_cut_off_rank(lambda error: happened.append(str(error)))
    assert happened == ["the launcher is looked at", "its connection to the launcher is lost", 1]


def test_the_last_rank_of_a_launcher_that_was_killed_removes_the_folder(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended because its machine was lost to the others, before its thread had seen that the launcher was gone."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(cleanup.os, "_exit", end)
    folder = folder_of(tmp_path, dead_pid)
    with pytest.raises(SystemExit, match="7"):
        cleanup.end_rank(folder, os.getppid(), 7)
    assert folder.exists()
    with pytest.raises(SystemExit, match="1"):
        cleanup.end_rank(folder, dead_pid, 7)
    assert not folder.exists()


def test_one_rank_alone_ends_the_others_of_a_launcher_that_was_killed(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that ended each other at the same moment left the folder. What a rank had on disk goes with it."""
    (home := tmp_path / "shm").mkdir()
    folder = folder_of(home, dead_pid)
    monkeypatch.setattr(cleanup, "_live", set())
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(cleanup, "temporary_folder", lambda: tmp_path)
    scratch = cleanup.make_private_folder(is_on_disk=True)
    tried: list[bool] = []

    def end_others(path: Path) -> None:
        with pytest.raises(BlockingIOError):  # another rank that comes now waits here
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried.append(True)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(cleanup, "_end_ranks", end_others)
    monkeypatch.setattr(cleanup.os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        cleanup.end_orphaned_run(folder)
    assert tried
    assert not folder.exists()
    assert not scratch.exists()
